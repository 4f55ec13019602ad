"""Recognizes losses that a script multiplies, and gradients that it divides, by itself."""

from collections.abc import Iterator
from itertools import product

import libcst as cst

from tfmp.migrate.analysis.calls import argument, code
from tfmp.migrate.analysis.data_flow import DataFlow
from tfmp.migrate.analysis.loss_scale_wrappers import WrappedOptimizers
from tfmp.migrate.analysis.names import dotted
from tfmp.migrate.analysis.script import Script

_MODULES = ("tensorflow", "tensorflow.math", "tensorflow.python.ops.math_ops")
_PRODUCTS = tuple(f"{module}.{name}" for module in _MODULES for name in ("multiply", "scalar_mul"))
_SAME = ("tensorflow.cast", "tensorflow.identity", "tensorflow.to_float", "tensorflow.convert_to_tensor")
_REDUCTIONS = tuple(
    f"tensorflow.{name}" for name in ("reduce_mean", "reduce_sum", "math.reduce_mean", "math.reduce_sum")
)
_QUOTIENTS = ("tensorflow.divide", "tensorflow.math.divide", "tensorflow.div", "tensorflow.realdiv")


def loss_factors(script: Script, loss: cst.BaseExpression) -> list[cst.BaseExpression]:
    """Return what a script multiplies to get a loss, by names, casts and conditions, and does not divide out again.

    Args:
        script: The script.
        loss: The loss, as it is handed over.

    Example:
        >>> script = Script('''
        ... scaled = tf.identity(loss * scale)
        ... minimize(scaled)
        ... ''')
        >>> *_, call = script.nodes(cst.Call)
        >>> [code(script, factor) for factor in loss_factors(script, call.args[0].value)]
        []
        >>> script = Script("import tensorflow as tf" + script.text)
        >>> *_, call = script.nodes(cst.Call)
        >>> [code(script, factor) for factor in loss_factors(script, call.args[0].value)]
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
    """Return where a script divides by a number or multiplies by its inverse, and what it divides there.

    Args:
        script: The script.
        factor: The number.
    """
    for node in script.nodes(cst.BinaryOperation, cst.Call):
        for dividend, divisor in _divided_by(script, node):
            if _number(script, divisor) == _number(script, factor) and _same_place(script, divisor, factor):
                yield node, dividend


def is_same_number(script: Script, one: cst.BaseExpression, other: cst.BaseExpression) -> bool:
    """Tell whether two expressions stand for one number, other than 1: by its digits, or by what holds it.

    Args:
        script: The script.
        one: The one.
        other: The other.

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
    """Return what a loss is multiplied by and its gradients are divided by again, with the division; None if nothing.

    Args:
        script: The script.
        gradients: The call that computes the gradients.
    """
    loss = argument(gradients, 0, "ys") or argument(gradients, -1, "loss")
    for factor in loss_factors(script, loss) if loss is not None else ():
        division = gradient_division(script, gradients, factor)
        if division is not None:
            return factor, division
    return None


def gradient_division(script: Script, gradients: cst.Call, factor: cst.BaseExpression) -> cst.CSTNode | None:
    """Return the division of gradients by a factor of their loss; None if there is none.

    Args:
        script: The script.
        gradients: The call that computes the gradients.
        factor: What the loss is multiplied by.
    """
    flow, optimizers = script.cached(DataFlow), script.cached(WrappedOptimizers)
    for node, dividend in divisions_by(script, factor):
        if gradients in flow.nodes_behind(dividend, optimizers.is_gradients):
            return node
    return None


def product_operands(script: Script, node: cst.CSTNode) -> list[cst.BaseExpression]:
    """Return the two factors of a product; nothing for anything else.

    Args:
        script: The script.
        node: The product: `a * b`, or a call of `tf.multiply`.
    """
    if isinstance(node, cst.BinaryOperation) and isinstance(node.operator, cst.Multiply):
        return [node.left, node.right]
    if isinstance(node, cst.Call) and script.name_of(node.func) in _PRODUCTS:
        return [each for each in (argument(node, 0, "x"), argument(node, 1, "y")) if each is not None]
    return []


def quotient_operands(script: Script, node: cst.CSTNode) -> tuple[cst.BaseExpression, cst.BaseExpression] | None:
    """Return dividend and divisor of a quotient; None for anything else.

    Args:
        script: The script.
        node: The quotient: `a / b`, or a call of `tf.divide`.
    """
    if isinstance(node, cst.BinaryOperation) and isinstance(node.operator, cst.Divide):
        return node.left, node.right
    if isinstance(node, cst.Call) and script.name_of(node.func) in _QUOTIENTS and len(node.args) > 1:
        return node.args[0].value, node.args[1].value
    return None


def _passed_on(script: Script, node: cst.CSTNode) -> list[cst.BaseExpression]:
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
    found = quotient_operands(script, node)
    if found is not None:
        yield found
    pair = product_operands(script, node)
    for one, other in (pair, pair[::-1]) if len(pair) == 2 else ():
        yield from ((one, divisor) for divisor in _inverted(script, other))


def _inverted(script: Script, node: cst.BaseExpression) -> Iterator[cst.BaseExpression]:
    """Return what a number is 1 over."""
    for each in (node, *script.cached(DataFlow).values(node).nodes):
        if not isinstance(each, cst.BinaryOperation) or not isinstance(each.operator, cst.Divide):
            continue
        if _number(script, each.left) == "1.0":
            yield each.right


def _number(script: Script, node: cst.BaseExpression) -> str:
    """Return a number as it is written, the same text for 8 and 8.0."""
    if isinstance(node, cst.Call) and script.name_of(node.func) in _SAME and node.args:
        node = node.args[0].value
    if isinstance(node, cst.Integer | cst.Float):
        return str(float(node.evaluated_value))
    return code(script, node)


def _is_written_alike(script: Script, one: cst.BaseExpression, other: cst.BaseExpression) -> bool:
    """Tell whether two expressions are written alike, and mean the same by it."""
    flow, text = script.cached(DataFlow), _number(script, one)
    if text != _number(script, other) or text == "1.0":
        return False
    if dotted(one):
        return flow.bindings(one) == flow.bindings(other)
    has_names = any(letter.isalpha() for letter in text)
    return not has_names or script.function_of(one) is script.function_of(other)


def _same_place(script: Script, one: cst.CSTNode, other: cst.CSTNode) -> bool:
    """Tell whether the same text means the same in two places: in a function and the functions in it, or a class."""
    function = script.function_of(other)
    return function is None or function in script.ancestors(one) or code(script, one).startswith("self.")
