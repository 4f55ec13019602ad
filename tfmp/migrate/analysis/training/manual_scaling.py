"""Finds losses that a script multiplies by a scale itself, and gradients that it divides by it."""

from collections.abc import Iterator
from itertools import product

import libcst as cst

from tfmp.migrate.analysis.data_flow import DataFlow
from tfmp.migrate.analysis.expressions import argument, dotted
from tfmp.migrate.analysis.script import Script
from tfmp.migrate.analysis.training.loss_scale_wrappers import WrappedOptimizers

_MODULES = ("tensorflow", "tensorflow.math", "tensorflow.python.ops.math_ops")
_PRODUCTS = tuple(f"{module}.{name}" for module in _MODULES for name in ("multiply", "scalar_mul"))
_SAME = ("tensorflow.cast", "tensorflow.identity", "tensorflow.to_float", "tensorflow.convert_to_tensor")
_REDUCTIONS = tuple(
    f"tensorflow.{name}" for name in ("reduce_mean", "reduce_sum", "math.reduce_mean", "math.reduce_sum")
)
_QUOTIENTS = ("tensorflow.divide", "tensorflow.math.divide", "tensorflow.div", "tensorflow.realdiv")


def loss_factors(script: Script, loss: cst.BaseExpression) -> list[cst.BaseExpression]:
    """Return the factors of a loss, without those that the script divides out again before the gradients.

    Assignments, casts, reductions and conditional expressions are followed.

    Args:
        script: The parsed script.
        loss: The expression that is given to the optimizer as its loss.

    Example:
        >>> script = Script('''
        ... scaled = tf.identity(loss * scale)
        ... minimize(scaled)
        ... ''')
        >>> *_, call = script.nodes(cst.Call)
        >>> [script.code(factor) for factor in loss_factors(script, call.args[0].value)]
        []
        >>> script = Script("import tensorflow as tf" + script.text)
        >>> *_, call = script.nodes(cst.Call)
        >>> [script.code(factor) for factor in loss_factors(script, call.args[0].value)]
        ['loss', 'scale']
    """
    flow = script.cached(DataFlow)
    found: list[cst.BaseExpression] = []
    divisors, seen, stack = set(), set(), [loss]
    while stack:
        node = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        pair = product_operands(script, node)
        found += pair
        for binding in flow.bindings(node):
            if isinstance(binding.node, cst.AugAssign) and isinstance(binding.node.operator, cst.MultiplyAssign):
                found.append(binding.node.value)
            elif isinstance(binding.node, cst.Assign | cst.AnnAssign) and binding.value is not None:
                stack.append(binding.value)
        if isinstance(node, cst.BinaryOperation) and isinstance(node.operator, cst.Divide):
            divisors.add(_number(script, node.right))
        stack += [*pair, *_passed_on(script, node)]
    return [factor for factor in found if _number(script, factor) not in divisors]


def divisions_by(script: Script, factor: cst.BaseExpression) -> Iterator[tuple[cst.CSTNode, cst.BaseExpression]]:
    """Yield each division by a number, or product with its inverse, with the expression that is divided.

    Args:
        script: The parsed script.
        factor: The expression of the number.
    """
    for node in script.nodes(cst.BinaryOperation, cst.Call):
        for dividend, divisor in _divided_by(script, node):
            if _number(script, divisor) == _number(script, factor) and _same_place(script, divisor, factor):
                yield node, dividend


def is_same_number(script: Script, one: cst.BaseExpression, other: cst.BaseExpression) -> bool:
    """Tell whether two expressions have the same value, other than 1: as literals, or through the same variable.

    Args:
        script: The parsed script.
        one: An expression.
        other: Another expression.

    Example:
        >>> script = Script("scale = 128.0; manager(128); minimize(loss * scale)")
        >>> first, second = script.nodes(cst.Integer)[0], script.nodes(cst.BinaryOperation)[0].right
        >>> is_same_number(script, first, second)
        True
    """
    flow = script.cached(DataFlow)
    pairs = product((one, *flow.values(one).nodes), (other, *flow.values(other).nodes))
    return any(_is_written_alike(script, first, second) for first, second in pairs)


def find_manual_scaling(script: Script, gradients: cst.Call) -> tuple[cst.BaseExpression, cst.CSTNode] | None:
    """Return the factor that multiplies a loss and divides its gradients, with the division; None without one.

    Args:
        script: The parsed script.
        gradients: The call that computes the gradients.
    """
    loss = argument(gradients, 0, "ys") or argument(gradients, -1, "loss")
    for factor in loss_factors(script, loss) if loss is not None else ():
        division = gradient_division(script, gradients, factor)
        if division is not None:
            return factor, division
    return None


def gradient_division(script: Script, gradients: cst.Call, factor: cst.BaseExpression) -> cst.CSTNode | None:
    """Return the division of gradients by a factor of their loss; None without one.

    Args:
        script: The parsed script.
        gradients: The call that computes the gradients.
        factor: The expression that the loss is multiplied by.
    """
    flow, optimizers = script.cached(DataFlow), script.cached(WrappedOptimizers)
    for node, dividend in divisions_by(script, factor):
        if gradients in flow.nodes_behind(dividend, optimizers.computes_gradients):
            return node
    return None


def product_operands(script: Script, node: cst.CSTNode) -> list[cst.BaseExpression]:
    """Return the two factors of a product; empty for any other node.

    Args:
        script: The parsed script.
        node: A product is `a * b`, or a call of `tf.multiply`.
    """
    if isinstance(node, cst.BinaryOperation) and isinstance(node.operator, cst.Multiply):
        return [node.left, node.right]
    if isinstance(node, cst.Call) and script.name_of(node.func) in _PRODUCTS:
        return [each for each in (argument(node, 0, "x"), argument(node, 1, "y")) if each is not None]
    return []


def quotient_operands(script: Script, node: cst.CSTNode) -> tuple[cst.BaseExpression, cst.BaseExpression] | None:
    """Return the dividend and the divisor of a quotient; None for any other node.

    Args:
        script: The parsed script.
        node: A quotient is `a / b`, or a call of `tf.divide`.
    """
    if isinstance(node, cst.BinaryOperation) and isinstance(node.operator, cst.Divide):
        return node.left, node.right
    if isinstance(node, cst.Call) and script.name_of(node.func) in _QUOTIENTS and len(node.args) > 1:
        return node.args[0].value, node.args[1].value
    return None


def _passed_on(script: Script, node: cst.CSTNode) -> list[cst.BaseExpression]:
    """Return the operands through which a factor of an expression reaches the loss."""
    if isinstance(node, cst.IfExp):
        return [node.body, node.orelse]
    if isinstance(node, cst.Lambda):
        return [node.body]
    if isinstance(node, cst.BinaryOperation) and isinstance(node.operator, cst.Divide):
        return [node.left]
    if isinstance(node, cst.Call) and script.name_of(node.func) in (*_SAME, *_REDUCTIONS) and node.args:
        return [node.args[0].value]
    return []


def _divided_by(script: Script, node: cst.CSTNode) -> Iterator[tuple[cst.BaseExpression, cst.BaseExpression]]:
    """Yield dividend and divisor of a quotient or of a product with an inverse."""
    found = quotient_operands(script, node)
    if found is not None:
        yield found
    pair = product_operands(script, node)
    for one, other in (pair, pair[::-1]) if len(pair) == 2 else ():
        yield from ((one, divisor) for divisor in _inverted(script, other))


def _inverted(script: Script, node: cst.BaseExpression) -> Iterator[cst.BaseExpression]:
    """Yield the divisors x if an expression is `1 / x`."""
    for each in (node, *script.cached(DataFlow).values(node).nodes):
        if not isinstance(each, cst.BinaryOperation) or not isinstance(each.operator, cst.Divide):
            continue
        if _number(script, each.left) == "1.0":
            yield each.right


def _number(script: Script, node: cst.BaseExpression) -> str:
    """Return the code of a number without casts; `8` and `8.0` give the same text."""
    if isinstance(node, cst.Call) and script.name_of(node.func) in _SAME and node.args:
        node = node.args[0].value
    if isinstance(node, cst.Integer | cst.Float):
        return str(float(node.evaluated_value))
    return script.code(node)


def _is_written_alike(script: Script, one: cst.BaseExpression, other: cst.BaseExpression) -> bool:
    """Tell whether two expressions have the same code, and their names have the same bindings."""
    flow, text = script.cached(DataFlow), _number(script, one)
    if text != _number(script, other) or text == "1.0":
        return False
    if dotted(one):
        return flow.bindings(one) == flow.bindings(other)
    has_names = any(letter.isalpha() for letter in text)
    return not has_names or script.function_of(one) is script.function_of(other)


def _same_place(script: Script, one: cst.CSTNode, other: cst.CSTNode) -> bool:
    """Tell whether the same code has the same meaning in two places: in one function, or for attributes of self."""
    function = script.function_of(other)
    return function is None or function in script.ancestors(one) or script.code(one).startswith("self.")
