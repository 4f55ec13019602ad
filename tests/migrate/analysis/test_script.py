"""The meanings of names in a script."""

import libcst as cst

from tfmp.migrate.analysis.script import Script


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
