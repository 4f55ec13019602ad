"""The path of gradient elements through a script."""

import libcst as cst
import pytest

from tfmp.migrate.analysis.script import Script
from tfmp.migrate.analysis.training.gradient_values import may_be_gradient


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("grads", True),
        ("[g * 2.0 for g in grads]", True),
        ("parameter", True),
        ("tf.global_norm(grads)", False),
        ("tf.zeros_like(grads[0])", False),
        ("1.0 / tf.global_norm(grads)", False),
        ("3.0", False),
    ],
)
def test_norms_and_shapes_are_no_gradients(value: str, expected: bool) -> None:
    script = Script(f"import tensorflow as tf\ndef f(parameter):\n    grads = tf.gradients(a, b)\n    read({value})\n")
    call = next(call for call in script.nodes(cst.Call) if script.code(call.func) == "read")
    assert may_be_gradient(script, call.args[0].value) is expected
