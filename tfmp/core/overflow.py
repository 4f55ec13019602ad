"""Overflow detectors: what tells a step whose gradients can be used, and where they cannot."""

import abc

import numpy as np
import tensorflow as tf

from tfmp.core import reductions, settings
from tfmp.types import Gradients

#: The kinds of values that `OverflowDetector.counts` tells apart.
KINDS = ("inf", "nan", "saturated")


class OverflowDetector(abc.ABC):
    """Decides on one replica whether its gradients can be used.

    A detector of your own overrides `all_finite`, and is then taken wherever the ones here are. AutoGraph does not
    convert it: choose by `tf.where` and `tf.cond`, not by an `if` on a tensor.

    Example:
        >>> import tfmp
        >>> class AtMostOne(tfmp.OverflowDetector):
        ...     def all_finite(self, grads, loss_scale):
        ...         return tf.reduce_all([tf.reduce_all(tf.abs(grad) <= 1) for grad in grads])
        >>> bool(AtMostOne().all_finite([tf.constant([0.5, 2.0])], tf.constant(8.0)))
        False
    """

    #: Whether scaled gradients give the same answer, so that a step that does not need them otherwise need not unscale
    #: them first.
    ignores_scale: bool = False

    #: Whether a step is applied also where the sum of the replicas' gradients, which no one looks at any more, could
    #: overflow.
    ignores_sums: bool = False

    @abc.abstractmethod
    def all_finite(self, grads: Gradients, loss_scale: tf.Tensor) -> tf.Tensor:
        """Return a boolean scalar: True when no gradient overflowed.

        Args:
            grads: Unscaled gradients.
            loss_scale: The float32 scalar that they were scaled by.
        """

    def counts(self, grads: Gradients, loss_scale: tf.Tensor) -> tf.Tensor:
        """Count the values that overflowed in each gradient; asked for on skipped steps only.

        Args:
            grads: Unscaled gradients.
            loss_scale: The float32 scalar that they were scaled by.

        Returns:
            An int64 matrix: for each gradient, how many values are infinite, NaN, saturated (`KINDS`).

        Example:
            >>> import tfmp
            >>> grads = [tf.constant([1.0, float("nan")]), None, tf.constant([float("-inf")])]
            >>> tfmp.NonFiniteDetector().counts(grads, tf.constant(8.0)).numpy().tolist()
            [[0, 1, 0], [0, 0, 0], [1, 0, 0]]
        """
        del loss_scale
        return tf.pad(reductions.counts(grads, [tf.math.is_inf, tf.math.is_nan]), [[0, 0], [0, 1]])


class NonFiniteDetector(OverflowDetector):
    """Takes infinities and NaN for overflow: right wherever arithmetic follows IEEE 754.

    Example:
        >>> bool(NonFiniteDetector().all_finite([tf.constant([1.0, float("nan")])], tf.constant(8.0)))
        False
    """

    ignores_scale = True

    def all_finite(self, grads: Gradients, loss_scale: tf.Tensor) -> tf.Tensor:
        """Return a boolean scalar: True when no gradient holds an infinity or a NaN."""
        del loss_scale
        return reductions.all_finite(grads)


class SaturationDetector(OverflowDetector):
    """Also takes values at the limit of a type for overflow: for hardware and formats that saturate.

    There an overflow becomes the largest finite value (a setting of several accelerators; the usual cast to a float8
    type), and a check for infinities sees nothing. The rule, on unscaled gradients `g`:

        finite  =  every g is finite  and  max|g| * loss_scale < limit

    A gradient that was never in the saturating type, and is larger in its scaled form, is taken for an overflow
    too; the scale then settles a little lower than it must. Clip gradients after this check, not before: a clipped
    gradient no longer shows that it was saturated.

    Args:
        limit: The magnitude, in scaled gradients, from which a value counts as saturated; by default that of `dtype`.
        dtype: The type that saturates, such as `"float16"` (the default), `"bfloat16"`, `"float32"`,
            `"float8_e4m3fn"` or `"float8_e5m2"`. Its limit lies halfway between its two largest values: 65488, 432 for
            `float8_e4m3fn`, 53248 for `float8_e5m2`.

    Raises:
        TypeError: The limit is not a number, or `dtype` no floating-point type.
        ValueError: The limit is not finite, or not above 0; or both are given.

    Example:
        >>> detector = SaturationDetector()
        >>> bool(detector.all_finite([tf.constant([65504.0 / 1024])], tf.constant(1024.0)))
        False
        >>> bool(detector.all_finite([tf.constant([60000.0 / 1024])], tf.constant(1024.0)))
        True
        >>> bool(SaturationDetector(dtype="float8_e4m3fn").all_finite([tf.constant([448.0])], tf.constant(1.0)))
        False
    """

    def __init__(self, limit: float | None = None, *, dtype: str | tf.DType | None = None) -> None:
        if limit is not None and dtype is not None:
            raise ValueError(f"pass limit or dtype, not both, got limit={limit!r} and dtype={dtype!r}.")
        self._limit = _limit_of(dtype or "float16") if limit is None else settings.positive("limit", limit)

    def all_finite(self, grads: Gradients, loss_scale: tf.Tensor) -> tf.Tensor:
        """Return a boolean scalar: True when every value is finite, and below the limit in its scaled form."""
        below_limit = reductions.max_abs(grads) * loss_scale < self._limit
        return tf.logical_and(reductions.all_finite(grads), below_limit)

    def counts(self, grads: Gradients, loss_scale: tf.Tensor) -> tf.Tensor:
        """Count the values that are infinite, NaN, or finite and not below the limit in their scaled form."""

        def saturated(values: tf.Tensor) -> tf.Tensor:
            at_limit = tf.abs(tf.cast(values, tf.float32)) * loss_scale >= self._limit
            return tf.logical_and(tf.math.is_finite(values), at_limit)

        return reductions.counts(grads, [tf.math.is_inf, tf.math.is_nan, saturated])


def _limit_of(dtype: str | tf.DType) -> float:
    """Return what lies halfway between the two largest values of a type, as far as float32 has numbers there."""
    try:
        of_tensorflow = tf.as_dtype(dtype)
    except TypeError:
        of_tensorflow = None
    if of_tensorflow is None or not of_tensorflow.is_floating:
        raise TypeError(f'dtype must be a floating-point type that TensorFlow knows, such as "float16", got {dtype!r}.')
    largest = np.array(of_tensorflow.max, of_tensorflow.as_numpy_dtype)
    next_largest = np.float32(np.nextafter(largest, np.zeros_like(largest)))
    halfway = (float(largest) + float(next_largest)) / 2
    return max(float(np.float32(halfway)), float(np.nextafter(next_largest, np.float32(np.inf))))


def validated_detector(detector: OverflowDetector | None) -> OverflowDetector:
    """Return the detector, the default one for None, or say that it is none.

    Args:
        detector: What the user gave as a detector.

    Raises:
        TypeError: It is not one.
    """
    if detector is None:
        return NonFiniteDetector()
    if not isinstance(detector, OverflowDetector):
        raise TypeError(
            f"overflow_detector must be a tfmp.OverflowDetector, got {detector!r} of type {type(detector).__name__}: "
            "pass tfmp.NonFiniteDetector() or tfmp.SaturationDetector()."
        )
    return detector
