"""Finds gradients of an unscaled loss that a wrapped optimizer applies."""

from collections.abc import Iterator

import libcst as cst

from tfmp.migrate.analysis.script import Script
from tfmp.migrate.analysis.training.loss_scale_wrappers import WrappedOptimizers
from tfmp.migrate.analysis.training.manual_scaling import find_manual_scaling, loss_of
from tfmp.migrate.edits.results import Level


def find(script: Script) -> Iterator[tuple[cst.CSTNode, Level, str, str]]:
    """Report wrapped optimizers that apply gradients from tf.gradients or from another optimizer."""
    optimizers = script.cached(WrappedOptimizers)
    for call, optimizer, wrapping, grads in optimizers.applied_gradients():
        computed = optimizers.computations_behind(grads)
        for wrapper in wrapping.calls:
            together = [each for each in computed if not optimizers.flow.is_exclusive(each, wrapper)]
            if not together or any(_may_be_scaled(script, each) for each in together):
                continue
            unscaled = [each for each in together if find_manual_scaling(script, each) is None]
            first = min(unscaled or together, key=script.line)
            by_hand = find_manual_scaling(script, first)
            words = {
                "function": script.code(first.func),
                "name": script.code(optimizer),
                "optimizer": optimizers.description(optimizer, wrapper, wrapping.certain),
                "line": script.line(call),
            }
            if by_hand is None:
                yield first, Level.WRONG, _MESSAGE, _APPLIED.format(**words)
            else:
                yield first, Level.NOTE, _BY_HAND, _OF_SCRIPT.format(scale=script.code(by_hand[0]), **words)
            break


def _may_be_scaled(script: Script, gradients: cst.Call) -> bool:
    """Tell whether a wrapper computes these gradients, or the script multiplies their loss by a manager's scale."""
    optimizers, loss = script.cached(WrappedOptimizers), loss_of(gradients)
    if optimizers.computed_by_wrapper(gradients) is not None:
        return True
    func = gradients.func
    if isinstance(func, cst.Attribute) and not (script.name_of(func) or optimizers.flow.values(func.value).complete):
        # The optimizer may come from elsewhere, already wrapped.
        return True
    return loss is None or any(
        optimizers.reads_scale(each) for each in optimizers.flow.calls_behind(loss, lambda each: False)
    )


_MESSAGE = (
    "The gradients are computed from the unscaled loss, and a loss-scale optimizer applies them: small gradients are "
    "zero in float16, as without loss scaling. Write optimizer.compute_gradients(loss, variables) of the "
    "loss-scale optimizer: it scales the loss, and returns unscaled gradients in pairs with their variables."
)
_APPLIED = (
    "{function} computes them here, and {optimizer} applies them on line {line}: write {name}.compute_gradients here."
)
_BY_HAND = (
    "The script scales the loss and unscales the gradients itself, and a loss-scale optimizer applies them: the scale "
    "of its manager is never used. Write optimizer.compute_gradients(loss, variables) of the loss-scale optimizer with "
    "the unscaled loss, and leave out the multiplication and the division."
)
_OF_SCRIPT = "The script's scale is {scale}, and {optimizer} applies the gradients on line {line}."
