"""Import optional packages on use, with an error that names the pip extra."""

import importlib
import importlib.util
from types import ModuleType

_OLDEST_TENSORFLOW = (2, 15)


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
    if tuple(int(part) for part in version.split(".")[:2]) < _OLDEST_TENSORFLOW:
        raise ImportError(
            f"tfmp needs TensorFlow 2.15 or newer, got {version}: upgrade tensorflow, or tensorflow-cpu if that is "
            "the distribution you have."
        )
