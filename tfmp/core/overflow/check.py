"""Checks the gradients of one replica: whether they can be applied, how large they are, which values overflowed."""

import functools
from collections.abc import Collection
from typing import NamedTuple

import tensorflow as tf

from tfmp.core.gradients import arithmetic, measures
from tfmp.core.overflow.detectors import KINDS, NonFiniteDetector, OverflowDetector
from tfmp.core.overflow.found import Checked, Found
from tfmp.core.tensorflow_internals import within_xla
from tfmp.types import Gradients


class GradientCheck(NamedTuple):
    """The check of one replica's gradients.

    Examples:
        >>> check = GradientCheck(NonFiniteDetector(), tf.constant(8.0))
        >>> grads = [tf.constant([2.0, float("nan")]), None]
        >>> bool(check.usable(grads)), check.counts(grads).numpy().tolist()
        (False, [[0, 1, 0], [0, 0, 0]])
    """

    #: Decides which gradients overflowed.
    detector: OverflowDetector
    #: The float32 scalar that the loss was multiplied by.
    loss_scale: tf.Tensor
    #: True if the gradients are still multiplied by the loss scale. Dividing by a scale of 1 or more makes no value
    #: larger, so values that are finite while scaled are finite when unscaled.
    are_scaled: bool = False
    #: The number of replicas whose gradients the optimizer sums after the check. A finite value that could overflow in
    #: that sum counts as an overflow.
    num_summed: int = 1
    #: Indices of gradients that are the next values of their variables (Keras' float8 scales). They are never scaled,
    #: and are checked only for infinities and NaN.
    overwritten: Collection[int] = ()

    def find(self, grads: Gradients, before: Checked | None = None, *, needs_max_abs: bool = False) -> Found:
        """Check gradients; those that were checked `before` and did not change are not read again."""
        found = Found(self.usable(grads)) if before is None else before.found
        changed = [] if before is None else arithmetic.without(grads, before.grads)
        if any(grad is not None for grad in changed):
            found = found._replace(usable=tf.logical_and(self.usable(changed), found.usable))
        return found._replace(max_abs=self.max_abs(grads)) if needs_max_abs and found.max_abs is None else found

    def usable(self, grads: Gradients) -> tf.Tensor:
        """Return a boolean scalar: True if all gradients can be applied."""
        to_detect = self._to_detect(grads)
        flags = [self.detector.all_finite(to_detect, self.loss_scale)]
        if self.are_scaled:
            # The scale may come from a checkpoint and be lower than the manager would ever choose. Below 1, unscaling
            # makes values larger, and a finite scaled value could overflow. Such a step is skipped, although no value
            # is counted as overflowed, and the manager then raises the scale to its lowest.
            flags.append(self.loss_scale >= 1)
        if self._sums_later:
            # NonFiniteDetector decides by the same sums of squares; in a graph TensorFlow computes them only once.
            flags.append(measures.all_finite(to_detect, self.num_summed))
        if self.overwritten:
            flags.append(measures.all_finite(self._next_values(grads)))
        return functools.reduce(tf.logical_and, flags)

    def max_abs(self, grads: Gradients) -> tf.Tensor:
        """Return the largest magnitude of the unscaled gradients, a float32 scalar."""
        largest = measures.max_abs(self._to_detect(grads))
        return largest / self.loss_scale if self.are_scaled else largest

    def counts(self, grads: Gradients) -> tf.Tensor:
        """Count the values of each gradient that overflowed, as `OverflowDetector.counts` does.

        A value that could overflow in the sum over the replicas counts as infinite.
        """
        to_detect = self._to_detect(grads)
        # A detector of another kind may also count finite values.
        if type(self.detector) is NonFiniteDetector and not within_xla():
            # In a gradient whose sum of squares is finite, no value overflowed.
            to_detect = measures.suspects(to_detect)
        counts = self.detector.counts(to_detect, self.loss_scale)
        if self._sums_later:
            in_sum = measures.counts(to_detect, [lambda values: measures.overflows_in_sum(values, self.num_summed)])
            counts += tf.pad(in_sum, [[0, 0], [0, len(KINDS) - 1]])
        if self.overwritten:
            counts += NonFiniteDetector().counts(self._next_values(grads), self.loss_scale)
        return counts

    @property
    def _sums_later(self) -> bool:
        return self.num_summed > 1 and not self.detector.ignores_sums

    def _to_detect(self, grads: Gradients) -> Gradients:
        return [None if index in self.overwritten else grad for index, grad in enumerate(grads)]

    def _next_values(self, grads: Gradients) -> Gradients:
        return [grad if index in self.overwritten else None for index, grad in enumerate(grads)]
