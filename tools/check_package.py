"""Builds the source distribution and the wheel, and checks what a user gets from them.

    python -m tools.check_package DIRECTORY

It fails unless all of these hold: the sdist has every file that git tracks; the wheel that is built from the sdist is,
byte by byte, the one built from the clone; `twine check --strict` accepts both; the long description has no relative
link; and each of the two, installed into an empty environment, runs the commands of tfmp, the wheel also a step.
It needs git, and the packages build and twine.
"""

import argparse
import filecmp
import re
import subprocess
import sys
import tarfile
import tempfile
import venv
import zipfile
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

#: What git tracks and the sdist leaves out, and what the sdist adds.
LEFT_OUT, ADDED = {".ci/run"}, {"PKG-INFO"}

_SCRIPT = "import tensorflow as tf\nmanager = tf.contrib.mixed_precision.FixedLossScaleManager(128.0)\n"
_STEP = """\
import tensorflow as tf, tfmp
weight = tf.Variable(2.0)
scaler = tfmp.GradScaler()
with tf.GradientTape() as tape:
    loss = scaler.scale(weight * weight)
scaler.step(tf.compat.v1.train.GradientDescentOptimizer(0.25), [(tape.gradient(loss, weight), weight)])
scaler.update()
print(float(weight))
"""


class FailedCheckError(Exception):
    """What should hold of the package does not."""


def main(argv: Sequence[str] | None = None) -> int:
    """Build and check; print what was checked, with the sizes of both files.

    Returns:
        The exit status: 1 if a check failed.
    """
    parser = argparse.ArgumentParser(prog="python -m tools.check_package", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("directory", type=Path, help="where the sdist and the wheel are written")
    directory = parser.parse_args(argv).directory
    try:
        sdist, wheel = build(directory)
        names = {sdist: names_of_sdist(sdist), wheel: names_of_wheel(wheel)}
        for archive, inside in names.items():
            print(f"{archive.name}: {archive.stat().st_size:,} bytes, {len(inside)} files: {contents(inside)}")
        check_completeness(names[sdist])
        check_description(wheel)
        _run([sys.executable, "-m", "twine", "check", "--strict", str(sdist), str(wheel)], "twine accepts both")
        check_installation(f"{sdist}[migrate]", trains=False)
        check_installation(f"{wheel}[migrate,tensorflow-cpu]", trains=True)
    except (FailedCheckError, subprocess.CalledProcessError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def build(directory: Path) -> tuple[Path, Path]:
    """Build the sdist, and the wheel from it and from the clone.

    Args:
        directory: Where both are written; what was built there before is removed.

    Returns:
        The sdist and the wheel.

    Raises:
        FailedCheckError: The two wheels differ.
    """
    for old in [*directory.glob("*.tar.gz"), *directory.glob("*.whl")]:
        old.unlink()
    build_command = [sys.executable, "-m", "build", "--outdir"]
    _run([*build_command, str(directory)], "the sdist is built, and the wheel from it")
    [sdist], [wheel] = directory.glob("*.tar.gz"), directory.glob("*.whl")
    with tempfile.TemporaryDirectory() as of_clone:
        _run([*build_command, of_clone, "--wheel"], "the wheel is built from the clone")
        _require(filecmp.cmp(wheel, Path(of_clone) / wheel.name, shallow=False), "both wheels are equal", "other bytes")
    return sdist, wheel


def names_of_sdist(sdist: Path) -> list[str]:
    """Return the paths of the files of an sdist, without its own directory."""
    with tarfile.open(sdist) as archive:
        return sorted(member.name.partition("/")[2] for member in archive if member.isfile())


def names_of_wheel(wheel: Path) -> list[str]:
    """Return the paths of the files of a wheel."""
    with zipfile.ZipFile(wheel) as archive:
        return sorted(archive.namelist())


def contents(names: Iterable[str]) -> str:
    """Return how many files are in each directory of the first level.

    Args:
        names: The paths of the files.

    Examples:
        >>> contents(["README.md", "tfmp/a.py", "tfmp/b/c.py"])
        '. 1, tfmp 2'
    """
    counts = Counter(name.partition("/")[0] if "/" in name else "." for name in names)
    return ", ".join(f"{directory} {count}" for directory, count in sorted(counts.items()))


def check_completeness(names: Iterable[str]) -> None:
    """Check that an sdist has the files that git tracks.

    Args:
        names: The paths of its files.

    Raises:
        FailedCheckError: It lacks a file, or has another one.
    """
    listed = subprocess.run(["git", "ls-files"], capture_output=True, text=True, check=True).stdout.splitlines()
    expected = {*listed, *ADDED} - LEFT_OUT
    missing, other = sorted(expected.difference(names)), sorted(set(names) - expected)
    found = f"missing {missing}, others {other}"
    _require(not missing and not other, "the sdist has the files that git tracks", found)


def check_description(wheel: Path) -> None:
    """Check that the long description has no link that leads nowhere outside of the repository.

    Raises:
        FailedCheckError: There is one.
    """
    with zipfile.ZipFile(wheel) as archive:
        [metadata] = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        links = re.findall(r"\]\((?!https?:)[^)]*\)", archive.read(metadata).decode())
    _require(not links, "the long description has no relative links", links)


def check_installation(requirement: str, *, trains: bool) -> None:
    """Install into an empty environment, and run the commands there.

    Args:
        requirement: What pip installs.
        trains: Whether TensorFlow is among it; then one step is taken.

    Raises:
        FailedCheckError: A command does not print what it should.
    """
    with tempfile.TemporaryDirectory() as directory:
        venv.create(directory, with_pip=True)
        programs = Path(directory) / "bin"
        python = str(programs / "python")
        _run([python, "-m", "pip", "install", "--quiet", requirement], f"{Path(requirement).name} is installed")
        versions = subprocess.run([python, "-m", "tfmp"], capture_output=True, text=True, cwd=directory, check=False)
        last_line = "These versions are supported." if trains else "not supported: TensorFlow is not installed"
        _require(
            last_line in versions.stdout and versions.returncode == (0 if trains else 1),
            "python -m tfmp reports what is installed",
            versions.stdout + versions.stderr,
        )
        script = Path(directory) / "script.py"
        script.write_text(_SCRIPT)
        _run([str(programs / "tfmp-migrate"), "--write", str(script)], "tfmp-migrate rewrites a script")
        ported = script.read_text()
        _require("tfmp.FixedLossScaleManager(128.0)" in ported, "the script is ported", ported)
        if trains:
            step = subprocess.run([python, "-c", _STEP], capture_output=True, text=True, cwd=directory, check=False)
            _require(step.stdout == "1.0\n", "a step is taken", step.stdout + step.stderr[-2000:])


def _require(holds: bool, claim: str, found: object) -> None:
    if not holds:
        raise FailedCheckError(f"this does not hold: {claim}. Found: {found}")
    print(f"ok: {claim}", flush=True)


def _run(command: Sequence[str], claim: str) -> None:
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    _require(done.returncode == 0, claim, done.stdout[-4000:])


if __name__ == "__main__":
    sys.exit(main())
