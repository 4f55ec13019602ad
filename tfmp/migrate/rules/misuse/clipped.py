"""Finds operations that make infinite gradients finite, so that the wrapper sees no overflow."""

from collections.abc import Iterator

import libcst as cst

from tfmp.migrate.analysis.data_flow import DataFlow
from tfmp.migrate.analysis.expressions import argument, method
from tfmp.migrate.analysis.script import Script
from tfmp.migrate.analysis.training.gradient_values import gradients_behind, may_be_gradient
from tfmp.migrate.analysis.training.loss_scale_wrappers import WrappedOptimizers
from tfmp.migrate.edits.results import Level

# Together, tf.minimum and tf.maximum clip as tf.clip_by_value does.
_LIMITS = {"minimum": "maximum", "maximum": "minimum"}
_ASKING = ("is_finite", "is_inf", "is_nan")


def find(script: Script) -> Iterator[tuple[cst.CSTNode, Level, str]]:
    """Report operations that make infinite gradients finite before a wrapped optimizer applies them."""
    optimizers, seen = script.cached(WrappedOptimizers), set()
    for call, wrapping, _ in optimizers.applied_gradients():
        grads = argument(call, 0, "grads_and_vars")
        for node in gradients_behind(script, grads) if grads is not None else ():
            if not isinstance(node, cst.Call) or node in seen:
                continue
            message = _message(script, node)
            if message and not script.cached(DataFlow).is_exclusive(node, wrapping.call):
                seen.add(node)
                said = optimizers.description(method(call)[0], wrapping)
                function = script.code(node.func)
                yield node, Level.WRONG, message.format(function=function, optimizer=said, line=script.line(call))


def _message(script: Script, call: cst.Call) -> str:
    """Return the message template for a call that hides an overflow; empty for any other call."""
    name = script.name_of(call.func)
    last = name.split(".")[-1] if name.startswith("tensorflow.") else ""
    if last == "clip_by_value" and call.args and may_be_gradient(script, call.args[0].value):
        return _CLIPPED
    if last in _LIMITS and any(_is_limited(script, arg.value, _LIMITS[last]) for arg in call.args):
        return _CLIPPED
    if last in ("where", "where_v2", "cond") and _replaces(script, call):
        return _REPLACED
    return ""


def _is_limited(script: Script, node: cst.BaseExpression, other: str) -> bool:
    """Tell whether this is a gradient that the other of tf.minimum and tf.maximum already limits."""
    values = (node, *script.cached(DataFlow).values(node).nodes)
    calls = (each for each in values if isinstance(each, cst.Call))
    return any(script.name_of(each.func).split(".")[-1] == other for each in calls) and may_be_gradient(script, node)


def _replaces(script: Script, choice: cst.Call) -> bool:
    """Tell whether `tf.where` or `tf.cond` replaces gradients that are not finite by another value."""
    if len(choice.args) != 3:
        return False
    condition, *results = (arg.value for arg in choice.args)
    asked = script.cached(DataFlow).calls_behind(condition, lambda each: False)
    if not any(script.name_of(each.func).split(".")[-1] in _ASKING for each in asked):
        return False
    return [may_be_gradient(script, result) for result in results].count(True) == 1


_AFTER = "steps that overflowed move the weights, and a dynamic scale does not back off"
_CLIPPED = (
    f"{{function}} makes infinity an ordinary number before {{optimizer}} looks for overflow on line {{line}}: "
    f"{_AFTER}. Write tfmp.clip_by_value(grads, low, high), which takes the list of gradients and keeps infinity."
)
_REPLACED = (
    "{function} replaces gradients that are not finite before {optimizer} looks for overflow on line {line}: "
    f"{_AFTER}. Leave it out: the wrapper skips these steps."
)
