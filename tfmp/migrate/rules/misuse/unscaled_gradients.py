"""Finds gradients of an unscaled loss that a wrapped optimizer applies."""

from collections.abc import Iterator

import libcst as cst

from tfmp.migrate.analysis.data_flow import DataFlow
from tfmp.migrate.analysis.expressions import argument, method
from tfmp.migrate.analysis.script import Script
from tfmp.migrate.analysis.training.loss_scale_wrappers import WrappedOptimizers
from tfmp.migrate.analysis.training.manual_scaling import find_manual_scaling
from tfmp.migrate.edits.results import Level


def find(script: Script) -> Iterator[tuple[cst.CSTNode, Level, str]]:
    """Report wrapped optimizers that apply gradients from tf.gradients or from another optimizer."""
    optimizers, flow = script.cached(WrappedOptimizers), script.cached(DataFlow)
    for call, wrapping, behind in optimizers.applied_gradients():
        calls = [each for each in behind if isinstance(each, cst.Call) and optimizers.computes_gradients(each)]
        computed = [each for each in calls if not flow.is_exclusive(each, wrapping.call)]
        if not computed or any(_may_be_scaled(script, each) for each in computed):
            continue
        unscaled = [each for each in computed if find_manual_scaling(script, each) is None]
        first, optimizer = min(unscaled or computed, key=script.line), method(call)[0]
        by_hand = find_manual_scaling(script, first)
        message = (_MESSAGE if by_hand is None else _BY_HAND).format(
            function=script.code(first.func),
            optimizer=optimizers.description(optimizer, wrapping),
            name=script.code(optimizer),
            line=script.line(call),
            scale=script.code(by_hand[0]) if by_hand is not None else "",
        )
        yield first, Level.WRONG if by_hand is None else Level.NOTE, message


def _may_be_scaled(script: Script, gradients: cst.Call) -> bool:
    """Tell whether a wrapper computes these gradients, or the script multiplies their loss by a manager's scale."""
    optimizers = script.cached(WrappedOptimizers)
    if optimizers.computed_by_wrapper(gradients) is not None:
        return True
    owner, name = method(gradients)
    if name == "compute_gradients" and not script.cached(DataFlow).values(owner).complete:
        # The optimizer may come from elsewhere, already wrapped.
        return True
    loss = argument(gradients, 0, "ys") or argument(gradients, -1, "loss")
    if loss is None:
        return True
    calls = script.cached(DataFlow).calls_behind(loss, lambda each: False)
    return any(method(each)[1] == "get_loss_scale" for each in calls)


_BY_HAND = (
    "the loss is multiplied by {scale} by hand, and its gradients are divided by it before {optimizer} applies them on "
    "line {line}: the manager's scale is not used. Write {name}.compute_gradients(loss, variables), which does both "
    "with it."
)
_MESSAGE = (
    "{function} differentiates the loss unscaled, and {optimizer} applies the gradients on line {line}: small ones are "
    "lost as without loss scaling. Write {name}.compute_gradients(loss, variables), which scales, unscales and returns "
    "pairs."
)
