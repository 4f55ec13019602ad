"""Makes an object from a configuration that Keras saved, and imports nothing that the configuration names.

`deserialize_keras_object` of Keras 2 imports the module of a class or function that it does not know, and runs what it
finds there; and a file may be somebody else's. So only classes and functions count that the program has already, or
that are of Keras, TensorFlow or tfmp; also in configurations within the configuration, as of schedules.
"""

import sys
from collections.abc import Iterable, Mapping
from types import ModuleType
from typing import Any

from tfmp.any_keras.which import OWN_PACKAGES, is_from


def object_of_config(
    keras: ModuleType,
    config: Any,  # noqa: ANN401 - what a file holds
    kinds: type | tuple[type, ...],
    own_classes: Iterable[object],
    custom_objects: Mapping[str, Any] | None = None,
) -> Any:  # noqa: ANN401 - an object of one of the kinds
    """Return the object that a configuration describes; an object that is not a configuration is returned unchanged.

    Args:
        keras: The package that the object is of: `keras` or `tf_keras`.
        config: What `keras.saving.serialize_keras_object` returned, in this or an older version of Keras.
        kinds: The base class of what may be described, or several.
        own_classes: The classes of Keras or tfmp that older formats name without a module.
        custom_objects: The user's classes, by their names.

    Raises:
        ValueError: A dictionary is no configuration; the class is not of these kinds; or it, or what a configuration
            within this one names, is neither registered, nor one of `custom_objects`, nor in an imported module.
    """
    if not isinstance(config, Mapping):
        return config
    allowed = " or ".join(kind.__name__ for kind in (kinds if isinstance(kinds, tuple) else (kinds,)))
    if not isinstance(config.get("class_name"), str) or not isinstance(config.get("config"), Mapping | None):
        raise ValueError(
            f"the dictionary of a {allowed} must be a configuration with class_name and config, got {config!r}."
        )
    found = _class_of(keras, config, own_classes, custom_objects)
    if found is None:
        raise _unknown(keras, config)
    for part in config.values():
        _refuse_to_import(keras, part, custom_objects)
    # What is registered need not be a class: any object with `from_config` can stand for one.
    if isinstance(found, type) and not issubclass(found, kinds):
        raise ValueError(f"the configuration names {_shown(config)}, where it must name a subclass of {allowed}.")
    # Under a name of its own, so that Keras does not look for another class.
    name = f"tfmp>found as {config['class_name']}"
    known = {**(custom_objects or {}), name: found}
    described = {**config, "class_name": name, "registered_name": name, "config": dict(config.get("config") or {})}
    return keras.saving.deserialize_keras_object(described, custom_objects=known)


def _class_of(
    keras: ModuleType,
    config: Mapping[str, Any],
    own_classes: Iterable[object],
    custom_objects: Mapping[str, Any] | None,
) -> Any:  # noqa: ANN401 - a class, or what stands for one
    name: str = config["class_name"]
    module = config.get("module")
    # The names of Keras' own classes are not registered; their configurations have None here.
    registered = config.get("registered_name", name)
    found = None if registered is None else keras.saving.get_registered_object(registered, custom_objects)
    if found is not None:
        return found
    if module is None:
        return next((each for each in own_classes if isinstance(each, type) and each.__name__ == name), None)
    package, *path = module.split(".")
    if package == "keras":
        # tf_keras has this name for itself, too. Public names need not be those of modules.
        public: Any = keras
        for part in (*path, name):
            public = getattr(public, part, None)
        if public is not None:
            return public
    # Not by `getattr`: a package may import what it is asked for.
    return vars(sys.modules[module]).get(name) if module in sys.modules else None


def _refuse_to_import(
    keras: ModuleType,
    value: Any,  # noqa: ANN401 - what a file holds
    custom_objects: Mapping[str, Any] | None,
) -> None:
    """Raise an error if `deserialize_keras_object` of Keras 2 would import a module for a part of a configuration."""
    if isinstance(value, Mapping) and "class_name" in value:
        module = value.get("module")
        may_be_imported = not isinstance(module, str) or is_from(OWN_PACKAGES | {"builtins"}, module)
        if not may_be_imported and module not in sys.modules:
            name = value.get("config") if _is_function(value) else value.get("registered_name", value["class_name"])
            if not isinstance(name, str) or keras.saving.get_registered_object(name, custom_objects) is None:
                raise _unknown(keras, value)
    if isinstance(value, Mapping | list | tuple):
        for each in value.values() if isinstance(value, Mapping) else value:
            _refuse_to_import(keras, each, custom_objects)


def _is_function(config: Mapping[str, Any]) -> bool:
    return bool(config["class_name"] == "function")


def _unknown(keras: ModuleType, config: Mapping[str, Any]) -> ValueError:
    return ValueError(
        f"the configuration names {_shown(config)}, which is neither registered with {keras.__name__} nor in a module "
        "that is imported: import it before, or pass it in custom_objects by its name."
    )


def _shown(config: Mapping[str, Any]) -> str:
    module, name = config.get("module"), config.get("config" if _is_function(config) else "class_name")
    return f"the class {name}" if module is None else f"{module}.{name}"
