"""Finds operations that make infinite gradients finite, so that the wrapper sees no overflow."""

from collections.abc import Iterator

import libcst as cst

from tfmp.migrate.analysis.script import Script
from tfmp.migrate.analysis.training.gradient_values import gradients_behind, may_be_gradient
from tfmp.migrate.analysis.training.loss_scale_wrappers import WrappedOptimizers
from tfmp.migrate.edits.results import Level

_ASKING = ("is_finite", "is_inf", "is_nan")


def find(script: Script) -> Iterator[tuple[cst.CSTNode, Level, str, str]]:
    """Report operations that make infinite gradients finite before a wrapped optimizer applies them."""
    optimizers, seen = script.cached(WrappedOptimizers), set()
    for call, optimizer, wrapping, grads, _ in optimizers.steps:
        if wrapping is None or grads is None:
            continue
        checking = [*filter(optimizers.may_skip, wrapping.calls)]
        for node in gradients_behind(script, grads) if checking else ():
            message = _message(script, node) if isinstance(node, cst.Call) and node not in seen else ""
            together = [each for each in checking if not optimizers.flow.conditions.is_exclusive(node, each)]
            if message and together:
                seen.add(node)
                said = optimizers.description(optimizer, together[0], wrapping.certain)
                yield node, Level.WRONG, message, f"{said} applies the gradients on line {script.line(call)}."


def _message(script: Script, call: cst.Call) -> str:
    """Return the message for a call that hides an overflow; empty for any other call."""
    name = script.name_of(call.func)
    last = name.split(".")[-1] if name.startswith("tensorflow.") else ""
    if last == "clip_by_value" and call.args and may_be_gradient(script, call.args[0].value):
        return _CLIPPED
    return _REPLACED if last in ("where", "where_v2", "cond") and _replaces(script, call) else ""


def _replaces(script: Script, choice: cst.Call) -> bool:
    """Tell whether `tf.where` or `tf.cond` replaces gradients that are not finite by another value."""
    if len(choice.args) != 3:
        return False
    condition, *results = (arg.value for arg in choice.args)
    asked = script.cached(WrappedOptimizers).flow.behind([condition])
    if not any(script.last_word(each) in _ASKING for each in asked):
        return False
    return [may_be_gradient(script, result) for result in results].count(True) == 1


_AFTER = (
    "no overflow is seen. The step changes the weights by wrong gradients, and a dynamic loss scale does not decrease"
)
_CLIPPED = (
    "Gradients are limited to a range before the loss-scale optimizer looks for overflow: infinity becomes an ordinary "
    f"number, and {_AFTER}. Write grads = tfmp.clip_by_value(grads, low, high), which takes the list of gradients and "
    "keeps infinity."
)
_REPLACED = (
    "Gradients that are not finite are replaced before the loss-scale optimizer looks for overflow, so that "
    f"{_AFTER}. Leave the replacement out: the loss-scale optimizer skips these steps."
)
