"""Reads sums, products and quotients, as operators or as functions of TensorFlow."""

import libcst as cst

from tfmp.migrate.analysis.expressions import argument, method
from tfmp.migrate.analysis.script import Script

_MODULES = ("tensorflow", "tensorflow.math", "tensorflow.python.ops.math_ops")
_FUNCTIONS: dict[str, type[cst.BaseBinaryOp]] = {
    "add": cst.Add,
    **dict.fromkeys(("multiply", "scalar_mul"), cst.Multiply),
    **dict.fromkeys(("divide", "div", "realdiv", "truediv"), cst.Divide),
}
# Functions and methods that return the number or the variable that they get.
_SAME = ("cast", "constant", "convert_to_tensor", "identity", "to_float", "to_int32", "to_int64", "int32", "int64")
_READS = ("read_value", "value", "initialized_value")


def operands(
    script: Script, node: cst.CSTNode, operator: type[cst.BaseBinaryOp]
) -> tuple[cst.BaseExpression, cst.BaseExpression] | tuple[()]:
    """Return the operands of `a * b`, `a *= b` or `tf.multiply(a, b)`, for one operator; empty for any other node.

    Examples:
        >>> script = Script("import tensorflow as tf; tf.multiply(a, b)")
        >>> [script.code(each) for each in operands(script, script.nodes(cst.Call)[0], cst.Multiply)]
        ['a', 'b']
    """
    if isinstance(node, cst.BinaryOperation):
        return (node.left, node.right) if isinstance(node.operator, operator) else ()
    if isinstance(node, cst.AugAssign):
        return (node.target, node.value) if type(node.operator).__name__ == f"{operator.__name__}Assign" else ()
    if not isinstance(node, cst.Call):
        return ()
    module, _, name = script.name_of(node.func).rpartition(".")
    if module not in _MODULES or _FUNCTIONS.get(name) is not operator:
        return ()
    left, right = argument(node, 0, "x"), argument(node, 1, "y")
    return (left, right) if left is not None and right is not None else ()


def without_casts(script: Script, node: cst.BaseExpression) -> cst.BaseExpression:
    """Return the number or the variable behind casts, copies and reads, as `step` in `tf.cast(step.value(), dtype)`."""
    while isinstance(node, cst.Call):
        owner, name = method(node)
        if name in _READS and not node.args:
            node = owner
        elif script.last_word(node) in _SAME and node.args:
            node = node.args[0].value
        else:
            break
    return node
