"""The values that functions of a script return."""

import libcst as cst
import pytest

from tfmp.migrate.analysis.return_values import returned_by
from tfmp.migrate.analysis.script import Script


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("def f():\n    return 1\nf()\n", ["1"]),
        ("def f():\n    if x:\n        return 1\n    return 2\nf()\n", ["1", "2"]),
        ("class A:\n    def f(self):\n        return 1\n    def g(self):\n        self.f()\n", ["1"]),
        ("def f():\n    return 1\ndef f():\n    return 2\nf()\n", []),
        ("class A:\n    def f(self):\n        return 1\nf()\n", []),
        ("def f():\n    return 1\nmodule.f()\n", []),
    ],
)
def test_a_function_that_is_known_is_followed(text: str, values: list[str]) -> None:
    script = Script(text)
    *_, call = script.nodes(cst.Call)
    assert [script.code(value) for value in returned_by(script, call)] == values
