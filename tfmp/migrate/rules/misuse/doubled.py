"""Finds losses that are scaled twice."""

from collections.abc import Iterator

import libcst as cst

from tfmp.migrate.analysis.data_flow import DataFlow
from tfmp.migrate.analysis.expressions import argument, method
from tfmp.migrate.analysis.script import Script
from tfmp.migrate.analysis.training.loss_scale_wrappers import WrappedOptimizers
from tfmp.migrate.analysis.training.manual_scaling import gradient_division, is_same_number, loss_factors
from tfmp.migrate.edits.results import Level

# The managers, with the name of the argument that holds their constant or first scale.
_SCALES = {"FixedLossScaleManager": "loss_scale", "ExponentialUpdateLossScaleManager": "init_loss_scale"}
_OF_TENSORFLOW = ("MixedPrecisionLossScaleOptimizer", "enable_mixed_precision_graph_rewrite")


def find(script: Script) -> Iterator[tuple[cst.CSTNode, Level, str]]:
    """Report losses that a script scales before a wrapper scales them again, and wrappers around wrappers."""
    optimizers, flow = script.cached(WrappedOptimizers), script.cached(DataFlow)
    for construction in optimizers.constructions:
        inner = optimizers.inner(construction)
        wrapping = optimizers.wrapping(inner)
        if wrapping is None or inner is None:
            continue
        if wrapping.certain or not flow.is_conditional(construction, wrapping.call):
            line = script.line(wrapping.call)
            yield construction, Level.WRONG, _TWICE.format(line=line)
    yield from _with_tensorflows(script)
    for call, owner, loss in optimizers.gradient_computations():
        wrapping = optimizers.wrapping(owner)
        if wrapping is None:
            continue
        multipliers = (each for each in loss_factors(script, loss) if not flow.is_exclusive(each, wrapping.call))
        scale = next((each for each in multipliers if _is_scale(script, call, wrapping.call, each)), None)
        if scale is not None:
            said = optimizers.description(owner, wrapping)
            yield call, Level.WRONG, _BY_HAND.format(scale=script.code(scale), optimizer=said)


def _with_tensorflows(script: Script) -> Iterator[tuple[cst.CSTNode, Level, str]]:
    """Yield each loss-scaling optimizer of TensorFlow that is around a wrapper or inside one."""
    optimizers, flow = script.cached(WrappedOptimizers), script.cached(DataFlow)
    for call in script.nodes(cst.Call) if optimizers.constructions else ():
        wrapping = optimizers.wrapping(argument(call, 0, "opt")) if _is_tensorflows(script, call) else None
        if wrapping is not None and (wrapping.certain or not flow.is_conditional(call, wrapping.call)):
            message = _TENSORFLOWS.format(function=script.code(call.func), line=script.line(wrapping.call))
            yield call, Level.WRONG, message
    for construction in optimizers.constructions:
        inner = optimizers.inner(construction)
        made = (inner, *flow.values(inner).nodes) if inner is not None else ()
        for each in (node for node in made if isinstance(node, cst.Call) and _is_tensorflows(script, node)):
            if len(made) < 3 or not flow.is_conditional(construction, each):
                message = _AROUND_TENSORFLOWS.format(function=script.code(each.func), line=script.line(each))
                yield construction, Level.WRONG, message


def _is_tensorflows(script: Script, call: cst.Call) -> bool:
    name = script.name_of(call.func)
    return name.startswith("tensorflow.") and name.split(".")[-1] in _OF_TENSORFLOW and ".keras." not in name


def _is_scale(script: Script, call: cst.Call, construction: cst.Call, factor: cst.BaseExpression) -> bool:
    """Tell whether a factor of the loss is a manager's scale, or a number that also divides the gradients."""
    values = (factor, *script.cached(DataFlow).values(factor).nodes)
    if any(isinstance(each, cst.Call) and method(each)[1] == "get_loss_scale" for each in values):
        return True
    named = (each for each in values if isinstance(each, cst.Attribute) and each.attr.value == "loss_scale")
    if any(script.cached(WrappedOptimizers).wrapping(each.value) is not None for each in named):
        return True
    if any(is_same_number(script, factor, each) for each in _scales(script, construction)):
        return True
    return gradient_division(script, call, factor) is not None


def _scales(script: Script, construction: cst.Call) -> Iterator[cst.BaseExpression]:
    """Yield the scale that the manager of a wrapper is constructed with."""
    manager = argument(construction, 1, "loss_scale_manager")
    made = (manager, *script.cached(DataFlow).values(manager).nodes) if manager is not None else ()
    for each in (node for node in made if isinstance(node, cst.Call)):
        keyword = _SCALES.get(script.last_word(each), "")
        scale = argument(each, 0, keyword) if keyword else None
        if scale is not None:
            yield scale


_TENSORFLOWS = (
    "{function} is put around the wrapper of line {line}, and scales the loss too: it is scaled twice, by two managers "
    "that do not know of each other. Leave one of the two out."
)
_AROUND_TENSORFLOWS = (
    "the wrapper is put around what {function} returns on line {line}, which scales the loss too: it is scaled twice, "
    "by two managers that do not know of each other. Leave one of the two out."
)
_TWICE = (
    "the optimizer is wrapped already on line {line}: the loss would be scaled twice, and tfmp refuses it. Leave one "
    "wrapper out."
)
_BY_HAND = (
    "the loss is multiplied by {scale}, and {optimizer} scales it again: it overflows that much earlier, and gradients "
    "that are not divided by it stay that much too large. Give it the loss itself, and use the gradients that it "
    "returns as they are: they are unscaled."
)
