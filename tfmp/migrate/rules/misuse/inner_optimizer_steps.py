"""Finds steps of an inner optimizer that bypass its wrapper."""

from collections.abc import Iterator, Sequence

import libcst as cst

from tfmp.migrate.analysis.data_flow import DataFlow
from tfmp.migrate.analysis.expressions import argument, method
from tfmp.migrate.analysis.script import Script
from tfmp.migrate.analysis.training.loss_scale_wrappers import WrappedOptimizers
from tfmp.migrate.edits.results import Level


def find(script: Script) -> Iterator[tuple[cst.CSTNode, Level, str]]:
    """Report gradients of a wrapper that the inner optimizer applies, and wrappers that are never used."""
    optimizers = script.cached(WrappedOptimizers)
    # A script that calls update_loss_scale itself checks for overflow itself.
    if not optimizers.constructions or any(True for _ in script.methods("update_loss_scale")):
        return
    for call, owner in script.methods("apply_gradients", "minimize"):
        around = _wrappers_around(script, owner)
        if not around or optimizers.wrapping(owner) is not None:
            continue
        computed = _of_wrapper(script, call, around)
        unused = [each for each in around if _is_unused(script, each)]
        if computed is not None:
            wrapper = script.code(method(computed)[0])
            message = _GRADIENTS.format(wrapper=wrapper, line=script.line(computed), inner=script.code(owner))
            yield call, Level.WRONG, message
        elif len(unused) == len(around) and not script.cached(DataFlow).is_exclusive(call, unused[0]):
            step = script.code(call.func)
            yield call, Level.WRONG, _UNUSED.format(line=script.line(unused[0]), step=step, name=method(call)[1])


def _wrappers_around(script: Script, optimizer: cst.BaseExpression) -> Sequence[cst.Call]:
    """Return the calls that construct wrappers around an optimizer that is used here without a wrapper."""
    flow, optimizers = script.cached(DataFlow), script.cached(WrappedOptimizers)
    if isinstance(optimizer, cst.Attribute) and optimizer.attr.value == "_opt":
        wrapping = optimizers.wrapping(optimizer.value)
        return [wrapping.call] if wrapping is not None else []
    made, found = set(flow.values(optimizer).nodes), []
    for construction in optimizers.constructions:
        inner = optimizers.inner(construction)
        if inner is not None and made & set(flow.values(inner).nodes):
            found.append(construction)
    return found


def _of_wrapper(script: Script, call: cst.Call, around: Sequence[cst.Call]) -> cst.Call | None:
    """Return the call of `compute_gradients` on one of these wrappers whose gradients the step applies; else None."""
    optimizers, flow = script.cached(WrappedOptimizers), script.cached(DataFlow)
    grads = argument(call, 0, "grads_and_vars") if method(call)[1] == "apply_gradients" else None
    for each in flow.calls_behind(grads, optimizers.computes_gradients) if grads is not None else ():
        wrapping = optimizers.computed_by_wrapper(each)
        if wrapping is not None and wrapping.certain and wrapping.call in around:
            return each
    return None


def _is_unused(script: Script, construction: cst.Call) -> bool:
    above = script.parent(construction)
    target = above.targets[0].target if isinstance(above, cst.Assign) and len(above.targets) == 1 else None
    return isinstance(target, cst.Name) and script.reads_of(target) == ()


_GRADIENTS = (
    "{wrapper} computes the gradients on line {line}, and the optimizer inside it, {inner}, applies them: a step that "
    "overflowed is not skipped, and a dynamic scale never moves. Write {wrapper}.apply_gradients."
)
_UNUSED = (
    "the wrapper on line {line} is never used: {step} trains without loss scaling. Call {name} of the wrapper instead."
)
