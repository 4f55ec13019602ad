"""Finds clipping that hides overflow."""

from collections.abc import Iterator

import libcst as cst

from tfmp.migrate.reading.calls import method
from tfmp.migrate.reading.data_flow import DataFlow
from tfmp.migrate.reading.script import Script
from tfmp.migrate.reading.wrapped import WrappedOptimizers
from tfmp.migrate.results import Level


def find(script: Script) -> Iterator[tuple[cst.CSTNode, Level, str]]:
    """Tell of tf.clip_by_value between the gradients and apply_gradients of a wrapped optimizer."""
    optimizers, seen = script.once(WrappedOptimizers), set()
    for call, wrapping, behind in optimizers.applied():
        for node in behind:
            if not isinstance(node, cst.Call) or node in seen:
                continue
            if _clips(script, node) and not script.once(DataFlow).is_exclusive(node, wrapping.call):
                seen.add(node)
                said = optimizers.said(method(call)[0], wrapping)
                yield node, Level.TODO, _MESSAGE.format(optimizer=said, line=script.line(call))


def _clips(script: Script, call: cst.Call) -> bool:
    name = script.name_of(call.func)
    return name.startswith("tensorflow.") and name.endswith(".clip_by_value")


_MESSAGE = (
    "tf.clip_by_value makes infinity an ordinary number before {optimizer} looks for overflow on line {line}: steps "
    "that overflowed move the weights, and a dynamic scale does not back off. Write tfmp.clip_by_value(grads, low, "
    "high), which takes the list of gradients and keeps infinity."
)
