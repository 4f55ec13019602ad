"""Finds steps of an inner optimizer that bypass its wrapper."""

from collections.abc import Iterator, Sequence

import libcst as cst

from tfmp.migrate.analysis.expressions import argument, method
from tfmp.migrate.analysis.script import Script
from tfmp.migrate.analysis.training.loss_scale_wrappers import WrappedOptimizers
from tfmp.migrate.edits.results import Level

# The attributes in which wrappers keep the inner optimizer: tfmp's, and TensorFlow's own.
_INNER = ("_opt", "_optimizer")


def find(script: Script) -> Iterator[tuple[cst.CSTNode, Level, str, str]]:
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
            wrapper, line = script.code(method(computed)[0]), script.line(computed)
            yield call, Level.WRONG, _GRADIENTS, _APPLIES.format(wrapper=wrapper, line=line, inner=script.code(owner))
        elif len(unused) == len(around) and not optimizers.flow.is_exclusive(call, unused[0]):
            detail = f"It is constructed on line {script.line(unused[0])}, and {script.code(call.func)} is called here."
            yield call, Level.WRONG, _UNUSED, detail


def _wrappers_around(script: Script, optimizer: cst.BaseExpression) -> Sequence[cst.Call]:
    """Return the calls that construct wrappers around an optimizer that is used here without a wrapper."""
    optimizers = script.cached(WrappedOptimizers)
    if isinstance(optimizer, cst.Attribute) and optimizer.attr.value in _INNER:
        wrapping = optimizers.wrapping(optimizer.value)
        return wrapping.calls if wrapping is not None else ()
    made, found = set(optimizers.flow.values(optimizer).nodes), []
    for construction in optimizers.constructions:
        inner = optimizers.inner(construction)
        if inner is not None and made & {inner, *optimizers.flow.values(inner).nodes}:
            found.append(construction)
    return found


def _of_wrapper(script: Script, call: cst.Call, around: Sequence[cst.Call]) -> cst.Call | None:
    """Return the call of `compute_gradients` on one of these wrappers whose gradients the step applies; else None."""
    optimizers = script.cached(WrappedOptimizers)
    grads = argument(call, 0, "grads_and_vars") if method(call)[1] == "apply_gradients" else None
    for each in optimizers.computations_behind(grads) if grads is not None else ():
        wrapping = optimizers.computed_by_wrapper(each)
        if wrapping is not None and wrapping.certain and wrapping.call in around:
            return each
    return None


def _is_unused(script: Script, construction: cst.Call) -> bool:
    above = script.parent(construction)
    target = above.targets[0].target if isinstance(above, cst.Assign) and len(above.targets) == 1 else None
    return isinstance(above, cst.Expr) or (isinstance(target, cst.Name) and script.reads_of(target) == ())


_GRADIENTS = (
    "A loss-scale optimizer computes the gradients, but the optimizer inside it applies them: steps that overflow are "
    "not skipped, so infinite gradients reach the weights, and a dynamic loss scale never changes. Call "
    "apply_gradients of the loss-scale optimizer."
)
_APPLIES = (
    "{wrapper} computes the gradients on line {line}, and {inner} applies them here: write {wrapper}.apply_gradients."
)
_UNUSED = (
    "A loss-scale optimizer is constructed and never used, so the training runs without loss scaling. Call the "
    "loss-scale optimizer in place of the optimizer inside it."
)
