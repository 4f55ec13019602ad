"""What a script says: its names, scopes, bindings, values and conditions."""

import libcst as cst
import pytest

from tfmp.migrate.analysis.bindings import bindings_of
from tfmp.migrate.analysis.comparisons import can_all_hold, comparison
from tfmp.migrate.analysis.conditions import Conditions
from tfmp.migrate.analysis.data_flow import DataFlow
from tfmp.migrate.analysis.expressions import argument, imported_by, one_tensorflow
from tfmp.migrate.analysis.scopes import Scopes
from tfmp.migrate.analysis.script import Script
from tfmp.migrate.analysis.tree import Tree, once_per_argument
from tfmp.migrate.edits.rewriting import rewrite


@pytest.mark.parametrize("newline", ["\n", "\r\n", "\r"])
def test_positions_are_characters_of_the_text(newline: str) -> None:
    tree = Tree(newline.join(["import tensorflow as tf", "", "x = tf.nn.relu(y)", ""]))
    *_, node = tree.nodes(cst.Attribute)
    assert tree.line(node) == 3
    (call,) = tree.nodes(cst.Call)
    assert tree.text[slice(*tree.span(call.func))] == tree.code(call.func) == "tf.nn.relu"
    assert tree.text[tree.start_of_line(node) :].startswith("x = tf")
    assert tree.end_of_line(node) == len(tree.text)


def test_nodes_are_in_the_order_of_the_text() -> None:
    tree = Tree("@a(b)\ndef f(c=d(e), *g): return h(i=j) if k(l) else m(n)\n")
    assert [tree.code(call.func) for call in tree.nodes(cst.Call)] == ["a", "d", "h", "k", "m"]
    assert "".join(tree.code(name) for name in tree.nodes(cst.Name)) == "abfcdeghijklmn"


def test_a_result_is_remembered_for_each_argument_of_each_object() -> None:
    class Counter:
        def __init__(self) -> None:
            self.asked: list[int] = []

        @once_per_argument
        def double(self, number: int) -> int:
            self.asked.append(number)
            return 2 * number

    one, other = Counter(), Counter()
    assert [one.double(1), one.double(2), one.double(1), other.double(1)] == [2, 4, 2, 2]
    assert (one.asked, other.asked) == ([1, 2], [1])


def test_a_name_with_another_binding_is_an_ambiguous_use() -> None:
    script = Script("import tensorflow as tf\nif x:\n    tf = other()\ntf.nn.relu(y)\n")
    assert script.uses == ()
    assert [use.name for use in script.ambiguous_uses] == ["tensorflow.nn.relu"]


def test_a_name_that_may_be_none_keeps_its_meaning() -> None:
    script = Script("try:\n    import tensorflow as tf\nexcept ImportError:\n    tf = None\ntf.nn.relu(y)\n")
    assert [use.name for use in script.uses] == ["tensorflow.nn.relu"]


def test_unbound_names_are_listed_with_their_lines() -> None:
    script = Script("from npu_bridge.npu_init import *\nprint(a, __name__)\nb(a)\n")
    assert dict(script.unbound_names) == {"a": (2, 3), "b": (3,)}


def test_a_shared_analysis_is_computed_once() -> None:
    script = Script("x = 1\n")
    assert script.cached(_analysis) is script.cached(_analysis)


def _analysis(script: Script) -> list[str]:
    return [script.text]


def test_builtins_are_told_from_names_of_the_script() -> None:
    script = Script("vars = loss.eval(exec=False)\nlen(vars)\n")
    assert [name.value for name in script.nodes(cst.Name) if script.is_builtin(name)] == ["False", "len"]


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("import tensorflow.compat.v1 as tf", [("tensorflow", "tensorflow.compat.v1", "tf")]),
        ("import os.path, sys", [("os.path", "os.path", "os"), ("sys", "sys", "sys")]),
        ("from tensorflow import keras as k", [("tensorflow.keras", "tensorflow.keras", "k")]),
        ("from tensorflow import *", [("tensorflow", "tensorflow", "")]),
        ("from . import layers", []),
    ],
)
def test_imports_are_read_with_the_names_that_they_bind(text: str, names: list[tuple[str, str, str]]) -> None:
    node = cst.ensure_type(cst.parse_module(text).body[0], cst.SimpleStatementLine).body[0]
    assert isinstance(node, cst.Import | cst.ImportFrom)
    assert [(one.name, one.raw, one.bound) for one in imported_by(node)] == names


def test_only_whole_words_are_tensorflow() -> None:
    assert one_tensorflow("tensorflow_core.compat.v1.nn") == one_tensorflow("tensorflow_core.nn") == "tensorflow.nn"
    assert one_tensorflow("tensorflow_corex.nn") == "tensorflow_corex.nn"


@pytest.mark.parametrize(
    ("text", "expected"),
    [("f(a, b)", "b"), ("f(a, x=b)", "b"), ("f(a)", None), ("f(*a, b)", None), ("f(a, *b)", None), ("f(a, **b)", None)],
)
def test_an_argument_is_found_by_position_or_by_name(text: str, expected: str | None) -> None:
    found = argument(cst.ensure_type(cst.parse_expression(text), cst.Call), 1, "x")
    assert (None if found is None else cst.ensure_type(found, cst.Name).value) == expected


def test_functions_of_modules_are_no_methods() -> None:
    script = Script("import module\nopt.minimize(a)\nmodule.minimize(b)\nmake().minimize(c)\n")
    assert [script.line(call) for call, _ in script.methods("minimize")] == [2, 4]


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("a = 1\na = 2\na\n", [1, 2]),
        ("a = 1\na\na = 2\n", [1]),
        ("import a.b\nimport c as a\na\n", [1, 2]),
        ("from . import a\na\n", [1]),
        ("a = 1\ndef f():\n    a\na = 2\n", [1, 4]),
        ("a = 1\ndef f():\n    a\n    a = 2\n", [1]),
        ("a = 1\ndef f(b=a, a=2): pass\n", [1]),
        ("a = 1\nf = lambda a: a\n", [2]),
        ("a = 1\nclass A:\n    a = 2\n    def f(self):\n        a\n", [1]),
        ("a = 1\nclass A:\n    a = 2\n    a\n", [3]),
        ("a = 1\nclass a(a): pass\n", [1]),
        ("a = 1\n[b for b in a for a in b]\n", [1]),
        ("a = 1\n[a for a in b]\n", [2]),
        ("[(a := c) for b in c]\na\n", [1]),
        ("def f():\n    global a\n    a = 1\ndef g():\n    a\n", [3]),
        ("def f():\n    a = 1\n    def g():\n        nonlocal a\n        a = 2\n        return a\n", [2, 5]),
        ("for a, b in c:\n    a\n", [1]),
        ("with c as (a, b):\n    a\n", [1]),
        ("try: pass\nexcept E as a:\n    a\n", [2]),
        ("match b:\n    case [a, *_]:\n        a\n", [2]),
        ("def a(): pass\na()\n", [1]),
        ("b.a = 1\nb[a] = 2\n", []),
    ],
)
def test_a_name_refers_to_the_innermost_scope_that_binds_it(text: str, lines: list[int]) -> None:
    tree = Tree(text)
    scopes = Scopes(tree)
    *_, name = (each for each in scopes.words["a"] if scopes.is_read(each))
    assert [tree.line(each.node) for each in scopes.bindings(name)] == lines


def test_all_names_that_nothing_binds_are_found() -> None:
    text = "from b import *\nx: A = len(c)\n[d for d in e if d]\ndef f(g, *h, i=j) -> k: return g, h, l\n__name__\n"
    assert sorted(name.value for name in Scopes(Tree(text)).unbound()) == ["A", "c", "e", "j", "k", "l"]


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
