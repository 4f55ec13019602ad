"""Overflow detectors: they decide whether gradients overflowed, and count the values that did."""

import abc

import numpy as np
import tensorflow as tf

from tfmp.core import settings
from tfmp.core.gradients import measures
from tfmp.types import Gradients

#: The kinds of values that `OverflowDetector.counts` counts, in the order of its columns.
KINDS = ("inf", "nan", "saturated")


class OverflowDetector(abc.ABC):
    """Base class of the detectors, which decide whether the gradients of a step overflowed.

    Pass a detector as `overflow_detector` to `tfmp.LossScaleOptimizer` or `tfmp.GradScaler`. The default,
    `tfmp.NonFiniteDetector`, looks for infinities and NaN. Each replica asks the detector about its own gradients; a
    step is applied only if no replica's gradients overflowed.

    To write a detector of your own, derive it from this class and override `all_finite`. AutoGraph does not convert
    that method, so use `tf.where` or `tf.cond` instead of an `if` on a tensor.

    Examples:
        >>> import tfmp
        >>> class AtMostOne(tfmp.OverflowDetector):
        ...     def all_finite(self, grads, loss_scale):
        ...         return tf.reduce_all([tf.reduce_all(tf.abs(grad) <= 1) for grad in grads if grad is not None])
        >>> bool(AtMostOne().all_finite([tf.constant([0.5, 2.0])], tf.constant(8.0)))
        False
    """

    #: True if `all_finite` gives the same answer for scaled gradients. The optimizer may then pass scaled gradients,
    #: which saves unscaling them.
    ignores_scale: bool = False

    #: True if a step may be applied although the sum of the replicas' gradients could overflow, which is not checked
    #: again. By default, values so large that their sum could overflow count as overflowed.
    ignores_sums: bool = False

    @abc.abstractmethod
    def all_finite(self, grads: Gradients, loss_scale: tf.Tensor) -> tf.Tensor:
        """Return a boolean scalar: True if no gradient overflowed.

        Args:
            grads: The unscaled gradients of one replica: dense tensors, `tf.IndexedSlices` or None. They may be scaled
                if `ignores_scale` is True.
            loss_scale: The scale of the loss, a float32 scalar.
        """

    def counts(self, grads: Gradients, loss_scale: tf.Tensor) -> tf.Tensor:
        """Count the values that overflowed in each gradient, for the overflow reports; called on skipped steps only.

        Args:
            grads: The gradients of one replica: unscaled, unless `ignores_scale` is True.
            loss_scale: The scale of the loss, a float32 scalar.

        Returns:
            An int64 matrix with a row for each gradient. The columns are the numbers of values that are infinite, that
            are NaN, and that are saturated.

        Examples:
            >>> import tfmp
            >>> grads = [tf.constant([1.0, float("nan")]), None, tf.constant([float("-inf")])]
            >>> tfmp.NonFiniteDetector().counts(grads, tf.constant(8.0)).numpy().tolist()
            [[0, 1, 0], [0, 0, 0], [1, 0, 0]]
        """
        del loss_scale
        return tf.pad(measures.sums_of_each(grads, [tf.math.is_inf, tf.math.is_nan]), [[0, 0], [0, 1]])


class NonFiniteDetector(OverflowDetector):
    """The default detector: gradients overflowed if any value is infinite or NaN.

    This is correct wherever arithmetic follows IEEE 754, which turns a value that is too large into an infinity. Use
    `tfmp.SaturationDetector` where it becomes the largest finite value instead.

    Examples:
        >>> bool(NonFiniteDetector().all_finite([tf.constant([1.0, float("nan")])], tf.constant(8.0)))
        False
    """

    ignores_scale = True

    def all_finite(self, grads: Gradients, loss_scale: tf.Tensor) -> tf.Tensor:
        """Return a boolean scalar: True if no gradient contains an infinity or a NaN."""
        del loss_scale
        return measures.all_finite(grads)


class SaturationDetector(OverflowDetector):
    """A detector for hardware and formats that saturate: it also treats values at the limit of a dtype as overflowed.

    Several accelerators can be set to saturate, and the usual cast to a float8 dtype does too: a value that is too
    large becomes the largest finite value of the dtype. A check for infinities and NaN does not notice this. The rule
    of this detector, for unscaled gradients `g`:

        finite  =  every g is finite  and  max|g| * loss_scale < limit

    Some gradients may never have been in the saturating dtype. If their scaled values reach the limit, they count as
    overflowed too; the loss scale then becomes a little lower than necessary. Clip gradients after this check, not
    before it: a clipped gradient no longer shows that it was saturated.

    Args:
        limit: The magnitude from which a scaled gradient counts as saturated. By default it follows from `dtype`. Pass
            `limit` or `dtype`, not both.
        dtype: The dtype that saturates, such as `"float16"` (the default), `"bfloat16"`, `"float32"`,
            `"float8_e4m3fn"` or `"float8_e5m2"`. The limit lies halfway between its two largest values: at 65488 for
            `float16`, 432 for `float8_e4m3fn` and 53248 for `float8_e5m2`.

    Raises:
        TypeError: `limit` is not a number, or `dtype` is not a floating-point dtype.
        ValueError: `limit` is not finite or not greater than 0, or both arguments are given.

    Examples:
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
        """Return a boolean scalar: True if every value is finite, and its scaled magnitude is below the limit."""
        below_limit = measures.max_abs(grads) * loss_scale < self._limit
        return tf.logical_and(measures.all_finite(grads), below_limit)

    def counts(self, grads: Gradients, loss_scale: tf.Tensor) -> tf.Tensor:
        """Count the values that are infinite, that are NaN, and that are finite but saturated in their scaled form."""

        def saturated(values: tf.Tensor) -> tf.Tensor:
            at_limit = tf.abs(tf.cast(values, tf.float32)) * loss_scale >= self._limit
            return tf.logical_and(tf.math.is_finite(values), at_limit)

        return measures.sums_of_each(grads, [tf.math.is_inf, tf.math.is_nan, saturated])


def _limit_of(dtype: str | tf.DType) -> float:
    """Return the number halfway between the two largest values of a dtype.

    The scaled magnitude is computed in float32 and may be rounded, so it is not compared with the largest value itself.
    """
    try:
        of_tensorflow = tf.as_dtype(dtype)
    except TypeError:
        of_tensorflow = None
    if of_tensorflow is None or not of_tensorflow.is_floating:
        raise TypeError(f'dtype must be a floating-point type that TensorFlow knows, such as "float16", got {dtype!r}.')
    largest = of_tensorflow.max
    # NumPy's `nextafter` also knows bfloat16 and float8, through the types of `ml_dtypes`.
    next_largest = np.float32(np.nextafter(largest, np.zeros_like(largest)))
    halfway = (float(largest) + float(next_largest)) / 2
    # Float32 has no number between its own two largest values. There the limit is the largest value.
    return max(float(np.float32(halfway)), float(np.nextafter(next_largest, np.float32(np.inf))))


def validated_detector(detector: OverflowDetector | None) -> OverflowDetector:
    """Return the detector, or the default detector for None; raise an error for any other object."""
    if detector is None:
        return NonFiniteDetector()
    if not isinstance(detector, OverflowDetector):
        raise TypeError(
            f"overflow_detector must be a tfmp.OverflowDetector, got {detector!r} of type {type(detector).__name__}: "
            "pass tfmp.NonFiniteDetector() or tfmp.SaturationDetector()."
        )
    return detector
