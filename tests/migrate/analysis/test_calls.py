"""The arguments and the names of calls."""

import libcst as cst
import pytest

from tfmp.migrate.analysis.calls import argument, methods
from tfmp.migrate.analysis.script import Script


@pytest.mark.parametrize(
    ("text", "expected"),
    [("f(a, b)", "b"), ("f(a, x=b)", "b"), ("f(a)", None), ("f(*a, b)", None), ("f(a, *b)", None), ("f(a, **b)", None)],
)
def test_an_argument_is_found_by_position_or_by_name(text: str, expected: str | None) -> None:
    found = argument(cst.ensure_type(cst.parse_expression(text), cst.Call), 1, "x")
    assert (None if found is None else cst.ensure_type(found, cst.Name).value) == expected


def test_functions_of_modules_are_no_methods() -> None:
    script = Script("import module\nopt.minimize(a)\nmodule.minimize(b)\nmake().minimize(c)\n")
    assert [script.line(call) for call, _ in methods(script, "minimize")] == [2, 4]
