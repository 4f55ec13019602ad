"""Finds losses that are scaled twice."""

from collections.abc import Iterator
from itertools import product

import libcst as cst

from tfmp.migrate.analysis.script import Script
from tfmp.migrate.analysis.training.loss_scale_wrappers import WrappedOptimizers
from tfmp.migrate.analysis.training.manual_scaling import gradient_division, is_same_number, loss_factors, loss_of
from tfmp.migrate.edits.results import Level


def find(script: Script) -> Iterator[tuple[cst.CSTNode, Level, str, str]]:
    """Report wrappers around wrappers, and losses that a script scales before a wrapper scales them again."""
    optimizers = script.cached(WrappedOptimizers)
    for construction in optimizers.constructions:
        # In `self.opt = wrapper(self.opt)`, the value of the inner name may be the wrapper itself.
        inside = optimizers.wrapping(optimizers.inner(construction), inside=construction)
        if inside is None or not (inside.certain or not optimizers.flow.is_conditional(construction, inside.calls[0])):
            continue
        of_tfmp = not any(optimizers.is_tensorflows(each) for each in (construction, *inside.calls))
        level, message = (Level.FAILS, _REFUSED) if of_tfmp else (Level.WRONG, _TWO_WRAPPERS)
        yield construction, level, message, f"The inner one is constructed on line {script.line(inside.calls[0])}."
    for call, optimizer in script.methods("compute_gradients", "minimize"):
        loss, wrapping = loss_of(call), optimizers.wrapping(optimizer)
        if loss is None or wrapping is None:
            continue
        for factor, wrapper in product(loss_factors(script, loss), wrapping.calls):
            if _is_scale(script, call, wrapper, factor) and not optimizers.flow.conditions.is_exclusive(
                factor, wrapper
            ):
                said = optimizers.description(optimizer, wrapper, wrapping.certain)
                yield call, Level.WRONG, _BY_HAND, f"The factor is {script.code(factor)}, and the optimizer is {said}."
                break


def _is_scale(script: Script, call: cst.Call, wrapper: cst.Call, factor: cst.BaseExpression) -> bool:
    """Tell whether a factor of the loss is a manager's scale, or a number that also divides the gradients."""
    optimizers = script.cached(WrappedOptimizers)
    if any(optimizers.reads_scale(each) for each in (factor, *optimizers.flow.values(factor).nodes)):
        return True
    if any(is_same_number(script, factor, each) for each in optimizers.scales(wrapper)):
        return True
    return gradient_division(script, call, factor) is not None


_REFUSED = (
    "A loss-scale optimizer is put around an optimizer that is inside one already. tfmp raises an error here, because "
    "the loss would be scaled twice. Leave one of the two out."
)
_TWO_WRAPPERS = (
    "Two loss-scale optimizers, of which at least one is TensorFlow's own, are around one optimizer: the loss is "
    "multiplied by both scales, so it overflows much earlier. Leave one of the two out."
)
_BY_HAND = (
    "The script multiplies the loss by a loss scale, and the loss-scale optimizer multiplies it by its own: the loss "
    "overflows earlier, and gradients that the script does not divide by its factor are too large. Give the loss-scale "
    "optimizer the loss without the factor, and use its gradients as they are: they are unscaled already."
)
