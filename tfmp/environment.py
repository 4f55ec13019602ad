"""The packages that tfmp works with: which are supported and installed, and errors that say what to install."""

import importlib
import importlib.util
import platform
from collections.abc import Iterator, Mapping
from types import ModuleType
from typing import TypeAlias

_Release: TypeAlias = tuple[int, ...]
_Range: TypeAlias = tuple[_Release, _Release]

#: The packages whose versions matter for a report of a fault, by the names of their distributions.
PACKAGES = (
    *("tensorflow", "tensorflow-cpu", "keras", "tf_keras", "tensorflow-estimator", "horovod"),
    *("numpy", "protobuf", "jax", "libcst", "matplotlib", "tqdm"),
)

#: The oldest and the newest Python and Keras for each TensorFlow; tf_keras has the version of TensorFlow.
#: `docs/reference/versions.md` has the same table.
SUPPORTED: Mapping[_Release, tuple[_Range, _Range]] = {
    (2, 15): (((3, 10), (3, 11)), ((2, 15), (2, 15))),
    (2, 16): (((3, 10), (3, 12)), ((3, 5), (3, 15))),
    (2, 17): (((3, 10), (3, 12)), ((3, 5), (3, 15))),
    (2, 18): (((3, 10), (3, 12)), ((3, 5), (3, 15))),
    (2, 19): (((3, 10), (3, 12)), ((3, 5), (3, 15))),
    (2, 20): (((3, 10), (3, 13)), ((3, 10), (3, 15))),
    (2, 21): (((3, 10), (3, 13)), ((3, 12), (3, 15))),
}
_OLDEST_TENSORFLOW, _NEWEST_TENSORFLOW = min(SUPPORTED), max(SUPPORTED)
# TensorFlow 2.16 and 2.17 accept older versions. But Keras 3.0 cannot declare how replicas share a variable, and before
# 3.5 a variable cannot be used as a Python number.
_OLDEST_KERAS3 = min(oldest for _, (oldest, _) in SUPPORTED.values() if oldest >= (3,))
_HOROVOD, _TENSORFLOW_OF_HOROVOD = "0.28.1", (2, 15)


def require(module: str, extra: str) -> ModuleType:
    """Import a module of an optional package, or raise an error that names the extra of tfmp that installs it."""
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
    needed = f"tfmp needs TensorFlow {_text(_OLDEST_TENSORFLOW)} or newer"
    if not installed("tensorflow"):
        raise ImportError(
            f"{needed}, which is not installed: pip install tensorflow, or tensorflow-cpu (tfmp's extras of these "
            "names bring them too)."
        )
    version = getattr(importlib.import_module("tensorflow"), "__version__", None)
    if version is None:
        # Python imports an empty directory of this name, such as an uninstalled TensorFlow may leave behind.
        raise ImportError(
            "tfmp found an incomplete installation of TensorFlow: pip install --force-reinstall tensorflow, or "
            "tensorflow-cpu."
        )
    if _release_of(version) < _OLDEST_TENSORFLOW:
        raise ImportError(
            f"{needed}, got {version}: upgrade tensorflow, or tensorflow-cpu if that is the distribution you have."
        )


def refuse_old_keras(keras: ModuleType) -> None:
    """Raise an error if the imported package is a Keras 3 older than tfmp supports. Keras 2 is always accepted."""
    if (3,) <= _release_of(keras.__version__) < _OLDEST_KERAS3:
        tensorflow = importlib.import_module("tensorflow")
        raise ImportError(
            f"tfmp needs Keras {_text(_OLDEST_KERAS3)} or newer with TensorFlow {tensorflow.__version__}, got Keras "
            f"{keras.__version__}: pip install --upgrade keras."
        )


def supported_tensorflow() -> str:
    """Return the oldest and the newest supported version of TensorFlow, for messages, as in `2.15 to 2.21`."""
    return _range(_OLDEST_TENSORFLOW, _NEWEST_TENSORFLOW)


def installed_versions() -> dict[str, str]:
    """Return the versions of Python and of the installed ones of `PACKAGES`, by their names, without importing them."""
    # Imported here because the rewriter, which needs no versions, would wait longer for it than for `import tfmp`.
    import importlib.metadata

    versions = {"Python": platform.python_version()}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def problems(versions: Mapping[str, str]) -> list[str]:
    """Return what of an installation is not supported, a sentence for each problem.

    Examples:
        >>> problems({"Python": "3.12.1", "tensorflow": "2.15.1", "keras": "2.15.0"})
        ['Python 3.12.1 is not supported with TensorFlow 2.15: use 3.10 to 3.11.']
    """
    version = versions.get("tensorflow", versions.get("tensorflow-cpu"))
    if version is None:
        return [
            "TensorFlow is not installed: pip install tensorflow, or tensorflow-cpu. tfmp.migrate does not need it."
        ]
    tensorflow = _release_of(version)
    if tensorflow not in SUPPORTED:
        return [f"TensorFlow {version} is not supported: use {supported_tensorflow()}."]
    return list(_problems_with(tensorflow, versions))


def _problems_with(tensorflow: _Release, versions: Mapping[str, str]) -> Iterator[str]:
    python, keras = SUPPORTED[tensorflow]
    tf_keras = (tensorflow, tensorflow) if keras[0] >= (3,) else None
    for name, bounds in [("Python", python), ("keras", keras), ("tf_keras", tf_keras)]:
        version = versions.get(name)
        if version is None or (bounds is not None and bounds[0] <= _release_of(version) <= bounds[1]):
            continue
        remedy = "use Keras 2.15, which is tf.keras" if bounds is None else f"use {_range(*bounds)}"
        yield f"{name} {version} is not supported with TensorFlow {_text(tensorflow)}: {remedy}."
    horovod = versions.get("horovod", _HOROVOD)
    if "horovod" in versions and (horovod != _HOROVOD or tensorflow != _TENSORFLOW_OF_HOROVOD):
        yield (
            f"horovod {horovod} is not supported with TensorFlow {_text(tensorflow)}: use {_HOROVOD} with TensorFlow "
            f"{_text(_TENSORFLOW_OF_HOROVOD)}."
        )


def _release_of(version: str) -> _Release:
    """Return the first two numbers of a version, as in `2.21.0rc1`."""
    return tuple(int(part) for part in version.split(".")[:2])


def _text(release: _Release) -> str:
    return ".".join(map(str, release))


def _range(oldest: _Release, newest: _Release) -> str:
    return _text(oldest) if oldest == newest else f"{_text(oldest)} to {_text(newest)}"
