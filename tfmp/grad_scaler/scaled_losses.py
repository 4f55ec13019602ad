"""Warns of gradients that are divided by a scale which their loss was not multiplied by."""

import logging
import weakref
from collections import deque
from collections.abc import Collection, Sequence

import numpy as np
import tensorflow as tf

from tfmp.core import call_sites
from tfmp.types import Gradients

_logger = logging.getLogger("tfmp")

#: Ops looked at on the way back from gradients. Larger graphs are not searched, and nothing is said of them.
_MOST_OPS = 50_000
#: Parts of the types of ops whose values do not come from their inputs.
_GIVEN_ELSEWHERE = ("PyFunc", "StackPop", "TensorArray")
#: Parts of the types of ops that stand for a function's arguments and captures.
_SOURCES = ("Placeholder", "VarHandleOp", "Variable")
#: Files of TensorFlow that differentiate, and the ops that they begin with: ones, in the form of the loss.
_DIFFERENTIATES = ("gradients_impl.py", "backprop.py")
_ONES = {"Const", "Fill", "OnesLike"}


class ScaledLosses:
    """What is known of the losses that were scaled, and so of gradients that are to be unscaled.

    In eager code it is only whether any loss was scaled. A graph shows more: the gradients of a scaled loss depend on
    what holds the scale. If gradients do not, another loss was differentiated. Wherever something else may be the case,
    nothing is said:

    * gradients, or what they are made of, come out of another function, or out of Python;
    * the scale was read, perhaps to multiply by it without `scale`.

    Example:
        >>> losses = ScaledLosses()
        >>> losses.note(tf.constant(3.0) * 8.0)
        >>> losses.warn_if_not_scaled([tf.constant(8.0)])  # one who has not called `note` is warned
    """

    def __init__(self) -> None:
        self._any = False
        self._scale_was_read = False
        self._told = False
        # For each graph the names of the ops behind its scales; the ops themselves would keep it alive.
        self._behind_scales: weakref.WeakKeyDictionary[tf.Graph, set[str]] = weakref.WeakKeyDictionary()

    def note(self, scaled: tf.Tensor) -> None:
        """Remember that a loss was scaled.

        Args:
            scaled: The product of the loss and, second, the scale.
        """
        self._any = True
        if hasattr(scaled, "numpy"):
            # Eager tensors have no past.
            return
        # Another op than the product stands for it under `tf.debugging.enable_check_numerics`.
        behind = _past([scaled.op.inputs[1].op]) if len(scaled.op.inputs) == 2 else None
        if behind is None:
            self._scale_was_read = True
            return
        self._behind_scales.setdefault(scaled.graph, set()).update(op.name for op in behind)

    def note_read(self) -> None:
        """Remember that the user read the scale, and may scale losses by it."""
        self._scale_was_read = True

    def warn_if_not_scaled(self, grads: Gradients) -> None:
        """Warn, once, of gradients that are known not to be those of a scaled loss, by the line that made them.

        Args:
            grads: The gradients, which are about to be unscaled.
        """
        if self._told or self._scale_was_read:
            return
        ops = call_sites.ops_of(grads)
        fault = None
        if self._any:
            if ops and self._is_left_out_of(ops):
                fault = "what scale returned was not differentiated: differentiate that"
        elif not ops or not _may_be_made_elsewhere(ops):
            fault = "scale was not called before: differentiate what scale returns"
        if fault is not None:
            self._told = True
            _logger.warning(
                "%s: gradients are divided by the loss scale, and %s, not the loss itself.", _line_of(grads), fault
            )

    def _is_left_out_of(self, ops: Sequence[tf.Operation]) -> bool:
        """Tell whether it is certain that the scale is not behind ops that give gradients."""
        graph = ops[0].graph
        behind_scale = self._behind_scales.get(graph)
        if behind_scale is None or any(op.graph is not graph for op in ops):
            return False
        past = _past(ops, behind_scale)
        return past is not None and not _calls_functions(past) and not _is_given(past) and _beginning(past) is not None


def _may_be_made_elsewhere(ops: Sequence[tf.Operation]) -> bool:
    """Tell whether ops that give gradients may only pass on what they are given, as the arguments of a function."""
    past = _past(ops)
    if past is None:
        return True
    is_made_here = _beginning(past) is not None or _calls_functions(past)
    return not is_made_here and (_is_given(past) or any(_is_of(op, _SOURCES) for op in past))


def _past(ops: Sequence[tf.Operation], not_behind: Collection[str] = ()) -> list[tf.Operation] | None:
    """Return ops and all that they depend on; None if these are too many, or if one of some names is among them."""
    queue, seen = deque(ops), set(ops)
    past = []
    while queue:
        op = queue.popleft()
        if op.name in not_behind or len(seen) > _MOST_OPS:
            return None
        past.append(op)
        inputs = [tensor.op for tensor in op.inputs if tensor.op not in seen]
        seen.update(inputs)
        queue.extend(dict.fromkeys(inputs))
    return past


def _beginning(past: Sequence[tf.Operation]) -> tf.Operation | None:
    """Return the op that the last differentiation began with; None if nothing was differentiated."""
    ones = (op for op in past if op.type in _ONES and _is_one(op))
    return next((op for op in ones if call_sites.made_within(op, *_DIFFERENTIATES)), None)


def _line_of(grads: Gradients) -> str:
    """Return the line that differentiates, not one that clips the gradients, where a graph tells it."""
    beginning = _beginning(_past(call_sites.ops_of(grads)) or [])
    return (beginning and call_sites.line_of_op(beginning)) or call_sites.line_of_gradients(grads)


def _is_one(op: tf.Operation) -> bool:
    if not op.outputs[0].dtype.is_floating:
        return False
    value = None if op.type == "OnesLike" else tf.get_static_value(op.inputs[1] if op.type == "Fill" else op.outputs[0])
    return op.type == "OnesLike" or (value is not None and bool(np.all(value == 1)))


def _calls_functions(past: Sequence[tf.Operation]) -> bool:
    # An op's attributes are the same for all of its type.
    kinds = {
        kind
        for kind, op in {op.type: op for op in past}.items()
        if any(attribute.type in {"func", "list(func)"} for attribute in op.op_def.attr)
    }
    # Clipping has conditionals.
    return any(op.type in kinds and not call_sites.made_by_clipping(op) for op in past)


def _is_given(past: Sequence[tf.Operation]) -> bool:
    return any(_is_of(op, _GIVEN_ELSEWHERE) for op in past)


def _is_of(op: tf.Operation, parts: Sequence[str]) -> bool:
    return any(part in op.type for part in parts)
