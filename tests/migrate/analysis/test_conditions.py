"""Which nodes of a script never run together."""

import libcst as cst
import pytest

from tfmp.migrate.analysis.data_flow import DataFlow
from tfmp.migrate.analysis.script import Script


@pytest.mark.parametrize(
    ("text", "exclusive"),
    [
        ("if x:\n    a()\nelse:\n    b()\n", True),
        ("if x:\n    a()\nif x:\n    b()\n", False),
        ("if x:\n    a()\nif not x:\n    b()\n", True),
        ("if x:\n    a()\nx = y\nif not x:\n    b()\n", False),
        ("a() if x else b()\n", True),
        ("tf.cond(x, lambda: a(), lambda: b())\n", True),
        ("def f():\n    if x:\n        return a()\n    b()\n", True),
        ("for x in y:\n    if x:\n        a()\n        continue\n    b()\n", True),
        ("if x and not y:\n    a()\nif not x or y:\n    b()\n", True),
        ("if x and not y:\n    a()\nif not (x and not y):\n    b()\n", True),
        ("if x:\n    if not y:\n        a()\nif not x or (y and z) or y:\n    b()\n", True),
        ("if x:\n    a()\nif not x or y:\n    b()\n", False),
        ("if x and not y:\n    a()\ny = z\nif not x or y:\n    b()\n", False),
        ("if x or y:\n    a()\nif not x or not y:\n    b()\n", False),
        ("a()\nb()\n", False),
    ],
)
def test_branches_and_early_returns_exclude_each_other(text: str, exclusive: bool) -> None:
    script = Script(text)
    calls = {script.code(call): call for call in script.nodes(cst.Call)}
    conditions = DataFlow(script).conditions
    assert conditions.is_exclusive(calls["a()"], calls["b()"]) is exclusive
    assert conditions.is_exclusive(calls["b()"], calls["a()"]) is exclusive
