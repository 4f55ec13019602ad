"""Import optional packages on use, with an error that names the pip extra."""

import importlib
import importlib.util
from types import ModuleType

_OLDEST_TENSORFLOW = (2, 15)
# TensorFlow 2.18 and 2.19 ask for Keras 3.5 themselves. With TensorFlow 2.16 and 2.17, which take older ones, nobody
# needs them: Keras 3.0 cannot say how replicas share a variable, and variables before 3.5 are no Python numbers.
_OLDEST_KERAS3 = (3, 5)


def require(module: str, extra: str) -> ModuleType:
    """Import `module`, or say which extra of tfmp installs it.

    Args:
        module: The dotted name of the module.
        extra: The extra of this package that installs it.

    Returns:
        The imported module.

    Raises:
        ImportError: The module is not installed.

    Example:
        >>> require("json", extra="examples").dumps([1])
        '[1]'
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        # A module that is there but lacks a dependency of its own is a different fault: let it speak.
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise
        raise ImportError(
            f"tfmp needs the package {error.name!r} here, which is not installed: install tfmp with its extra, "
            f"'tfmp[{extra}]'."
        ) from error


def require_tensorflow() -> None:
    """Raise unless a TensorFlow that tfmp supports is installed.

    Raises:
        ImportError: There is no TensorFlow, or it is older than 2.15 or not whole.

    Example:
        >>> require_tensorflow()
    """
    if importlib.util.find_spec("tensorflow") is None:
        raise ImportError(
            "tfmp needs TensorFlow 2.15 or newer, which is not installed: pip install tensorflow, or tensorflow-cpu "
            "(tfmp's extras of these names bring them too)."
        )
    version = getattr(importlib.import_module("tensorflow"), "__version__", None)
    if version is None:
        # A directory left behind is enough for Python to import something of that name.
        raise ImportError(
            "tfmp found a TensorFlow that is not whole: pip install --force-reinstall tensorflow, or tensorflow-cpu."
        )
    if _release(version) < _OLDEST_TENSORFLOW:
        raise ImportError(
            f"tfmp needs TensorFlow 2.15 or newer, got {version}: upgrade tensorflow, or tensorflow-cpu if that is "
            "the distribution you have."
        )


def refuse_old_keras(keras: ModuleType) -> None:
    """Raise if a Keras 3 is older than what tfmp supports.

    Args:
        keras: The package `keras` or `tf_keras`.

    Raises:
        ImportError: It is a Keras from 3.0 to 3.4.

    Example:
        >>> import keras
        >>> refuse_old_keras(keras)
    """
    if (3,) <= _release(keras.__version__) < _OLDEST_KERAS3:
        tensorflow = importlib.import_module("tensorflow")
        raise ImportError(
            f"tfmp needs Keras 3.5 or newer with TensorFlow {tensorflow.__version__}, got Keras {keras.__version__}: "
            "pip install --upgrade keras."
        )


def _release(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:2])
