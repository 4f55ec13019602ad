"""Sums, products and quotients in a script."""

import libcst as cst
import pytest

from tfmp.migrate.analysis.script import Script
from tfmp.migrate.analysis.training.operands import operands, without_casts


@pytest.mark.parametrize(
    ("text", "operator", "found"),
    [
        ("a * b", cst.Multiply, ["a", "b"]),
        ("tf.math.multiply(a, y=b)", cst.Multiply, ["a", "b"]),
        ("tf.div(a, b)", cst.Divide, ["a", "b"]),
        ("a / b", cst.Multiply, []),
        ("other.multiply(a, b)", cst.Multiply, []),
        ("tf.add(a)", cst.Add, []),
    ],
)
def test_operators_and_functions_give_their_operands(
    text: str, operator: type[cst.BaseBinaryOp], found: list[str]
) -> None:
    script = Script(f"import tensorflow as tf\nread({text})\n")
    node = script.nodes(cst.Call)[0].args[0].value
    assert [script.code(each) for each in operands(script, node, operator)] == found


def test_an_assignment_with_an_operator_gives_its_target_and_its_value() -> None:
    script = Script("grad /= scale\n")
    (node,) = script.nodes(cst.AugAssign)
    assert [script.code(each) for each in operands(script, node, cst.Divide)] == ["grad", "scale"]


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("tf.cast(tf.constant(8.0), tf.float16)", "8.0"),
        ("tf.identity(step.read_value())", "step"),
        ("step", "step"),
        ("tf.reduce_sum(step)", "tf.reduce_sum(step)"),
    ],
)
def test_casts_and_reads_are_left_out(text: str, found: str) -> None:
    script = Script(f"import tensorflow as tf\nread({text})\n")
    assert script.code(without_casts(script, script.nodes(cst.Call)[0].args[0].value)) == found
