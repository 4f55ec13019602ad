"""Imports of optional packages on first use, with errors that say what to install."""

import importlib
import importlib.util
from types import ModuleType

_OLDEST_TENSORFLOW = (2, 15)
# TensorFlow 2.18 and 2.19 require Keras 3.5 themselves. TensorFlow 2.16 and 2.17 accept older versions, but no user
# needs these: Keras 3.0 cannot declare how replicas share a variable, and before 3.5 a variable cannot be used as a
# Python number.
_OLDEST_KERAS3 = (3, 5)


def require(module: str, extra: str) -> ModuleType:
    """Import a module of an optional package, or raise an error that names the extra of tfmp that installs it.

    Examples:
        >>> require("json", extra="examples").dumps([1])
        '[1]'
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        # If the module is installed but one of its own dependencies is missing, our advice would be wrong.
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise
        raise ImportError(
            f"tfmp needs the package {error.name!r} here, which is not installed: install tfmp with its extra, "
            f"'tfmp[{extra}]'."
        ) from error


def installed(package: str) -> bool:
    """Return whether an optional package is installed, by the name under which it is imported."""
    return importlib.util.find_spec(package) is not None


def require_tensorflow() -> None:
    """Raise an error unless TensorFlow is installed, with its files, in a version that tfmp supports."""
    if not installed("tensorflow"):
        raise ImportError(
            "tfmp needs TensorFlow 2.15 or newer, which is not installed: pip install tensorflow, or tensorflow-cpu "
            "(tfmp's extras of these names bring them too)."
        )
    version = getattr(importlib.import_module("tensorflow"), "__version__", None)
    if version is None:
        # Python imports an empty directory of this name, such as an uninstalled TensorFlow may leave behind.
        raise ImportError(
            "tfmp found an incomplete installation of TensorFlow: pip install --force-reinstall tensorflow, or "
            "tensorflow-cpu."
        )
    if release_of(version) < _OLDEST_TENSORFLOW:
        raise ImportError(
            f"tfmp needs TensorFlow 2.15 or newer, got {version}: upgrade tensorflow, or tensorflow-cpu if that is "
            "the distribution you have."
        )


def refuse_old_keras(keras: ModuleType) -> None:
    """Raise an error if the imported package is a Keras 3 older than tfmp supports. Keras 2 is always accepted."""
    if (3,) <= release_of(keras.__version__) < _OLDEST_KERAS3:
        tensorflow = importlib.import_module("tensorflow")
        raise ImportError(
            f"tfmp needs Keras 3.5 or newer with TensorFlow {tensorflow.__version__}, got Keras {keras.__version__}: "
            "pip install --upgrade keras."
        )


def release_of(version: str) -> tuple[int, ...]:
    """Return the first two numbers of a version.

    Examples:
        >>> release_of("2.21.0rc1")
        (2, 21)
    """
    return tuple(int(part) for part in version.split(".")[:2])
