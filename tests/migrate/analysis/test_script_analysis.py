"""What the scripts of the rules do not show of the analysis: rarer scopes, conditions and comparisons."""

import libcst as cst
import pytest

from tfmp.migrate.analysis.comparisons import can_all_hold, comparison
from tfmp.migrate.analysis.data_flow import DataFlow
from tfmp.migrate.analysis.expressions import dotted
from tfmp.migrate.analysis.scopes import Scopes
from tfmp.migrate.analysis.script import Script
from tfmp.migrate.analysis.tf_version import is_run
from tfmp.migrate.analysis.training.loss_scale_wrappers import WrappedOptimizers
from tfmp.migrate.analysis.training.operands import operands
from tfmp.migrate.analysis.training.optimizer_classes import counts
from tfmp.migrate.analysis.training.optimizer_types import class_answer
from tfmp.migrate.analysis.tree import Tree


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("a = 1\ndef f(b=a, a=2): pass\n", [1]),
        ("a = 1\nclass A:\n    a = 2\n    def f(self):\n        a\n", [1]),
        ("a = 1\n[b for b in a for a in b]\n", [1]),
        ("[(a := c) for b in c]\na\n", [1]),
        ("def f():\n    a = 1\n    def g():\n        nonlocal a\n        a = 2\n        return a\n", [2, 5]),
        ("match b:\n    case [a, *_]:\n        a\n", [2]),
    ],
)
def test_a_name_refers_to_the_innermost_scope_that_binds_it(text: str, lines: list[int]) -> None:
    tree = Tree(text)
    scopes = Scopes(tree)
    *_, name = (each for each in scopes.words["a"] if scopes.is_read(each))
    assert [tree.line(each.node) for each in scopes.bindings(name)] == lines


def test_all_names_that_nothing_binds_are_found_and_builtins_told_from_names_of_the_script() -> None:
    text = "from b import *\nx: A = len(c)\n[d for d in e if d]\ndef f(g, *h, i=j) -> k: return g, h, l\n__name__\n"
    assert sorted(name.value for name in Scopes(Tree(text)).unbound()) == ["A", "c", "e", "j", "k", "l"]
    script = Script("vars = loss.eval(exec=False)\nlen(vars)\n")
    assert [name.value for name in script.nodes(cst.Name) if script.is_builtin(name)] == ["False", "len"]


@pytest.mark.parametrize(
    ("text", "values", "complete"),
    [
        ("a = 1\nif x:\n    a = 2\n    read(a)\n", ["2"], True),
        ("def f(a):\n    if x:\n        a = 2\n    read(a)\n", ["2"], False),
        ("def f():\n    a = 1\n    if x:\n        a = 2\n    if x:\n        return a\n    read(a)\n", ["1"], True),
        ("a = f()\na[0] = 1\nread(a)\n", ["f()", "1"], True),
    ],
)
def test_name_stands_for_what_was_assigned_to_it_last(text: str, values: list[str], complete: bool) -> None:
    script = Script(text)
    call = [node for node in script.nodes(cst.Call) if script.code(node.func) == "read"][-1]
    found = DataFlow(script).values(call.args[0].value)
    assert ([script.code(node) for node in found.nodes], found.complete) == (values, complete)


@pytest.mark.parametrize(
    ("text", "exclusive"),
    [
        ("for x in y:\n    if x:\n        a()\n        continue\n    b()\n", True),
        ("if x:\n    if not y:\n        a()\nif not x or (y and z) or y:\n    b()\n", True),
        ("if x or y:\n    a()\nif not x or not y:\n    b()\n", False),
        ("if x and not y:\n    a()\ny = z\nif not x or y:\n    b()\n", False),
    ],
)
def test_branches_and_early_returns_exclude_each_other(text: str, exclusive: bool) -> None:
    script = Script(text)
    calls = {script.code(call): call for call in script.nodes(cst.Call)}
    for one, other in (("a()", "b()"), ("b()", "a()")):
        assert DataFlow(script).conditions.is_exclusive(calls[one], calls[other]) is exclusive


@pytest.mark.parametrize(
    ("tests", "can_hold"),
    [
        (("x > 1", "not x >= 1"), False),
        (("x < 0.5", "x > 0.5"), False),
        (("x is None", "x > 0"), False),
        (("x == 1" + "0" * 400, "x < 5"), False),
        ((r"x == '\d'", r"x == '\w'"), False),
        (("x > 0", "x < 1"), True),
        (("x in ('a', 'b')", "x != 'a'"), True),
        (("x < y",), True),
        (("0 < x < 1",), True),
    ],
)
def test_comparisons_exclude_each_other_or_can_all_hold(tests: tuple[str, ...], can_hold: bool) -> None:
    """One that starts with `not` is to be false."""
    code = cst.Module([]).code_for_node
    found = [(comparison(code, cst.parse_expression(test.removeprefix("not "))), test[:4] != "not ") for test in tests]
    assert can_all_hold(found) is can_hold


def test_a_session_that_an_object_of_the_script_opens_shows_that_it_is_run() -> None:
    opened = "import tensorflow as tf\nclass Opened:\n    def __init__(self):\n        self.session = tf.Session()\n"
    assert is_run(Script(f"{opened}Opened()\n"))
    assert not is_run(Script(f"{opened}make = lambda: Opened()\n"))


def test_operands_of_functions_are_found_by_their_names() -> None:
    script = Script("import tensorflow as tf\nread(tf.math.multiply(a, y=b))\nread(tf.add(a))\n")
    first, second = (call.args[0].value for call in script.nodes(cst.Call) if script.code(call.func) == "read")
    assert [script.code(each) for each in operands(script, first, cst.Multiply)] == ["a", "b"]
    assert [*operands(script, second, cst.Add)] == []


@pytest.mark.parametrize(
    ("text", "certain"), [("opt = hvd.DistributedOptimizer(opt)\n", True), ("if a:\n    opt = make()\n", False)]
)
def test_a_wrapper_is_found_through_assignments(text: str, certain: bool) -> None:
    script = Script(f"import tfmp\nopt = tfmp.LossScaleOptimizer(opt, manager)\n{text}opt.minimize(loss)\n")
    ((_, owner),) = script.methods("minimize")
    wrapping = WrappedOptimizers(script).wrapping(owner)
    assert wrapping is not None
    assert wrapping.certain is certain


_CLASSES = (
    "import tensorflow as tf\nfrom elsewhere import Other\nclass Own(tf.train.Optimizer): pass\n"
    "class Derived(Own): pass\nAlias = Own\n"
)


@pytest.mark.parametrize(
    ("made", "test", "answer"),
    [
        ("Derived", "isinstance(made, Own)", True),
        ("Derived", "type(made) is Own", False),
        ("Derived", "type(made) is not Own", True),
        ("Own", "type(made) in (Derived, Own)", True),
        ("Own", "made.__class__.__name__ == 'Own'", True),
        ("Own", "type(made).__name__ != 'Own'", False),
        ("Own", "type(made) == Alias", True),
        ("Own", "isinstance(made, tf.train.Optimizer)", True),
        ("tf.train.AdamOptimizer", "isinstance(made, tf.train.MomentumOptimizer)", False),
        ("tf.train.AdamOptimizer", "not isinstance(made, Own)", True),
        ("Other", "isinstance(made, tf.train.AdamOptimizer)", None),
        ("Own", "isinstance(made, Own) and a", None),
        ("Own", "isinstance(made, Own) or a", True),
        ("tf.train.AdamOptimizer", "isinstance(made, Own) and a", False),
    ],
)
def test_a_condition_on_a_class_has_this_answer(made: str, test: str, answer: bool | None) -> None:
    script = Script(f"{_CLASSES}made = {made}(0.1)\nread({test})\n")
    calls = {script.code(call.func): call for call in script.nodes(cst.Call)}
    found = class_answer(script, calls["read"].args[0].value, calls[made], lambda node: dotted(node) == "made")
    assert found is answer


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("step.assign_add(1)", True),
        ("tf.assign(step, step + 1)", True),
        ("super().apply_gradients(pairs, step)", True),
        ("super().apply_gradients(pairs)", False),
        ("self.update(pairs, tf.cast(step, tf.float32))", False),
        ("self.update(pairs, step)", None),
    ],
)
def test_a_class_is_judged_by_its_apply_gradients(body: str, expected: bool | None) -> None:
    own = f"class Own(tf.train.Optimizer):\n    def apply_gradients(self, pairs, step=None):\n        return {body}\n"
    script = Script(f"import tensorflow as tf\n{own}Own(0.1)\n")
    assert counts(script, script.nodes(cst.Call)[-1].func) is expected
