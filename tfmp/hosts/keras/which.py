"""Which Keras an object is of, and which module of this package serves it; without importing a Keras."""

import sys
from types import ModuleType
from typing import Literal

from tfmp.environment import refuse_old_keras


def keras_of(value: object, base: str) -> ModuleType | None:
    """Return the package of Keras that an object is of, `keras` or `tf_keras`; None if it is of neither.

    Only packages that the program has imported are asked, since an object exists only if its Keras was imported. `base`
    is what it must be an instance of: the name of a class in the package, such as "layers.Layer".

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


def loaded_keras2() -> list[ModuleType]:
    """Return the packages of Keras 2 that the program has imported.

    Examples:
        >>> [keras.__version__[0] for keras in loaded_keras2() if not is_keras2(keras)]
        []
    """
    found = [sys.modules.get(package) for package in ("keras", "tf_keras")]
    # What is imported may be a directory that an uninstalled Keras left behind.
    return [keras for keras in found if keras is not None and hasattr(keras, "__version__") and is_keras2(keras)]


def module_for(keras: ModuleType) -> Literal["keras3", "keras215", "tf_keras"]:
    """Return the name of the modules that serve a Keras; raise an error if it is too old."""
    refuse_old_keras(keras)
    if keras.__name__ == "tf_keras":
        return "tf_keras"
    return "keras215" if is_keras2(keras) else "keras3"


def is_optimizer_of_keras3(optimizer: object) -> bool:
    """Return whether an optimizer, of any host, is one of Keras 3: only these have the method `apply`."""
    return hasattr(optimizer, "apply")


def is_keras2(keras: ModuleType) -> bool:
    """Return whether a package is Keras 2: Keras 2.15 or tf_keras."""
    return bool(keras.__version__.startswith("2."))
