"""Comparisons of one expression with constants, and whether they can hold together."""

import libcst as cst
import pytest

from tfmp.migrate.analysis.comparisons import can_all_hold, comparison

_CODE = cst.Module([]).code_for_node


def _can_hold(*tests: str) -> bool:
    """Tell whether conditions can hold together; one that starts with `not` is to be false."""
    return can_all_hold(
        (comparison(_CODE, cst.parse_expression(test.removeprefix("not "))), not test.startswith("not "))
        for test in tests
    )


@pytest.mark.parametrize(
    "tests",
    [
        ("x == 0", "x > 0"),
        ("x == 0", "0 < x"),
        ("not x == 0", "not x != 0"),
        ("x > 1", "not x >= 1"),
        ("x < 0.5", "x > 0.5"),
        ("x == 'a'", "x in ('b', 'c')"),
        ("x == 'a'", "x not in ['a']"),
        ("x is None", "x > 0"),
        ("x", "not x"),
        ("not x", "x == 1"),
        ("x", "x == ''"),
        ("x == 1" + "0" * 400, "x < 5"),
    ],
)
def test_comparisons_that_exclude_each_other(tests: tuple[str, ...]) -> None:
    assert not _can_hold(*tests)


@pytest.mark.parametrize(
    "tests",
    [
        ("x == 0", "x >= 0"),
        ("not x == 0", "x > 0"),
        ("x > 0", "x < 1"),
        ("not x == 'a'", "not x == 'b'"),
        ("x in ('a', 'b')", "x != 'a'"),
        ("x", "x is not None"),
        ("not x", "x is None"),
        ("x < y",),
        ("0 < x < 1",),
    ],
)
def test_comparisons_that_some_value_meets(tests: tuple[str, ...]) -> None:
    assert _can_hold(*tests)


def test_a_condition_without_a_constant_is_its_own_subject() -> None:
    for text in ("x < y", "0 < x < 1", "f(x)"):
        test = cst.parse_expression(text)
        assert comparison(_CODE, test).subject is test


def test_odd_escapes_are_the_scripts_own_matter() -> None:
    assert not _can_hold(r"x == '\d'", r"x == '\w'")
