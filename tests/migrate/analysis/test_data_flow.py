"""Where the values of names come from."""

import libcst as cst
import pytest

from tfmp.migrate.analysis.conditions import Conditions
from tfmp.migrate.analysis.data_flow import DataFlow
from tfmp.migrate.analysis.script import Script
from tfmp.migrate.edits.rewriting import rewrite


def _values(text: str) -> tuple[list[str], bool]:
    """Return what the argument of the last call, `read(...)`, stands for, and whether that is all."""
    script = Script(text)
    call = [node for node in script.nodes(cst.Call) if script.code(node.func) == "read"][-1]
    values = DataFlow(script).values(call.args[0].value)
    return [script.code(node) for node in values.nodes], values.complete


@pytest.mark.parametrize(
    ("text", "values", "complete"),
    [
        ("a = 1\na = 2\nread(a)\na = 3\n", ["2"], True),
        ("a = 1\nif x:\n    a = 2\nread(a)\n", ["1", "2"], True),
        ("a = 1\nif x:\n    a = 2\nelse:\n    a = 3\nread(a)\n", ["2", "3"], True),
        ("a = 1\nif x:\n    a = 2\nelif y:\n    a = 3\nread(a)\n", ["1", "2", "3"], True),
        ("a = 1\nif x:\n    a = 2\n    read(a)\n", ["2"], True),
        ("a = 1\nif x:\n    a = 2\nelse:\n    raise\nread(a)\n", ["2"], True),
        ("a = 1\nif x:\n    raise\nelse:\n    a = 2\nread(a)\n", ["2"], True),
        ("a = 1\nif x:\n    a = 2\nelif y:\n    a = 3\nelse:\n    raise\nread(a)\n", ["2", "3"], True),
        ("a = 1\nif x:\n    a = 2\nelif y:\n    raise\nread(a)\n", ["1", "2"], True),
        ("a = 1\nif x:\n    if y:\n        a = 2\n    else:\n        raise\nread(a)\n", ["1", "2"], True),
        ("if x:\n    a = 2\nelse:\n    read(a)\n", [], False),
        ("if x:\n    a = 2\nif x:\n    b = 0\nelse:\n    read(a)\n", [], False),
        ("if x:\n    a = 2\nif not x:\n    read(a)\n", [], False),
        ("a = 1\nif x and y:\n    a = 2\nif not x:\n    read(a)\n", ["1"], True),
        ("a = 1\nif x or y:\n    pass\nelse:\n    a = 2\nif y:\n    read(a)\n", ["1"], True),
        ("a = 1\nif x:\n    a = 2\nb = 0 if x else read(a)\n", ["1"], True),
        ("a = 1\nif x:\n    a = 2\nx = f()\nif x:\n    b = 0\nelse:\n    read(a)\n", ["1", "2"], True),
        ("a = 1\nif not a:\n    a = 2\nif a:\n    read(a)\n", ["1", "2"], True),
        ("def f(a):\n    read(a)\n", [], False),
        ("def f(a):\n    if x:\n        a = 2\n    read(a)\n", ["2"], False),
        ("def f(a):\n    a = 1\n    if x:\n        a = 2\n        return a\n    read(a)\n", ["1"], True),
        ("def f():\n    a = 1\n    if x:\n        a = 2\n    if x:\n        return a\n    read(a)\n", ["1"], True),
        (
            "def f():\n    a = 1\n    if x:\n        if y:\n            a = 2\n            return a\n    read(a)\n",
            ["1"],
            True,
        ),
        (
            "def f():\n    a = 1\n    for x in b:\n        if x:\n            a = 2\n            break\n    read(a)\n",
            ["1", "2"],
            True,
        ),
        ("a = 1\ndef f():\n    read(a)\na = 2\n", ["2"], True),
        ("def f():\n    a = 1\ndef g():\n    read(a)\n", [], False),
        ("a, b = 1, 2\nread(b)\n", ["2"], True),
        ("a, b = f()\nread(b)\n", ["f()"], True),
        ("a = []\na.append(1)\nread(a)\n", ["[]", "1"], True),
        ("a = f()\na[0] = 1\nread(a)\n", ["f()", "1"], True),
        ("for a in f():\n    read(a)\n", ["f()"], True),
        ("[read(a) for a, b in f()]\n", ["f()"], True),
    ],
)
def test_name_stands_for_what_was_assigned_to_it_last(text: str, values: list[str], complete: bool) -> None:
    assert _values(text) == (values, complete)


def test_attribute_of_self_is_followed_through_the_class() -> None:
    text = (
        "class A:\n    def make(self):\n        self.a = 1\n        self.a = 2\n"
        "    def use(self):\n        read(self.a)\n"
        "class B:\n    def make(self):\n        self.a = 3\n"
    )
    assert _values(text) == (["2"], True)


def test_attribute_of_self_that_the_function_sets_is_that_functions() -> None:
    text = (
        "class A:\n    def make(self):\n        self.a = 1\n"
        "    def use(self):\n        self.a = 2\n        read(self.a)\n"
    )
    assert _values(text) == (["2"], True)


def _questions_asked(layers: int, monkeypatch: pytest.MonkeyPatch) -> int:
    """Return how often R10 compares two places, in a script that gives one name a value for each layer."""
    asked = 0
    is_exclusive = Conditions.is_exclusive

    def counted(self: DataFlow, one: cst.CSTNode, other: cst.CSTNode) -> bool:
        nonlocal asked
        asked += 1
        return is_exclusive(self, one, other)

    text = (
        "import tensorflow as tf\n"
        + "x = tf.tuple([x, layer(x)])[0]\n" * layers
        + "train_op = tf.train.AdamOptimizer().minimize(x, global_step)\n"
        + "increment = global_step.assign_add(1)\n"
        + "read(increment)\n"
    )
    with monkeypatch.context() as patch:
        patch.setattr(Conditions, "is_exclusive", counted)
        done = rewrite(text)
    assert [found.rule for found in done.findings if found.rule == "R10"] == ["R10"]
    return asked


def test_a_script_twice_as_long_takes_twice_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    short, long = _questions_asked(20, monkeypatch), _questions_asked(40, monkeypatch)
    assert 40 < short < long <= 2 * short


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
def test_values_that_a_known_function_returns_are_found(text: str, values: list[str]) -> None:
    script = Script(text)
    *_, call = script.nodes(cst.Call)
    assert [script.code(value) for value in DataFlow(script).returned_by(call)] == values
