"""A rebuilt model that has the class, the attributes and the settings of the model that it was rebuilt from."""

import functools
import inspect
import re
import types
from collections.abc import Mapping
from types import ModuleType
from typing import Any, TypeAlias

from tfmp.any_keras.configurations import object_of_config
from tfmp.any_keras.internals import (
    SET_BY_COMPILE,
    SET_BY_CONSTRUCTOR,
    compiled_with,
    put_dtype_policy,
    set_trainable_of_itself,
)
from tfmp.any_keras.which import is_keras2
from tfmp.recomputation.layers.layer import Recompute

#: A model or layer of any Keras.
_Model: TypeAlias = Any


def with_class_of(
    keras: ModuleType, model: _Model, rebuilt: _Model, replaced: Mapping[int, _Model], paths: list[str]
) -> _Model:
    """Return a rebuilt model as one of the class of the original, with its attributes, and compiled like it.

    The constructor of the class is not called: it would make layers of its own.

    Args:
        keras: The package of the models.
        model: The original.
        rebuilt: A plain functional or Sequential model.
        replaced: What stands in it for the models in the original that were rebuilt too, by the `id` of each.
        paths: The paths of the layers that are recomputed, for saving.
    """
    plain_class: Any = type(rebuilt)
    is_plain = type(model) is plain_class
    if not is_plain and type(model).call is not plain_class.call:
        raise _refusal(model, "its class has a `call` of its own, which need not call the layers in the same way")
    known = {*vars(rebuilt)} if is_keras2(keras) else {*vars(rebuilt), *SET_BY_COMPILE}
    added = [name for name in vars(model) if name not in known]
    names = list(vars(model))
    # A class may set attributes before it calls the constructor: their layers come first among the weights.
    constructed = names.index(SET_BY_CONSTRUCTOR) if SET_BY_CONSTRUCTOR in names else 0
    early = {name for name in names[:constructed] if name in added}
    # A class may do anything when it is asked to set an attribute.
    try:
        model_class: Any = type(model)
        result = rebuilt if is_plain else plain_class.__new__(recomputed_class(keras, model_class))
        _set(result, {name: vars(model)[name] for name in added if name in early}, model, replaced)
        if not is_plain:
            plain_class.__init__(result, *_arguments(keras, rebuilt), name=model.name)
            result._recomputed_paths = [*getattr(model, "_recomputed_paths", ()), *paths]
        _set(result, {name: vars(model)[name] for name in added if name not in early}, model, replaced)
        _set_settings(keras, result, model)
    except Exception as error:
        raise _refusal(model, f"{type(error).__name__}: {error}") from error
    if [id(weight) for weight in result.weights] != [id(weight) for weight in model.weights]:
        raise _refusal(model, "its weights would be others, or in another order")
    return result


def _refusal(model: _Model, why: str) -> TypeError:
    return TypeError(
        f"the model {model.name!r} is of the class {type(model).__name__} and cannot be rebuilt as one of it: {why}. "
        "Wrap its layers in tfmp.Recompute where they are made."
    )


def _arguments(keras: ModuleType, rebuilt: _Model) -> list[Any]:
    if not isinstance(rebuilt, keras.Sequential):
        return [rebuilt.input, rebuilt.output]
    # A Sequential model that was not built has no inputs yet.
    return [[*(getattr(rebuilt, "inputs", None) or ()), *rebuilt.layers]]


def _set(result: _Model, attributes: Mapping[str, Any], model: _Model, replaced: Mapping[int, _Model]) -> None:
    for name, value in attributes.items():
        if inspect.ismethod(value) and value.__self__ is model:
            setattr(result, name, types.MethodType(value.__func__, result))
        else:
            setattr(result, name, _with_replaced(value, {id(model): result, **replaced}))


def _with_replaced(value: Any, replaced: Mapping[int, _Model]) -> Any:  # noqa: ANN401 - any attribute of a user
    """Return a value, or one like it if it holds models in lists, tuples and dictionaries for which others stand."""
    if id(value) in replaced:
        return replaced[id(value)]
    if isinstance(value, dict):
        items = {key: _with_replaced(each, replaced) for key, each in value.items()}
        return items if any(items[key] is not value[key] for key in items) else value
    if isinstance(value, list) or type(value) is tuple:
        elements = [_with_replaced(each, replaced) for each in value]
        is_same = all(new is old for new, old in zip(elements, value, strict=True))
        return value if is_same else (tuple(elements) if type(value) is tuple else elements)
    return value


def _set_settings(keras: ModuleType, result: _Model, model: _Model) -> None:
    """Set what the constructor and `compile` have set in the original."""
    # The layers keep theirs, since both models share them.
    set_trainable_of_itself(result, model.trainable)
    if is_keras2(keras):
        put_dtype_policy(keras, result, model.dtype_policy)
    else:
        result.dtype_policy = model.dtype_policy
    compiled = compiled_with(model)
    if compiled is None:
        return
    settings = {**compiled, "optimizer": model.optimizer}
    if not is_keras2(keras):
        # If Keras was to wrap the optimizer, it has done so.
        settings["auto_scale_loss"] = False
    # Not the `compile` of the class, which may take other arguments. What it has set is among the attributes.
    keras.Model.compile(result, **settings)
    result.optimizer = model.optimizer


class RecomputedModel:
    """What a model with recomputed layers does in another way than others of its class: it saves which ones they are.

    Each such model is of a class that inherits from this one and from the class of the model without recomputation.
    """

    _keras: ModuleType
    #: The class of models that a subclass is made for.
    _plain_class: Any
    _recomputed_paths: list[str]

    def get_config(self) -> dict[str, Any]:
        """Return the configuration of the model without recomputation, and the paths of the recomputed layers."""
        plain: Any = object.__new__(self._plain_class)
        object.__setattr__(plain, "__dict__", vars(self))
        config = self._keras.saving.serialize_keras_object(plain)
        # Keras compiles the model that `from_config` returns.
        config.pop("compile_config", None)
        return {"model": config, "recomputed": list(self._recomputed_paths)}

    @classmethod
    def from_config(cls, config: dict[str, Any], custom_objects: dict[str, Any] | None = None) -> Any:  # noqa: ANN401
        """Make a model from a configuration that `get_config` returned."""
        # Not at the top of the file, because that module imports this one.
        from tfmp.recomputation.layers.model import layers_by_path, recompute_layers

        keras = cls._keras
        model = object_of_config(keras, config["model"], keras.Model, vars(keras.models).values(), custom_objects)
        layers = layers_by_path(cls._keras, model)
        # The configurations of some models contain those of their layers, which are recomputed then.
        plain = [path for path in config["recomputed"] if not isinstance(layers.get(path, None), Recompute | None)]
        return recompute_layers(model, *map(re.escape, plain)) if plain else model


@functools.cache
def recomputed_class(keras: ModuleType, plain: Any) -> Any:  # noqa: ANN401 - classes of Keras, which has no types
    """Return the class for models of a class some of whose layers are recomputed; `plain` may be such a class."""
    if issubclass(plain, RecomputedModel):
        return plain
    names = ("__doc__", "__module__", "__qualname__")
    attributes = {**{name: getattr(plain, name) for name in names}, "_keras": keras, "_plain_class": plain}
    made = type(plain.__name__, (RecomputedModel, plain), attributes)
    # All classes have one name in saved models: which one a model is of follows from its configuration.
    keras.saving.register_keras_serializable(package="tfmp", name="RecomputedModel")(made)
    return made
