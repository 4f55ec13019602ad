"""Which Keras an object is of, whose code it runs, and what serves it; without importing a Keras."""

import sys
from collections.abc import Iterable
from types import ModuleType
from typing import Any, Literal

import tensorflow as tf

from tfmp.environment import refuse_old_keras

#: The packages whose functions count as Keras' own: those that run when an optimizer of Keras takes a step.
OWN_PACKAGES = frozenset(("keras", "tf_keras", "tensorflow", "tfmp"))


def keras_of(value: object, base: str) -> ModuleType | None:
    """Return the package of Keras that an object is of, `keras` or `tf_keras`; None if it is of neither.

    `base` is what it must be an instance of: the name of a class in the package, such as "layers.Layer". Only packages
    that the program has imported are asked, since an object exists only if its Keras was imported.
    """
    for package in ("keras", "tf_keras"):
        keras = found = sys.modules.get(package)
        for name in base.split("."):
            # What is imported may be a directory that an uninstalled Keras left behind.
            found = getattr(found, name, None)
        if isinstance(found, type) and isinstance(value, found):
            return keras
    return None


def loaded_keras2() -> list[ModuleType]:
    """Return the packages of Keras 2 that the program has imported."""
    found = [sys.modules.get(package) for package in ("keras", "tf_keras")]
    # What is imported may be a directory that an uninstalled Keras left behind, which has no version.
    return [keras for keras in found if keras is not None and getattr(keras, "__version__", "").startswith("2.")]


def module_for(keras: ModuleType) -> Literal["keras3", "keras215", "tf_keras"]:
    """Return the name of the modules that serve a Keras; raise an error if it is too old."""
    refuse_old_keras(keras)
    if keras.__name__ == "tf_keras":
        return "tf_keras"
    return "keras215" if is_keras2(keras) else "keras3"


def is_keras2(keras: ModuleType) -> bool:
    """Return whether a package is Keras 2: Keras 2.15 or tf_keras."""
    return bool(keras.__version__.startswith("2."))


def is_optimizer_of_keras3(optimizer: object) -> bool:
    """Return whether an optimizer, of any host, is one of Keras 3: only these have the method `apply`."""
    return hasattr(optimizer, "apply")


def of_tensorflow(variable: Any) -> tf.Variable:  # noqa: ANN401 - of any Keras
    """Return the variable of TensorFlow in one of Keras 3, which trains both; return any other variable unchanged."""
    # The test is not for `keras.Variable`, because variables of Keras are not instances of that class before Keras 3.7.
    return variable if isinstance(variable, tf.Variable) else variable.value


def is_of_keras(value: object) -> bool:
    """Return whether the class of an object is a part of Keras or tf_keras, not one that a user wrote."""
    return type(value).__module__.startswith(("keras.", "tf_keras."))


def is_from(packages: Iterable[str], module: str | None) -> bool:
    """Return whether a module, known by its full name, is a part of one of the packages; one without a name is not."""
    return (module or "").partition(".")[0] in packages


def is_foreign(value: Any) -> bool:  # noqa: ANN401 - whatever an object or a class holds
    """Return whether the value of an attribute is a function or another callable that is not a part of Keras."""
    if isinstance(value, property):
        return any(map(is_foreign, (value.fget, value.fset, value.fdel)))
    # Of methods, class methods, static methods, and functions of TensorFlow.
    function = getattr(value, "__func__", getattr(value, "python_function", value))
    if not callable(function):
        return False
    # The module in which a function was defined. `__module__` would be that of the function that a user's one wraps.
    home = getattr(function, "__globals__", None)
    module = type(function).__module__ if home is None else home.get("__name__")
    return not is_from(OWN_PACKAGES | {"builtins"}, module)
