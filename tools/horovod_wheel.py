"""Installs Horovod, from the wheel that an earlier call has kept, or else from one that it builds and keeps.

    python -m tools.horovod_wheel

A build takes minutes. The wheels are kept in `$XDG_CACHE_HOME/tfmp/wheels`, by default `~/.cache/tfmp/wheels`, each
in a directory of its own for what it was built from: the versions, the platform, the compiler and the flags.
"""

import contextlib
import hashlib
import json
import os
import platform
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Iterator, Mapping
from importlib import metadata
from pathlib import Path

HOROVOD = "0.28.1"

#: What its build looks for in the environment. HOROVOD_DEBUG compiles without optimization, in two thirds of the time.
FLAGS = {
    "CMAKE_POLICY_VERSION_MINIMUM": "3.5",
    "HOROVOD_DEBUG": "1",
    "HOROVOD_WITHOUT_MPI": "1",
    "HOROVOD_WITHOUT_MXNET": "1",
    "HOROVOD_WITHOUT_PYTORCH": "1",
    "HOROVOD_WITH_GLOO": "1",
    "HOROVOD_WITH_TENSORFLOW": "1",
}


def main() -> int:
    """Install Horovod into the environment of this Python.

    Returns:
        The exit status of the command that failed, or 0.
    """
    flags = flags_of(os.environ)
    try:
        with _directory_for(directory_name(built_from(flags))) as directory:
            wheel = kept_wheel(directory, lambda unfinished: build(unfinished, flags))
            # The same version may be installed that was built otherwise.
            _pip("install", "--quiet", "--no-deps", "--force-reinstall", str(wheel))
    except subprocess.CalledProcessError as error:
        return error.returncode
    return 0


@contextlib.contextmanager
def _directory_for(name: str) -> Iterator[Path]:
    """Give the directory of a wheel: one that is removed in the end, where nothing can be kept."""
    directory = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tfmp" / "wheels" / name
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        print(f"the wheel will not be kept: {error}", flush=True)
        with tempfile.TemporaryDirectory() as temporary:
            yield Path(temporary)
    else:
        yield directory


def flags_of(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that decide how Horovod is built.

    Args:
        environment: The variables of the process. Its compilers and flags are used.
    """
    own = {name: environment[name] for name in ("CC", "CFLAGS", "CXX", "LDFLAGS") if name in environment}
    # Its headers lack one that newer compilers do not include by themselves.
    includes = f"-include cstdint {environment.get('CXXFLAGS', '')}".strip()
    return {**own, **FLAGS, "CXXFLAGS": includes}


def built_from(flags: Mapping[str, str]) -> dict[str, str]:
    """Return all that decides whether a wheel can be used again.

    Args:
        flags: The variables that its build sees.

    Raises:
        CalledProcessError: The compiler cannot say its version.
    """
    command = shlex.split(flags.get("CXX", "c++"))
    found = shutil.which(command[0]) is not None
    version = (
        subprocess.run([*command, "--version"], capture_output=True, text=True, check=True).stdout if found else ""
    )
    return {
        **flags,
        "horovod": HOROVOD,
        "tensorflow": _version("tensorflow-cpu") or _version("tensorflow"),
        "python": sys.implementation.cache_tag,
        "platform": " ".join([sysconfig.get_platform(), *platform.libc_ver()]),
        "compiler": version.partition("\n")[0],
    }


def directory_name(parts: Mapping[str, str]) -> str:
    """Return the name of the directory of a wheel, which is another one if any of its parts is.

    Args:
        parts: What the wheel is built from.

    Examples:
        >>> directory_name({"horovod": "0.28.1", "tensorflow": "2.15.1", "python": "cpython-311"})
        'horovod-0.28.1-tensorflow-2.15.1-cpython-311-ead35c78'
    """
    digest = hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()
    return "-".join(["horovod", parts["horovod"], "tensorflow", parts["tensorflow"], parts["python"], digest[:8]])


def kept_wheel(directory: Path, build: Callable[[Path], None]) -> Path:
    """Return the wheel in a directory. If there is none, build it.

    Args:
        directory: Where the wheel is kept.
        build: Writes a wheel into the directory that is its argument.
    """
    if kept := next(directory.glob("*.whl"), None):
        print(f"kept: {kept}", flush=True)
        return kept
    # Only a whole wheel gets its name; whoever builds the same at the same time replaces it by an equal one.
    with tempfile.TemporaryDirectory(dir=directory) as unfinished:
        build(Path(unfinished))
        [built] = Path(unfinished).glob("*.whl")
        return built.replace(directory / built.name)


def build(directory: Path, flags: Mapping[str, str]) -> None:
    """Build a wheel of Horovod with the TensorFlow of this environment.

    Args:
        directory: Where the wheel is written.
        flags: The variables that the build sees.
    """
    # CMake is installed beside this Python.
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    # pip's own cache would give a wheel that was built with another TensorFlow, or other flags.
    arguments = ["--quiet", "--no-cache-dir", "--no-deps", "--no-build-isolation", "--wheel-dir", str(directory)]
    _pip("wheel", *arguments, f"horovod=={HOROVOD}", **flags, PATH=path)


def _pip(*arguments: str, **variables: str) -> None:
    subprocess.run([sys.executable, "-m", "pip", *arguments], env={**os.environ, **variables}, check=True)


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


if __name__ == "__main__":
    sys.exit(main())
