"""Which Keras an object is of, and which module of this package serves it; without importing a Keras."""

import sys
from types import ModuleType
from typing import Literal

from tfmp.optional import refuse_old_keras


def keras_of(value: object, base: str) -> ModuleType | None:
    """Return the package of Keras that an object is of, among those that the program has imported.

    An object exists only if its Keras was imported.

    Args:
        value: Any object.
        base: What it must be an instance of: the name of a class in the package, such as "layers.Layer".

    Returns:
        The package `keras` or `tf_keras`, or None if the object is of neither.

    Examples:
        >>> import keras
        >>> keras_of(keras.layers.Dense(2), "layers.Layer").__name__
        'keras'
        >>> keras_of(2, "layers.Layer") is None
        True
    """
    for package in ("keras", "tf_keras"):
        keras = found = sys.modules.get(package)
        for name in base.split("."):
            # What is imported may be a directory that an uninstalled Keras left behind.
            found = getattr(found, name, None)
        if isinstance(found, type) and isinstance(value, found):
            return keras
    return None


def module_for(keras: ModuleType) -> Literal["keras3", "keras215", "tf_keras"]:
    """Return the name of the modules that serve a Keras.

    Raises:
        ImportError: It is too old.

    Examples:
        >>> import keras
        >>> module_for(keras) in ("keras3", "keras215")
        True
    """
    refuse_old_keras(keras)
    if keras.__name__ == "tf_keras":
        return "tf_keras"
    return "keras215" if is_keras2(keras) else "keras3"


def is_keras2(keras: ModuleType) -> bool:
    """Return whether a package is Keras 2: Keras 2.15 or tf_keras.

    Examples:
        >>> import keras
        >>> is_keras2(keras) == keras.__version__.startswith("2.")
        True
    """
    return bool(keras.__version__.startswith("2."))
