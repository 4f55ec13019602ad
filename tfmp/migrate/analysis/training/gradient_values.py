"""Follows gradients element by element, from where they are computed to where they are applied."""

from collections.abc import Sequence
from functools import partial

import libcst as cst

from tfmp.migrate.analysis.data_flow import DataFlow
from tfmp.migrate.analysis.expressions import argument
from tfmp.migrate.analysis.script import Script
from tfmp.migrate.analysis.training.loss_scale_wrappers import WrappedOptimizers
from tfmp.migrate.analysis.training.operands import operands

# Functions whose result depends only on the shape of a tensor, and norms.
_NUMBERS = ("shape", "size", "zeros_like", "ones_like", "zeros", "ones", "fill", "global_norm", "norm", "l2_loss")
_AXES = ("axis", "reduction_indices")


def gradients_behind(script: Script, node: cst.BaseExpression) -> Sequence[cst.CSTNode]:
    """Return the nodes behind a value through which single gradient elements pass, as far as the script shows.

    Norms, divisors and other factors are left out, because they do not make an infinite gradient finite.
    """
    optimizers = script.cached(WrappedOptimizers)
    return [*optimizers.flow.behind([node], optimizers.computes_gradients, partial(_is_beside, script))]


def may_be_gradient(script: Script, node: cst.BaseExpression) -> bool:
    """Tell whether a value may contain gradient elements: it does, or the script does not show its origin."""
    return any(_is_computed(script, each) or _is_unknown(script, each) for each in gradients_behind(script, node))


def _is_computed(script: Script, node: cst.CSTNode) -> bool:
    return isinstance(node, cst.Call) and script.cached(WrappedOptimizers).computes_gradients(node)


def _is_unknown(script: Script, node: cst.CSTNode) -> bool:
    """Tell whether this is a parameter, or a name without a visible binding."""
    if not isinstance(node, cst.Name) or script.is_builtin(node) or not script.is_use(node):
        return False
    bindings = script.cached(DataFlow).bindings(node)
    is_imported = any(one.bound == node.value for one in script.imports)
    return any(each.value is None for each in bindings) or not (bindings or is_imported)


def _is_beside(script: Script, node: cst.CSTNode) -> bool:
    """Tell whether this is a norm, a divisor, or a factor that the gradients are multiplied by."""
    if _is_apart(script, node):
        return True
    beside = [each for each in operands(script, _operation(script, node), cst.Multiply) if each is not node]
    return len(beside) == 1 and _holds(script, beside[0]) and not _holds(script, node)


def _operation(script: Script, node: cst.CSTNode) -> cst.CSTNode:
    """Return the expression of which a node is an operand or an argument."""
    above = script.parent(node) or node
    return (script.parent(above) or above) if isinstance(above, cst.Arg) else above


def _holds(script: Script, node: cst.CSTNode) -> bool:
    """Tell whether a value contains computed gradients."""
    optimizers = script.cached(WrappedOptimizers)
    found = optimizers.flow.behind([node], optimizers.computes_gradients, partial(_is_apart, script))
    return any(_is_computed(script, each) for each in found)


def _is_apart(script: Script, node: cst.CSTNode) -> bool:
    """Tell whether this is a number or a shape that is computed from gradients, or a divisor."""
    if node in operands(script, _operation(script, node), cst.Divide)[1:]:
        return True
    if not isinstance(node, cst.Call):
        return False
    last = script.name_of(node.func).split(".")[-1]
    has_axis = len(node.args) > 1 or any(argument(node, -1, axis) is not None for axis in _AXES)
    return last in _NUMBERS or last.startswith("is_") or (last.startswith("reduce_") and not has_axis)
