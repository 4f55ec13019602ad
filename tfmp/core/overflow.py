"""Overflow detectors: what tells a step whose gradients can be used."""

from typing import Protocol

import tensorflow as tf

from tfmp.core import reductions, settings
from tfmp.types import Gradients


class OverflowDetector(Protocol):
    """Decides on one replica whether its gradients can be used."""

    def all_finite(self, grads: Gradients, loss_scale: tf.Tensor) -> tf.Tensor:
        """Return a boolean scalar: True when no gradient overflowed.

        Args:
            grads: Unscaled gradients.
            loss_scale: The float32 scalar that they were scaled by.
        """


class NonFiniteDetector:
    """Takes infinities and NaN for overflow: right wherever arithmetic follows IEEE 754.

    Example:
        >>> bool(NonFiniteDetector().all_finite([tf.constant([1.0, float("nan")])], tf.constant(8.0)))
        False
    """

    def all_finite(self, grads: Gradients, loss_scale: tf.Tensor) -> tf.Tensor:
        """Return a boolean scalar: True when no gradient holds an infinity or a NaN."""
        del loss_scale
        return reductions.all_finite(grads)


class SaturationDetector:
    """Also takes values at the limit of a type for overflow: for hardware that saturates.

    Such hardware (a setting of several accelerators) turns an overflow into the largest finite value, and a check
    for infinities sees nothing. The rule, on unscaled gradients `g`:

        finite  =  every g is finite  and  max|g| * loss_scale < limit

    A gradient that was never in the saturating type, and is larger in its scaled form, is taken for an overflow
    too; the scale then settles a little lower than it must. Clip gradients after this check, not before: a clipped
    gradient no longer shows that it was saturated.

    Args:
        limit: The magnitude, in scaled gradients, from which a value counts as saturated. The default lies half a
            unit in the last place below 65504, the largest float16.

    Raises:
        TypeError: The limit is not a number.
        ValueError: The limit is not finite, or not above 0.

    Example:
        >>> detector = SaturationDetector()
        >>> bool(detector.all_finite([tf.constant([65504.0 / 1024])], tf.constant(1024.0)))
        False
        >>> bool(detector.all_finite([tf.constant([60000.0 / 1024])], tf.constant(1024.0)))
        True
    """

    def __init__(self, limit: float = 65488.0) -> None:
        self._limit = settings.positive("limit", limit)

    def all_finite(self, grads: Gradients, loss_scale: tf.Tensor) -> tf.Tensor:
        """Return a boolean scalar: True when every value is finite, and below the limit in its scaled form."""
        below_limit = reductions.max_abs(grads) * loss_scale < self._limit
        return tf.logical_and(reductions.all_finite(grads), below_limit)
