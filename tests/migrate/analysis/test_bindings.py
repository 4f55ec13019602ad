"""The assignments of a script."""

import pytest

from tfmp.migrate.analysis.bindings import bindings_of
from tfmp.migrate.analysis.script import Script


@pytest.mark.parametrize(
    ("text", "bindings"),
    [
        ("a = b = f()", [("a", "f()", True), ("b", "f()", True)]),
        ("a, b = 1, 2", [("a", "1", True), ("b", "2", True)]),
        ("a, b = f()", [("a", "f()", True), ("b", "f()", True)]),
        ("a += 1", [("a", "1", False)]),
        ("a[0] = 1", [("a", "1", False)]),
        ("a.append(1)", [("a", "1", False)]),
        ("self.a = 1", [("self.a", "1", True)]),
        ("other.a = 1", []),
        ("for a in b: pass", [("a", "b", True)]),
        ("with f() as a: pass", [("a", "f()", True)]),
        ("def f(a): pass", [("a", None, True)]),
    ],
)
def test_each_form_of_assignment_is_found(text: str, bindings: list[tuple[str, str | None, bool]]) -> None:
    script = Script(text)
    found = [
        (one.name, None if one.value is None else script.code(one.value), one.replaces) for one in bindings_of(script)
    ]
    assert found == bindings
