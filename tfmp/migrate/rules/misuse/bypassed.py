"""Finds training steps in which a wrapper does not compute the gradients, or does not apply them."""

from collections.abc import Iterator, Sequence

import libcst as cst

from tfmp.migrate.analysis.script import Script
from tfmp.migrate.analysis.training.loss_scale_wrappers import Step, WrappedOptimizers, Wrapping, is_unused
from tfmp.migrate.analysis.training.manual_scaling import find_manual_scaling, loss_of
from tfmp.migrate.edits.results import Level

# The attributes in which wrappers keep the inner optimizer: tfmp's, and TensorFlow's own.
_INNER = ("_opt", "_optimizer")


def find(script: Script) -> Iterator[tuple[cst.CSTNode, Level, str, str]]:
    """Report steps with unscaled gradients, and steps of the optimizer inside a wrapper."""
    optimizers = script.cached(WrappedOptimizers)
    for step in optimizers.steps:
        if step.wrapping is not None:
            yield from _unscaled(script, step, step.wrapping)
    # A script that calls update_loss_scale itself checks for overflow itself.
    if not any(True for _ in script.methods("update_loss_scale")):
        for step in optimizers.steps:
            if step.wrapping is None:
                yield from _of_inner(script, step)


def _unscaled(script: Script, step: Step, wrapping: Wrapping) -> Iterator[tuple[cst.CSTNode, Level, str, str]]:
    """Yield the finding for a wrapped optimizer that applies gradients from tf.gradients or another optimizer."""
    optimizers = script.cached(WrappedOptimizers)
    for wrapper in wrapping.calls:
        together = [each for each in step.computations if not optimizers.flow.conditions.is_exclusive(each, wrapper)]
        if not together or any(_may_be_scaled(script, each) for each in together):
            continue
        by_hand = {each: find_manual_scaling(script, each) for each in together}
        first, found = min(by_hand.items(), key=lambda item: (item[1] is not None, script.line(item[0])))
        level, message = (Level.WRONG, _UNSCALED) if found is None else (Level.NOTE, _BY_HAND)
        func = f"{script.code(first.func)} computes the gradients"
        done = func if found is None else f"The script divides the gradients by {script.code(found[0])}"
        name = optimizers.description(step.optimizer, wrapper, wrapping.certain)
        yield first, level, message, f"{done}, and {name} applies them on line {script.line(step.call)}."
        return


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
        isinstance(each, cst.Call) and optimizers.reads_scale(each) for each in optimizers.flow.behind([loss])
    )


def _of_inner(script: Script, step: Step) -> Iterator[tuple[cst.CSTNode, Level, str, str]]:
    """Yield the finding for an optimizer that makes a step in place of the wrapper around it."""
    optimizers = script.cached(WrappedOptimizers)
    around = _wrappers_around(script, step.optimizer)
    for each in step.computations:
        wrapping = optimizers.computed_by_wrapper(each)
        if wrapping is not None and wrapping.certain and wrapping.calls[0] in around:
            function, inner = script.code(each.func), script.code(step.optimizer)
            detail = f"{function} computes them on line {script.line(each)}, and {inner} applies them."
            yield step.call, Level.WRONG, _OF_INNER, detail
            return
    is_together = bool(around) and not optimizers.flow.conditions.is_exclusive(step.call, around[0])
    if is_together and all(is_unused(script, each) for each in around):
        made, function = script.line(around[0]), script.code(step.call.func)
        yield step.call, Level.WRONG, _UNUSED, f"It is constructed on line {made}, and {function} is called here."


def _wrappers_around(script: Script, optimizer: cst.BaseExpression) -> Sequence[cst.Call]:
    """Return the calls that construct wrappers around an optimizer that is used here without a wrapper."""
    optimizers = script.cached(WrappedOptimizers)
    if isinstance(optimizer, cst.Attribute) and optimizer.attr.value in _INNER:
        wrapping = optimizers.wrapping(optimizer.value)
        return wrapping.calls if wrapping is not None else ()
    made = set(optimizers.flow.values(optimizer).nodes)
    inner = ((each, optimizers.inner(each)) for each in optimizers.constructions)
    return [each for each, opt in inner if opt is not None and made & {opt, *optimizers.flow.values(opt).nodes}]


_UNSCALED = (
    "The gradients are computed from the unscaled loss, and a loss-scale optimizer applies them: small gradients are "
    "zero in float16, as without loss scaling. Write optimizer.compute_gradients(loss, variables) of the "
    "loss-scale optimizer: it scales the loss, and returns unscaled gradients in pairs with their variables."
)
_BY_HAND = (
    "The script scales the loss and unscales the gradients itself, and a loss-scale optimizer applies them: the scale "
    "of its manager is never used. Write optimizer.compute_gradients(loss, variables) of the loss-scale optimizer with "
    "the unscaled loss, and leave out the multiplication and the division."
)
_OF_INNER = (
    "A loss-scale optimizer computes the gradients, but the optimizer inside it applies them: steps that overflow are "
    "not skipped, so infinite gradients reach the weights, and a dynamic loss scale never changes. Call "
    "apply_gradients of the loss-scale optimizer."
)
_UNUSED = (
    "A loss-scale optimizer is constructed and never used, so the training runs without loss scaling. Call the "
    "loss-scale optimizer in place of the optimizer inside it."
)
