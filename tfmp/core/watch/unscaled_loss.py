"""Warns of gradients whose loss was not multiplied by the loss scale."""

import itertools
import logging
import os
from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from tfmp.core import messages
from tfmp.core.graph_search import ancestors, calls_functions, with_ancestors
from tfmp.types import Gradients

_logger = logging.getLogger("tfmp")

#: Parts of the types of ops whose values may come from elsewhere than their inputs. If gradients depend on such an op,
#: they may depend on the scale although the graph does not show it, so there is no warning.
_VALUES_FROM_ELSEWHERE = ("PyFunc", "StackPop", "TensorArray")
#: Parts of the types of ops that stand for the arguments and captures of a function.
_SOURCES = ("Placeholder", "VarHandleOp", "Variable")
#: The files of TensorFlow that compute gradients, and the types of the op with which such a computation begins: a
#: tensor of ones in the shape of the loss, the gradient of the loss with respect to itself.
_DIFFERENTIATES = ("gradients_impl.py", "backprop.py")
_ONES = {"Const", "Fill", "OnesLike"}
#: The files of tfmp that clip gradients, and that have the method `get_loss_scale` of its managers.
_CLIPPING = os.path.join("tfmp", "core", "gradients", "clipping.py")
_MANAGERS = tuple(os.path.join("tfmp", "core", "managers", name) for name in ("fixed.py", "stateful.py"))
#: The largest number of ops between the gradients and a step that are looked at: clipping adds a few per gradient.
_MOST_OPS = 2000


class UnscaledLossWatch:
    """Warns, once with each message, of gradients that are certainly not those of a scaled loss.

    After any loss was scaled, nothing is certain. Nor is it if the user read the scale, and may have multiplied the
    loss by it, or where a graph shows that the gradients may come from another function, from Python code, or from
    another wrapper of tfmp.
    """

    def __init__(self) -> None:
        self._may_be_scaled = False
        self._told: set[str] = set()

    def note(self) -> None:
        """Remember that a loss was scaled, or the scale read."""
        self._may_be_scaled = True

    def warn_if_not_scaled(self, grads: Gradients, message: str) -> None:
        """Warn if no loss was scaled, unless the graph of the gradients leaves it open."""
        if self._may_be_scaled or message in self._told:
            return
        ops = messages.ops_of(grads)
        if not ops or not _may_be_of_scaled(ops):
            self.warn_once(grads, message)

    def warn_once(self, grads: Gradients, message: str) -> None:
        """Warn with the line that computed the gradients; outside of a graph with the one that runs now."""
        if message in self._told:
            return
        self._told.add(message)
        start = _start_of_gradients(with_ancestors(messages.ops_of(grads)) or [])
        # In a graph this is not a later line, such as one that clips the gradients.
        line = messages.script_line(grads if start is None else start.outputs)
        _logger.warning("%s: %s", messages.with_library(line), message)


def _may_be_of_scaled(ops: Sequence[tf.Operation]) -> bool:
    """Return whether gradients may have been computed outside of the graph of these ops, or with a scale in it."""
    found = with_ancestors(ops)
    if found is None or _are_unscaled_by_hand(ops):
        return True
    start = _start_of_gradients(found)
    if start is not None:
        # Another wrapper computed them, as in a model whose variables have several optimizers.
        return messages.made_by_tfmp(start)
    return not _call_functions(found) and any(_type_contains(op, (*_VALUES_FROM_ELSEWHERE, *_SOURCES)) for op in found)


def _are_unscaled_by_hand(ops: Sequence[tf.Operation]) -> bool:
    """Return whether the script computed the gradients from those of `tf.gradients` and a manager's loss scale."""
    after = ancestors(ops, ends_at=lambda op: messages.made_within(op, _DIFFERENTIATES[0]))
    return any(messages.made_within(op, *_MANAGERS) for op in itertools.islice(after, _MOST_OPS))


def _start_of_gradients(found: Sequence[tf.Operation]) -> tf.Operation | None:
    """Return the op of ones with which the last computation of gradients began; None if there is none."""
    # `found` begins with the ops closest to the gradients, so the first match belongs to the last differentiation.
    ones = (op for op in found if op.type in _ONES and _is_one(op))
    return next((op for op in ones if messages.made_within(op, *_DIFFERENTIATES)), None)


def _is_one(op: tf.Operation) -> bool:
    if not op.outputs[0].dtype.is_floating:
        return False
    value = None if op.type == "OnesLike" else tf.get_static_value(op.inputs[1] if op.type == "Fill" else op.outputs[0])
    return op.type == "OnesLike" or (value is not None and bool(np.all(value == 1)))


def _call_functions(found: Sequence[tf.Operation]) -> bool:
    # All ops of a type have the same attributes, so one op of each type is enough.
    kinds = {kind for kind, op in {op.type: op for op in found}.items() if calls_functions(op)}
    # The package's own clipping contains `tf.cond`, whose branches are functions. They compute norms, not gradients.
    return any(op.type in kinds and not messages.made_within(op, _CLIPPING) for op in found)


def _type_contains(op: tf.Operation, parts: Sequence[str]) -> bool:
    return any(part in op.type for part in parts)
