"""Warns if gradients are divided by the loss scale although their loss was not multiplied by it."""

import logging
import weakref
from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from tfmp.core import script_lines
from tfmp.core.graph_search import calls_functions, with_ancestors
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


class ScaledLosses:
    """Remembers which losses were scaled, and warns if the gradients of another loss are about to be unscaled.

    In eager mode it only knows whether any loss was scaled. A graph shows more: the gradients of a scaled loss depend
    on the op that reads the scale. If gradients do not depend on it, the script differentiated another loss.

    There is a warning only if the mistake is certain. There is none if

    * the gradients, or values that they depend on, come from another function or from Python code;
    * the user read the scale, and may have multiplied the loss by it without calling `scale`.
    """

    def __init__(self) -> None:
        self._any = False
        self._scale_was_read = False
        self._warned = False
        # For each graph, the names of the ops that its scales depend on. The ops themselves would keep the graph alive.
        self._ancestors_of_scales: weakref.WeakKeyDictionary[tf.Graph, set[str]] = weakref.WeakKeyDictionary()

    def note(self, scaled: tf.Tensor) -> None:
        """Remember a scaled loss, the output of an op that multiplies the loss by the scale in this order."""
        self._any = True
        if not tf.is_symbolic_tensor(scaled):
            # An eager tensor does not record the ops that it was computed by.
            return
        # Under `tf.debugging.enable_check_numerics`, `scaled.op` is not the multiplication but an op that checks its
        # result. The scale cannot be found then, and this object gives no more warnings.
        ancestors = with_ancestors([scaled.op.inputs[1].op]) if len(scaled.op.inputs) == 2 else None
        if ancestors is None:
            self._scale_was_read = True
            return
        self._ancestors_of_scales.setdefault(scaled.graph, set()).update(op.name for op in ancestors)

    def note_read(self) -> None:
        """Remember that the user read the scale, and may multiply losses by it without calling `scale`."""
        self._scale_was_read = True

    def warn_if_not_scaled(self, grads: Gradients) -> None:
        """Log one warning, with the line of the script, if the gradients are certainly not those of a scaled loss."""
        if self._warned or self._scale_was_read:
            return
        ops = script_lines.ops_of(grads)
        fault = None
        if self._any:
            if ops and self._are_independent_of_scales(ops):
                fault = "they are not the gradients of what scale() returned: differentiate that"
        elif not ops or not _may_be_computed_elsewhere(ops):
            fault = "scale() was not called before: differentiate what scale() returns"
        if fault is not None:
            self._warned = True
            _logger.warning(
                "%s: gradients are divided by the loss scale, but %s, not the loss itself.",
                script_lines.with_library(_line_of(grads)),
                fault,
            )

    def _are_independent_of_scales(self, ops: Sequence[tf.Operation]) -> bool:
        """Return True if the ops that compute gradients certainly do not depend on a scale."""
        graph = ops[0].graph
        ancestors_of_scale = self._ancestors_of_scales.get(graph)
        if ancestors_of_scale is None or any(op.graph is not graph for op in ops):
            return False
        ancestors = with_ancestors(ops, ancestors_of_scale)
        return (
            ancestors is not None
            and not _calls_functions(ancestors)
            and not _has_values_from_elsewhere(ancestors)
            and _start_of_gradients(ancestors) is not None
        )


def _may_be_computed_elsewhere(ops: Sequence[tf.Operation]) -> bool:
    """Return True if the gradients may have been computed outside the graph of the ops, for example by a caller."""
    ancestors = with_ancestors(ops)
    if ancestors is None:
        return True
    is_made_here = _start_of_gradients(ancestors) is not None or _calls_functions(ancestors)
    return not is_made_here and (
        _has_values_from_elsewhere(ancestors) or any(_type_contains(op, _SOURCES) for op in ancestors)
    )


def _start_of_gradients(ancestors: Sequence[tf.Operation]) -> tf.Operation | None:
    """Return the op of ones with which the last computation of gradients began; None if there is none."""
    # `ancestors` begins with the ops closest to the gradients, so the first match belongs to the last differentiation.
    ones = (op for op in ancestors if op.type in _ONES and _is_one(op))
    return next((op for op in ones if script_lines.made_within(op, *_DIFFERENTIATES)), None)


def _line_of(grads: Gradients) -> str:
    """Return the line that computes the gradients. In a graph this is not a later line, such as one that clips them."""
    start = _start_of_gradients(with_ancestors(script_lines.ops_of(grads)) or [])
    return script_lines.line_of_gradients(grads if start is None else start.outputs)


def _is_one(op: tf.Operation) -> bool:
    if not op.outputs[0].dtype.is_floating:
        return False
    value = None if op.type == "OnesLike" else tf.get_static_value(op.inputs[1] if op.type == "Fill" else op.outputs[0])
    return op.type == "OnesLike" or (value is not None and bool(np.all(value == 1)))


def _calls_functions(ancestors: Sequence[tf.Operation]) -> bool:
    # All ops of a type have the same attributes, so one op of each type is enough.
    kinds = {kind for kind, op in {op.type: op for op in ancestors}.items() if calls_functions(op)}
    # The package's own clipping contains `tf.cond`, whose branches are functions. They compute norms, not gradients.
    return any(op.type in kinds and not script_lines.made_by_clipping(op) for op in ancestors)


def _has_values_from_elsewhere(ancestors: Sequence[tf.Operation]) -> bool:
    return any(_type_contains(op, _VALUES_FROM_ELSEWHERE) for op in ancestors)


def _type_contains(op: tf.Operation, parts: Sequence[str]) -> bool:
    return any(part in op.type for part in parts)
