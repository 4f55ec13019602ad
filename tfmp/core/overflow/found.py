"""What is found of gradients: the check of one replica, what is known before a step, and counts by variable."""

import functools
from collections.abc import Collection, Sequence
from typing import NamedTuple

import numpy as np
import tensorflow as tf

from tfmp.core.gradients import arithmetic, measures
from tfmp.core.overflow.detectors import KINDS, NonFiniteDetector, OverflowDetector
from tfmp.core.storage.state_variables import StateVariables
from tfmp.core.tensorflow_internals import within_xla
from tfmp.types import Done, Gradients


class Found(NamedTuple):
    """What is found of the gradients of a step, on one replica or, after the replicas have agreed, on all of them."""

    #: True if the gradients may be applied; bool.
    usable: tf.Tensor
    #: The largest magnitude of the unscaled gradients; float32. None if the manager does not need it.
    max_abs: tf.Tensor | None = None
    #: False if micro-batches that overflowed were left out of the mean, on any replica; bool. None if that cannot be.
    complete: tf.Tensor | None = None
    #: True if the norm of the gradients is above the bound of a spike detector; bool. None if there is no detector.
    is_above: tf.Tensor | None = None
    #: True if the gradients may be applied, but are not, because the step is a spike; bool. None if it cannot be one.
    spike: tf.Tensor | None = None

    @property
    def applied(self) -> tf.Tensor:
        """True if the gradients are applied; bool."""
        return self.usable if self.spike is None else tf.logical_and(self.usable, tf.logical_not(self.spike))

    @property
    def finite(self) -> tf.Tensor:
        """True if no gradient overflowed; bool."""
        return self.usable if self.complete is None else tf.logical_and(self.usable, self.complete)


class Checked(NamedTuple):
    """What is known of gradients before their step, from `GradScaler.unscale` or from the micro-batches of a window."""

    #: What was found of them on this replica.
    found: Found
    #: The gradients that were checked. A step that gets the same tensors does not read them again.
    grads: Gradients = ()
    #: True if the gradients are the mean of micro-batches that the detector has checked. The mean is then checked only
    #: for infinities, NaN and overflow in the sum over the replicas: a replica's part can exceed its micro-batches.
    of_window: bool = False
    #: The numbers of values that overflowed in the micro-batches on this replica, as `OverflowDetector.counts` returns
    #: them. None if there are no micro-batches.
    window_counts: tf.Tensor | None = None
    #: The gradients before the user clipped them, not necessarily one for each of those of the step; None if it is not
    #: known whether the user did.
    unclipped: Gradients | None = None


class GradientCheck(NamedTuple):
    """The check of one replica's gradients."""

    #: Decides which gradients overflowed.
    detector: OverflowDetector
    #: The float32 scalar that the loss was multiplied by.
    loss_scale: tf.Tensor
    #: True if the gradients are still multiplied by the loss scale. Dividing by a scale of 1 or more makes no value
    #: larger, so values that are finite while scaled are finite when unscaled.
    are_scaled: bool = False
    #: The number of replicas whose gradients the optimizer sums after the check. A finite value that could overflow in
    #: that sum counts as an overflow. It is 1 if the detector ignores sums.
    num_summed: int = 1
    #: Indices of gradients that are the next values of their variables (Keras' float8 scales). They are never scaled,
    #: and are checked only for infinities and NaN.
    overwritten: Collection[int] = ()
    #: True if the manager needs the largest magnitude of the gradients.
    needs_max_abs: bool = False

    def find(self, grads: Gradients, checked: Checked | None = None) -> Found:
        """Check gradients; those that were `checked` before and did not change are not read again."""
        to_read = grads if checked is None else arithmetic.without(grads, checked.grads)
        flags = []
        if checked is None or arithmetic.values_of(to_read):
            to_detect = self._to_detect(to_read)
            flags.append(self.detector.all_finite(to_detect, self.loss_scale))
            if self.are_scaled:
                # A scale from a checkpoint may be below 1, where unscaling could make a finite value overflow. Such a
                # step is skipped without a count of values, and the manager then raises the scale to its lowest.
                flags.append(self.loss_scale >= 1)
            if self.num_summed > 1:
                # NonFiniteDetector decides by the same sums of squares; in a graph TensorFlow computes them only once.
                flags.append(measures.all_finite(to_detect, self.num_summed, self._scaled_by))
            if self.overwritten:
                flags.append(measures.all_finite(self._next_values(to_read)))
        if checked is not None:
            flags.append(checked.found.usable)
        usable = functools.reduce(tf.logical_and, flags)
        found = Found(usable) if checked is None else checked.found._replace(usable=usable)
        if not self.needs_max_abs or found.max_abs is not None:
            return found
        return found._replace(max_abs=measures.max_abs(self._to_detect(grads), self._scaled_by))

    def are_suspect(self, grads: Gradients) -> tf.Tensor | None:
        """Return which large gradients may have values that overflowed; None if each of them may."""
        # In a gradient whose sum of squares is finite no value overflowed, unless a detector counts finite values too.
        if type(self.detector) is not NonFiniteDetector or within_xla():
            return None
        return measures.are_suspect(self._to_detect(grads))

    def counts(self, grads: Gradients, are_suspect: tf.Tensor | None = None) -> tf.Tensor:
        """Count the values of each gradient that overflowed, as `OverflowDetector.counts` does.

        A value that could overflow in the sum over the replicas counts as infinite. `are_suspect` is the result of that
        method, if it is known already.
        """
        to_detect = self._to_detect(grads)
        are_suspect = self.are_suspect(grads) if are_suspect is None else are_suspect
        if are_suspect is not None:
            to_detect = measures.only_suspects(to_detect, are_suspect)
        counts = self.detector.counts(to_detect, self.loss_scale)
        if self.num_summed > 1:
            in_sum = measures.sums_of_each(
                to_detect, [lambda values: measures.overflows_in_sum(values, self.num_summed, self._scaled_by)]
            )
            counts += tf.pad(in_sum, [[0, 0], [0, len(KINDS) - 1]])
        if self.overwritten:
            counts += NonFiniteDetector().counts(self._next_values(grads), self.loss_scale)
        return counts

    @property
    def _scaled_by(self) -> tf.Tensor | None:
        return self.loss_scale if self.are_scaled else None

    def _to_detect(self, grads: Gradients) -> Gradients:
        return [None if index in self.overwritten else grad for index, grad in enumerate(grads)]

    def _next_values(self, grads: Gradients) -> Gradients:
        return [grad if index in self.overwritten else None for index, grad in enumerate(grads)]


class OverflowReport(NamedTuple):
    """How often the gradient of each variable overflowed since the session or the eager program began.

    Attributes:
        names: The names of the variables, or their paths in Keras 3.
        last: For each variable the numbers of values in its gradient that were infinite, NaN and saturated on the last
            step with an overflow; int64, of shape `[len(names), 3]`.
        steps: For each variable the number of steps on which its gradient had such values; int64, of shape
            `[len(names)]`.
    """

    names: list[str]
    last: tf.Tensor
    steps: tf.Tensor


class _Counts(NamedTuple):
    last: tf.Tensor
    steps: tf.Tensor


class OverflowCounts(tf.Module):
    """The counts of values that overflowed in the gradients of a list of variables, from 0 in each session."""

    def __init__(self, names: Sequence[str]) -> None:
        super().__init__()
        self._names = tuple(names)
        zeros = _Counts(np.zeros([len(names), len(KINDS)], np.int64), np.zeros([len(names)], np.int64))
        self._state = StateVariables(zeros, saved=False)

    def create(self) -> None:
        """Make the variables that store the counts in the current graph, or in eager code, unless they exist."""
        self._state.create()

    def record(self, counts: tf.Tensor) -> Done:
        """Store the counts of a step; counts that are all 0 change nothing."""
        before = self._state.read()
        overflowed = tf.reduce_any(counts > 0, axis=1)
        last = tf.where(tf.reduce_any(overflowed), counts, before.last)
        return self._state.assign(_Counts(last=last, steps=before.steps + tf.cast(overflowed, tf.int64)))

    def report(self) -> OverflowReport:
        """Return the stored counts with the names of the variables."""
        return OverflowReport(list(self._names), *self._state.read())
