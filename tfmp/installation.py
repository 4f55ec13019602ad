"""What is installed of the packages that tfmp works with, and whether their versions are supported together."""

import importlib.metadata
import platform
from collections.abc import Iterator, Mapping
from typing import NamedTuple, TypeAlias

from tfmp.optional import release_of

_Release: TypeAlias = tuple[int, ...]

#: The packages whose versions matter for a report of a fault, by the names of their distributions.
PACKAGES = (
    *("tensorflow", "tensorflow-cpu", "keras", "tf_keras", "tensorflow-estimator", "horovod"),
    *("numpy", "protobuf", "jax", "libcst", "matplotlib", "tqdm"),
)


class Supported(NamedTuple):
    """The versions that are supported with one version of TensorFlow."""

    #: The oldest and the newest Python.
    python: tuple[_Release, _Release]
    #: The oldest and the newest Keras.
    keras: tuple[_Release, _Release]
    #: The version of tf_keras; None if Keras itself is Keras 2.
    tf_keras: _Release | None


#: What is supported with each version of TensorFlow; `docs/reference/versions.md` has the same table.
SUPPORTED: Mapping[_Release, Supported] = {
    (2, 15): Supported(((3, 10), (3, 11)), ((2, 15), (2, 15)), None),
    (2, 16): Supported(((3, 10), (3, 12)), ((3, 5), (3, 15)), (2, 16)),
    (2, 17): Supported(((3, 10), (3, 12)), ((3, 5), (3, 15)), (2, 17)),
    (2, 18): Supported(((3, 10), (3, 12)), ((3, 5), (3, 15)), (2, 18)),
    (2, 19): Supported(((3, 10), (3, 12)), ((3, 5), (3, 15)), (2, 19)),
    (2, 20): Supported(((3, 10), (3, 13)), ((3, 10), (3, 15)), (2, 20)),
    (2, 21): Supported(((3, 10), (3, 13)), ((3, 12), (3, 15)), (2, 21)),
}
_HOROVOD, _TENSORFLOW_OF_HOROVOD = "0.28.1", (2, 15)


def installed_versions() -> dict[str, str]:
    """Return the versions of Python and of the installed ones of `PACKAGES`, by their names, without importing them."""
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
        >>> problems({"Python": "3.11.7", "tensorflow": "2.15.1", "keras": "2.15.0"})
        []
        >>> problems({"Python": "3.12.1", "tensorflow": "2.15.1", "keras": "2.15.0"})
        ['Python 3.12.1 is not supported with TensorFlow 2.15: use 3.10 to 3.11.']
    """
    version = versions.get("tensorflow", versions.get("tensorflow-cpu"))
    if version is None:
        return [
            "TensorFlow is not installed: pip install tensorflow, or tensorflow-cpu. tfmp.migrate does not need it."
        ]
    tensorflow = release_of(version)
    if tensorflow not in SUPPORTED:
        return [f"TensorFlow {version} is not supported: use {_range(min(SUPPORTED), max(SUPPORTED))}."]
    return list(_problems_with(tensorflow, versions))


def _problems_with(tensorflow: _Release, versions: Mapping[str, str]) -> Iterator[str]:
    supported = SUPPORTED[tensorflow]
    exact = None if supported.tf_keras is None else (supported.tf_keras, supported.tf_keras)
    for name, bounds in [("Python", supported.python), ("keras", supported.keras), ("tf_keras", exact)]:
        version = versions.get(name)
        if version is None or (bounds is not None and bounds[0] <= release_of(version) <= bounds[1]):
            continue
        remedy = "use Keras 2.15, which is tf.keras" if bounds is None else f"use {_range(*bounds)}"
        yield f"{name} {version} is not supported with TensorFlow {_text(tensorflow)}: {remedy}."
    horovod = versions.get("horovod", _HOROVOD)
    if "horovod" in versions and (horovod != _HOROVOD or tensorflow != _TENSORFLOW_OF_HOROVOD):
        yield (
            f"horovod {horovod} is not supported with TensorFlow {_text(tensorflow)}: use {_HOROVOD} with TensorFlow "
            f"{_text(_TENSORFLOW_OF_HOROVOD)}."
        )


def _text(release: _Release) -> str:
    return ".".join(map(str, release))


def _range(oldest: _Release, newest: _Release) -> str:
    return _text(oldest) if oldest == newest else f"{_text(oldest)} to {_text(newest)}"
