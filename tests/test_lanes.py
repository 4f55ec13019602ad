"""The table of lanes: each of its lines is about something, and each file is run by a lane that tox runs by default."""

import re
from collections import Counter

import lane_table
import pytest

_FILES = sorted(path.relative_to(lane_table.ROOT).as_posix() for path in (lane_table.ROOT / "tests").rglob("test_*.py"))


#: The lanes that tox runs by default; its environment `checks` runs the first.
_BY_DEFAULT = ("plain", "tf215", "tf221", "every", "smoke")


@pytest.mark.parametrize("start", [*lane_table.KINDS, *lane_table.FIRST])
def test_each_line_is_about_tests_that_exist(start: str) -> None:
    path, _, name = start.partition("[")[0].partition("::")
    found = [*lane_table.ROOT.glob(f"{path}*")]
    assert found, f"no path begins with {path}"
    assert not name or f"def {name}" in found[0].read_text("utf-8")


def test_names_of_files_are_unique() -> None:
    # Pytest imports each by its name alone, since the folders are no packages.
    names = Counter(path.rpartition("/")[2] for path in _FILES)
    assert [name for name, count in names.items() if count > 1] == []


@pytest.mark.parametrize("path", [path for path in _FILES if not path.startswith("tests/works_with/test_")])
def test_each_file_is_run_by_default_or_weekly(path: str) -> None:
    assert lane_table.kind_of(path) == "weekly" or any(lane_table.may_run(path, lane) for lane in _BY_DEFAULT)


def test_each_kind_has_a_lane_and_each_lane_a_command() -> None:
    kinds = {*lane_table.KINDS.values(), "once_old", "every_old"}
    assert kinds == {kind for lane in lane_table.LANES.values() for kind in lane}
    settings = (lane_table.ROOT / "pyproject.toml").read_text("utf-8")
    assert {*re.findall(r"--lane=(\w+)", settings)} == {*lane_table.LANES} - {"gpu"}  # which tools.gpu_report runs


@pytest.mark.parametrize(
    ("nodeid", "old", "kind"),
    [
        ("tests/core/test_lists.py::test_a", False, "once"),
        ("tests/core/test_lists.py::test_a[keras2]", True, "once_old"),
        ("tests/hosts/keras/test_a.py::test_a", False, "every"),
        ("tests/hosts/keras/test_a.py::test_a[keras2]", True, "every_old"),
        ("tests/npu/test_a.py::test_a[keras2]", True, "both"),
        ("tests/test_new.py::test_a", False, "both"),
    ],
)
def test_kind_is_that_of_the_longest_beginning(nodeid: str, old: bool, kind: str) -> None:
    assert lane_table.kind_of(nodeid, old=old) == kind


def test_names_of_tests_are_passed_over_with_their_file_only_if_no_lane_runs_any() -> None:
    path = "tests/docs/test_recipes.py"
    assert [lane for lane in lane_table.LANES if lane_table.may_run(path, lane)] == ["tf221", "tf215"]
