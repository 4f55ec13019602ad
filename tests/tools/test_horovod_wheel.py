"""The wheel of Horovod that is kept: it is built once for each way to build it, and never left unfinished."""

from pathlib import Path

import pytest

from tools import horovod_wheel
from tools.horovod_wheel import built_from, directory_name, flags_of, kept_wheel

_PARTS = built_from(flags_of({}))


def _write(directory: Path) -> None:
    (directory / "horovod-0.28.1.whl").write_text("built")


def _must_not_build(directory: Path) -> None:
    raise AssertionError(directory)


def test_wheel_is_built_once_and_kept(tmp_path: Path) -> None:
    wheel = kept_wheel(tmp_path, _write)
    assert wheel.read_text() == "built"
    assert kept_wheel(tmp_path, _must_not_build) == wheel
    assert [*wheel.parent.iterdir()] == [wheel]


def test_build_that_fails_leaves_nothing_behind(tmp_path: Path) -> None:
    def fail(directory: Path) -> None:
        _write(directory)
        raise OSError("no space left")

    with pytest.raises(OSError, match="no space left"):
        kept_wheel(tmp_path, fail)
    assert [*tmp_path.iterdir()] == []


@pytest.mark.parametrize("part", _PARTS)
def test_what_is_built_otherwise_has_a_directory_of_its_own(part: str) -> None:
    assert directory_name({**_PARTS, part: "another"}) != directory_name(_PARTS)


def test_flags_of_the_user_are_kept_with_those_that_the_build_needs() -> None:
    flags = flags_of({"CXXFLAGS": "-O1", "CXX": "clang++", "HOME": "/home"})
    assert flags == {**horovod_wheel.FLAGS, "CXXFLAGS": "-include cstdint -O1", "CXX": "clang++"}
