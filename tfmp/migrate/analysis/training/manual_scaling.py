"""Finds losses that a script multiplies by a scale itself, and gradients that it divides by it."""

from collections.abc import Iterator
from itertools import product

import libcst as cst

from tfmp.migrate.analysis.data_flow import DataFlow
from tfmp.migrate.analysis.expressions import argument, dotted
from tfmp.migrate.analysis.script import Script
from tfmp.migrate.analysis.training.loss_scale_wrappers import WrappedOptimizers
from tfmp.migrate.analysis.training.operands import operands, without_casts

_REDUCTIONS = ("reduce_mean", "reduce_sum")


def loss_factors(script: Script, loss: cst.BaseExpression) -> list[cst.BaseExpression]:
    """Return the factors of a loss, without those that the script divides out again before the gradients.

    Assignments, casts, reductions and conditional expressions are followed.
    """
    flow = script.cached(DataFlow)
    found: list[cst.BaseExpression] = []
    divisors, seen, stack = set(), set(), [loss]
    while stack:
        node = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        pair = operands(script, node, cst.Multiply)
        found += pair
        for binding in flow.bindings(node):
            if isinstance(binding.node, cst.AugAssign) and isinstance(binding.node.operator, cst.MultiplyAssign):
                found.append(binding.node.value)
            elif isinstance(binding.node, cst.Assign | cst.AnnAssign) and binding.value is not None:
                stack.append(binding.value)
        divisors |= {_number(script, each) for each in operands(script, node, cst.Divide)[1:]}
        stack += [*pair, *_passed_on(script, node)]
    return [factor for factor in found if _number(script, factor) not in divisors]


def is_same_number(script: Script, one: cst.BaseExpression, other: cst.BaseExpression) -> bool:
    """Tell whether two expressions have the same value, other than 1: as literals, or through the same variable."""
    flow = script.cached(DataFlow)
    pairs = product((one, *flow.values(one).nodes), (other, *flow.values(other).nodes))
    return any(_is_written_alike(script, first, second) for first, second in pairs)


def loss_of(gradients: cst.Call) -> cst.BaseExpression | None:
    """Return the loss that `tf.gradients` or `compute_gradients` differentiates."""
    return argument(gradients, 0, "ys") or argument(gradients, -1, "loss")


def find_manual_scaling(script: Script, gradients: cst.Call) -> tuple[cst.BaseExpression, cst.CSTNode] | None:
    """Return the factor that multiplies a loss and divides its gradients, with the division; None without one."""
    loss = loss_of(gradients)
    for factor in loss_factors(script, loss) if loss is not None else ():
        division = gradient_division(script, gradients, factor)
        if division is not None:
            return factor, division
    return None


def gradient_division(script: Script, gradients: cst.Call, factor: cst.BaseExpression) -> cst.CSTNode | None:
    """Return the division of gradients, by a factor of their loss or with its inverse; None without one."""
    flow, is_end = script.cached(DataFlow), script.cached(WrappedOptimizers).computes_gradients
    for node in script.nodes(cst.BinaryOperation, cst.Call):
        for dividend, divisor in _divided_by(script, node):
            if is_same_number(script, divisor, factor) and gradients in flow.behind([dividend], is_end):
                return node
    return None


def python_number(script: Script, factor: cst.BaseExpression) -> str:
    """Return the code of the Python number that a factor is made of: `8.0` if it is `tf.constant(8.0)`."""
    made = (each for each in script.cached(DataFlow).values(factor).nodes if without_casts(script, each) is not each)
    return script.code(without_casts(script, next(made, factor)))


def _passed_on(script: Script, node: cst.CSTNode) -> list[cst.BaseExpression]:
    """Return the operands through which a factor of an expression reaches the loss."""
    if isinstance(node, cst.IfExp):
        return [node.body, node.orelse]
    if isinstance(node, cst.Lambda):
        return [node.body]
    if isinstance(node, cst.Call) and script.last_word(node) in _REDUCTIONS and node.args:
        return [node.args[0].value]
    same = without_casts(script, node) if isinstance(node, cst.Call) else node
    return [*operands(script, node, cst.Divide)[:1], *([same] if same is not node else [])]


def _divided_by(script: Script, node: cst.CSTNode) -> Iterator[tuple[cst.BaseExpression, cst.BaseExpression]]:
    """Yield dividend and divisor of a quotient, or of a product with an inverse `1 / x`."""
    quotient = operands(script, node, cst.Divide)
    if quotient:
        yield quotient[0], quotient[1]
    factors = operands(script, node, cst.Multiply)
    for one, other in (factors, factors[::-1]) if factors else ():
        for each in (other, *script.cached(DataFlow).values(other).nodes):
            inverse = operands(script, each, cst.Divide)
            if inverse and _number(script, inverse[0]) == "1.0":
                yield one, inverse[1]


def _number(script: Script, node: cst.BaseExpression) -> str:
    """Return the code of a number without casts; `8` and `8.0` give the same text."""
    node = without_casts(script, node)
    return str(float(node.evaluated_value)) if isinstance(node, cst.Integer | cst.Float) else script.code(node)


def _is_written_alike(script: Script, one: cst.BaseExpression, other: cst.BaseExpression) -> bool:
    """Tell whether two expressions have the same code, and their names have the same bindings."""
    flow, text = script.cached(DataFlow), _number(script, one)
    if text != _number(script, other) or text == "1.0":
        return False
    if dotted(one):
        return flow.bindings(one) == flow.bindings(other)
    has_names = any(letter.isalpha() for letter in text)
    return not has_names or script.function_of(one) is script.function_of(other)
