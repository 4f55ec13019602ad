"""Notices gradients that are not those of a scaled loss, or are not unscaled, in what the user's loop calls."""

import itertools
import logging
import os
from collections import defaultdict, deque
from collections.abc import Sequence
from typing import Literal, TypeAlias

import numpy as np
import tensorflow as tf

from tfmp.core import lists, messages
from tfmp.core.distribute import current_replica
from tfmp.core.gradients.unscaled_gradients import UnscaledGradients, is_computed_from_scaled
from tfmp.core.graph_search import ancestors, calls_functions, with_ancestors
from tfmp.core.tensorflow_internals import number_of_tensor
from tfmp.types import Gradient, Gradients

_logger = logging.getLogger("tfmp")

_Call: TypeAlias = Literal["scale_loss", "get_scaled_loss", "get_unscaled_gradients", "compute_gradients"]


class LoopRecord:
    """Remembers which method of a wrapper the user's training loop called last, and warns of calls that it lacks.

    A custom training loop can be written in the style of Keras 2 or of Keras 3. Every front-end supports both:

        Keras 2    get_scaled_loss    get_unscaled_gradients    apply_gradients
        Keras 3    scale_loss                                   apply_gradients, which unscales

    Gradients do not tell `apply_gradients` whether it must unscale them; the method that was called last does. All
    replicas call the same methods in the same order, so one record serves them all. `compute_gradients` of Keras 2,
    which scales and unscales by itself, has a name of its own: Horovod's optimizer averages gradients only there.
    """

    def __init__(self) -> None:
        self.last_call: _Call | None = None
        # The method that scaled a loss last, which tells the style of the loop.
        self._last_scaling: _Call | None = None
        self._since_applied: defaultdict[int | None, _SinceApplied] = defaultdict(_SinceApplied)
        self._before: dict[int | None, UnscaledGradients] = {}
        self._watch = UnscaledLossWatch()

    def note_scaled(self, call: _Call, loss: tf.Tensor) -> tf.Tensor:
        """Remember and return a scaled loss, and the method that scaled it."""
        self.last_call = self._last_scaling = call
        self._since_applied[current_replica()].note_scaled(loss)
        return loss

    def note_unscaled(self, grads: Gradients, returned: Gradients) -> None:
        """Remember a call of `get_unscaled_gradients`; refuse what it returned, and warn if no loss was scaled."""
        if self.last_call is None:
            self._watch.warn_once(
                grads,
                "gradients are unscaled, and the loss was not scaled before: differentiate what get_scaled_loss "
                "returns, not the loss itself.",
            )
        self.last_call = "get_unscaled_gradients"
        since = self._since_applied[current_replica()]
        if any(map(since.unscaled.returned, grads)):
            raise RuntimeError(
                "get_unscaled_gradients got gradients that it returned: they would be divided by the loss scale twice. "
                "Apply them, or pass the gradients of a scaled loss."
            )
        since.note_unscaled(grads, returned)

    def are_scaled(self, grads: Gradients, *, by_default: bool) -> bool:
        """Return whether gradients passed to `apply_gradients` are of a scaled loss; warn if in doubt.

        `by_default` is the answer if no method of the wrapper was called before.
        """
        scaled = self.last_call == "scale_loss" or (self.last_call is None and by_default)
        if scaled and self.last_call is None:
            self._watch.warn_once(
                grads,
                "gradients are divided by the loss scale, and scale_loss was not called before: differentiate what "
                "scale_loss returns, not the loss itself.",
            )
        elif not scaled and self.last_call not in {"get_unscaled_gradients", "compute_gradients"}:
            missing = "get_scaled_loss" if self.last_call is None else "get_unscaled_gradients"
            self._watch.warn_once(
                grads,
                f"gradients are applied as they are, and {missing} was not called before: scale the loss by "
                "get_scaled_loss and the gradients by get_unscaled_gradients, or call scale_loss alone.",
            )
        return scaled

    def still_scaled(self, grads: Gradients, *, unscales: bool) -> list[bool]:
        """Return which gradients passed to `apply_gradients`, in a loop that unscales by itself, are still scaled.

        `unscales` is True if `apply_gradients` can unscale them. It can in the style of Keras 3, too.
        """
        now, before = self._since_applied[current_replica()], self._before.get(current_replica())
        is_like_keras3 = self._last_scaling == "scale_loss"
        got = [now.unscaled.got(grad) for grad in grads]
        others = [not is_given and now.is_in_between(grad) for is_given, grad in zip(got, grads, strict=True)]
        if (any(got) and not (unscales or is_like_keras3)) or (before is not None and any(map(before.got, grads))):
            raise RuntimeError(
                "apply_gradients got gradients that were passed to get_unscaled_gradients, and are still multiplied by "
                "the loss scale: pass what get_unscaled_gradients returned, which leaves its argument as it is."
            )
        if any(is_computed_from_scaled(grad, [now.unscaled]) for grad in grads):
            raise RuntimeError(
                "apply_gradients got gradients that were computed from those passed to get_unscaled_gradients, and not "
                "from those that it returned, so they are still multiplied by the loss scale: clip what "
                "get_unscaled_gradients returned, which leaves its argument as it is."
            )
        if any(others):
            raise RuntimeError(
                f"apply_gradients got gradients ({sum(others)} of {len(grads)}) that were computed after the loss was "
                "scaled, and that get_unscaled_gradients did not get: it cannot be known whether they are multiplied "
                "by the loss scale. Unscale them too; or, if their loss was not scaled, compute them after "
                "get_unscaled_gradients is called."
            )
        return got

    def note_applied(self) -> None:
        """Remember that gradients were applied, and forget what was called before."""
        replica = current_replica()
        since = self._since_applied[replica]
        self._before[replica], since.unscaled = since.unscaled, UnscaledGradients()


class _SinceApplied:
    """What a replica called since gradients were last applied, and when it scaled losses before."""

    def __init__(self) -> None:
        self.unscaled = UnscaledGradients()
        # The numbers of a scaled loss and of the first result of unscaling after it, which is None at first. A loop may
        # unscale without a step, only to look at gradients, or fail before the step.
        self._spans: deque[tuple[int, int | None]] = deque(maxlen=64)

    def note_scaled(self, loss: tf.Tensor) -> None:
        number = number_of_tensor(loss)
        if number is not None and not self._is_span_open():
            self._spans.append((number, None))

    def note_unscaled(self, grads: Gradients, returned: Gradients) -> None:
        first = self.unscaled.add(grads, returned)
        if self._is_span_open():
            self._spans[-1] = (self._spans[-1][0], first)

    def _is_span_open(self) -> bool:
        return bool(self._spans) and self._spans[-1][1] is None

    def is_in_between(self, grad: Gradient) -> bool:
        """Return whether a gradient was made after a loss was scaled, and before gradients were first unscaled then."""
        number = number_of_tensor(lists.values(grad))
        return number is not None and any(loss < number < result for loss, result in self._spans if result is not None)


#: Parts of the types of ops whose values may come from elsewhere than their inputs, or stand for what a function is
#: given or captures. Gradients that depend on one may depend on the scale unseen, so there is no warning.
_VALUES_FROM_ELSEWHERE = ("PyFunc", "StackPop", "TensorArray", "Placeholder", "VarHandleOp", "Variable")
#: The files of TensorFlow that compute gradients, and the types of the op with which such a computation begins: a
#: tensor of ones in the shape of the loss, the gradient of the loss with respect to itself.
_DIFFERENTIATES = ("gradients_impl.py", "backprop.py")
_ONES = {"Const", "Fill", "OnesLike"}
#: The files of tfmp that clip gradients, and that have the method `get_loss_scale` of its managers.
_CLIPPING = os.path.join("tfmp", "core", "gradients", "clipping.py")
_MANAGERS = tuple(os.path.join("tfmp", "core", "managers", name) for name in ("fixed.py", "base.py"))
#: The largest number of ops between the gradients and a step that are looked at: clipping adds a few per gradient.
_MOST_OPS = 2000


class UnscaledLossWatch:
    """Warns, once with each message, of gradients that are certainly not those of a scaled loss.

    After any loss was scaled, nothing is certain. Nor is it if the user read the scale, and may have multiplied the
    loss by it, or where a graph shows that the gradients may come from another function, from Python code, or from
    another wrapper of tfmp.
    """

    def __init__(self) -> None:
        #: Set to True when a loss is scaled, or the scale read.
        self.may_be_scaled = False
        self._told: set[str] = set()

    def warn_if_not_scaled(self, grads: Gradients, message: str) -> None:
        """Warn if no loss was scaled, unless the graph of the gradients leaves it open."""
        if self.may_be_scaled or message in self._told:
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
    return not _call_functions(found) and any(part in op.type for op in found for part in _VALUES_FROM_ELSEWHERE)


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
