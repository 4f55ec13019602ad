"""What conditions on classes say of an optimizer."""

import libcst as cst
import pytest

from tfmp.migrate.analysis.expressions import dotted
from tfmp.migrate.analysis.script import Script
from tfmp.migrate.analysis.training.optimizer_types import class_answer

_SCRIPT = """
import tensorflow as tf
from elsewhere import Other
class Own(tf.train.Optimizer): pass
class Derived(Own): pass
Alias = Own
def f(cls):
    made = {made}(0.1)
    return {test}
"""


def _answer(made: str, test: str) -> bool | None:
    script = Script(_SCRIPT.format(made=made, test=test))
    (returned,) = script.nodes(cst.Return)
    (assigned,) = (node.value for node in script.nodes(cst.Assign) if dotted(node.targets[0].target) == "made")
    assert returned.value is not None
    assert isinstance(assigned, cst.Call)
    return class_answer(script, returned.value, assigned, lambda node: dotted(node) == "made")


@pytest.mark.parametrize(
    ("made", "test", "answer"),
    [
        ("Own", "isinstance(made, Own)", True),
        ("Derived", "isinstance(made, Own)", True),
        ("Derived", "type(made) is Own", False),
        ("Derived", "type(made) is not Own", True),
        ("Own", "isinstance(made, (Derived, Own))", True),
        ("Own", "type(made) in (Derived, Own)", True),
        ("Own", "made.__class__.__name__ == 'Own'", True),
        ("Own", "type(made).__name__ != 'Own'", False),
        ("Own", "type(made) == Alias", True),
        ("Own", "isinstance(made, tf.train.Optimizer)", True),
        ("tf.train.AdamOptimizer", "isinstance(made, tf.train.Optimizer)", True),
        ("tf.train.AdamOptimizer", "isinstance(made, tf.train.MomentumOptimizer)", False),
        ("tf.train.AdamOptimizer", "isinstance(made, Own)", False),
        ("tf.train.AdamOptimizer", "isinstance(made, Other)", False),
        ("tf.train.AdamOptimizer", "not isinstance(made, Own)", True),
        ("Other", "isinstance(made, Own)", False),
        ("Other", "isinstance(made, tf.train.AdamOptimizer)", None),
        ("Own", "isinstance(made, cls)", None),
        ("Own", "isinstance(other, Own)", None),
        ("Own", "isinstance(made, Own) and a", None),
        ("Own", "isinstance(made, Own) or a", True),
        ("tf.train.AdamOptimizer", "isinstance(made, Own) and a", False),
        ("Own", "made is None", None),
    ],
)
def test_a_condition_on_a_class_has_this_answer(made: str, test: str, answer: bool | None) -> None:
    assert _answer(made, test) is answer
