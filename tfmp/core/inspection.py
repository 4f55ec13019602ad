"""What a step asks of one replica's gradients: whether all can be used, the largest magnitude, what is wrong."""

from collections.abc import Collection

import tensorflow as tf

from tfmp.core import numerics, reductions
from tfmp.core.overflow import KINDS, NonFiniteDetector, OverflowDetector
from tfmp.types import Gradients


class Inspection:
    """Looks at gradients in true magnitude, or scaled where that gives the same answer.

    Args:
        detector: Tells which gradients overflowed.
        loss_scale: The float32 scalar that they were scaled by.
        unscales: Whether the gradients are scaled, and must be unscaled to be looked at.
        stays_scaled: Whether they are scaled, and are looked at as they are.
        addends: How many replicas' gradients are summed after they were looked at; no matter if the detector ignores
            sums.
        next_values: Indices of those that are no gradients but the next values of their variables: they must be finite,
            and no more is asked of them.

    Example:
        >>> inspection = Inspection(NonFiniteDetector(), tf.constant(8.0), unscales=True)
        >>> grads = [tf.constant([16.0, float("nan")]), None]
        >>> bool(inspection.all_finite(grads)), inspection.counts(grads).numpy().tolist()
        (False, [[0, 1, 0], [0, 0, 0]])
        >>> float(inspection.max_abs([tf.constant(-16.0)]))
        2.0
    """

    def __init__(
        self,
        detector: OverflowDetector,
        loss_scale: tf.Tensor,
        *,
        unscales: bool = False,
        stays_scaled: bool = False,
        addends: int = 1,
        next_values: Collection[int] = (),
    ) -> None:
        self._detector = detector
        self._loss_scale = loss_scale
        self._unscales = unscales
        self._stays_scaled = stays_scaled
        self._addends = 1 if detector.ignores_sums else addends
        self._next_values = next_values

    def all_finite(self, grads: Gradients) -> tf.Tensor:
        """Return a boolean scalar: True when they can be used.

        Args:
            grads: The replica's gradients.
        """
        looked_at = self._looked_at(grads)
        flags = [self._detector.all_finite(looked_at, self._loss_scale)]
        if self._stays_scaled:
            # One that was restored may be less than the manager ever gives: then unscaling could overflow.
            flags.append(self._loss_scale >= 1)
        if self._addends > 1:
            # Both read the gradients by the same sums, which TensorFlow computes once.
            flags.append(reductions.all_finite(looked_at, self._addends))
        if self._next_values:
            flags.append(reductions.all_finite(self._to_be_finite(grads)))
        return tf.reduce_all(tf.stack(flags)) if len(flags) > 1 else flags[0]

    def max_abs(self, grads: Gradients) -> tf.Tensor:
        """Return the largest true magnitude, a float32 scalar.

        Args:
            grads: The replica's gradients.
        """
        largest = reductions.max_abs(self._looked_at(grads))
        return largest / self._loss_scale if self._stays_scaled else largest

    def counts(self, grads: Gradients) -> tf.Tensor:
        """Count what is wrong with each, as `OverflowDetector.counts` does; what may overflow in a sum is infinite.

        Args:
            grads: The replica's gradients.
        """
        looked_at = self._looked_at(grads)
        counts = self._detector.counts(looked_at, self._loss_scale)
        if self._addends > 1:
            in_sum = reductions.counts(looked_at, [lambda values: reductions.overflows_in_sum(values, self._addends)])
            counts += tf.pad(in_sum, [[0, 0], [0, len(KINDS) - 1]])
        if self._next_values:
            counts += NonFiniteDetector().counts(self._to_be_finite(grads), self._loss_scale)
        return counts

    def _looked_at(self, grads: Gradients) -> Gradients:
        true_grads = numerics.unscale(grads, self._loss_scale) if self._unscales else grads
        return [None if index in self._next_values else grad for index, grad in enumerate(true_grads)]

    def _to_be_finite(self, grads: Gradients) -> Gradients:
        return [grad if index in self._next_values else None for index, grad in enumerate(grads)]
