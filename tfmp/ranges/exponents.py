"""Counts values by their binary exponents: a histogram over powers of two, exact for every floating-point dtype.

The exponent is read from the bits of a value. Arithmetic would not do: CPU kernels and XLA replace subnormal numbers by
0, and the subnormal numbers are what one looks for.
"""

from collections.abc import Callable
from typing import NamedTuple

import tensorflow as tf

from tfmp.core.distribute import current_distribution
from tfmp.core.dtypes import HALF_TYPES
from tfmp.core.gradients.arithmetic import values_of
from tfmp.types import Gradient, Gradients

#: The exponents of the first and of the last bin: bin `e` counts the values with `2**e <= abs(value) < 2**(e + 1)`.
LOWEST_EXPONENT = -150
HIGHEST_EXPONENT = 127

#: What is counted beside the exponents, in this order, behind the bins.
OTHER_COUNTS = ("zero", "infinite", "nan", "below", "above")

NUM_BINS = HIGHEST_EXPONENT - LOWEST_EXPONENT + 1

#: The number of counts of one tensor.
NUM_COUNTS = NUM_BINS + len(OTHER_COUNTS)


def exponent_counts(tensors: Gradients, *, is_distributed: bool = False, name: str = "exponent_counts") -> tf.Tensor:
    """Count, on the device, how many values of each tensor have which binary exponent.

    Counts are exact for every dtype, subnormal numbers included, in eager code, in a `tf.function`, within XLA and in
    TF1 graphs. A row of the result is what `tfmp.ranges.RangeHistogram` takes.

    Args:
        tensors: Gradients, weights or activations of float16, bfloat16, float32 or float64, of any shape. A
            `tf.IndexedSlices` counts the values of its rows; rows with the same index are not summed before. None has
            no values.
        is_distributed: True to sum the counts over the replicas of the active `tf.distribute` strategy, or over the
            workers of Horovod. All of them must then call this function.
        name: A name for the exchange with other workers, different for each call in a step.

    Returns:
        An int64 tensor of shape `[len(tensors), 283]`. Its columns are the numbers of values from `2**e` to below
        `2**(e + 1)` for the exponents -150 to 127, then the numbers of zeros, of infinities, of NaN, and of float64
        values between 0 and `2**-150`, and finite ones from `2**128` on.

    Raises:
        TypeError: A tensor does not have a floating-point dtype.
        ValueError: `is_distributed` is True, and nothing distributes.

    Examples:
        >>> import tfmp
        >>> counts = tfmp.ranges.exponent_counts([tf.constant([0.75, -0.5, 3.0], tf.float16)])
        >>> int(counts[0, 150 - 1]), int(counts[0, 150 + 1])
        (2, 1)
        >>> tfmp.ranges.RangeHistogram(counts[0])
        <RangeHistogram of 3 values, 2^-1..2^1>
    """
    rows = [_counts(tensor) for tensor in tensors]
    counts = tf.stack(rows) if rows else tf.zeros([0, NUM_COUNTS], tf.int64)
    return current_distribution(True).total(counts, name) if is_distributed else counts


class _Bits(NamedTuple):
    """How a dtype stores a value: a sign, a field that holds the exponent, a mantissa."""

    #: The dtype of unsigned integers of this size.
    unsigned: tf.DType
    #: The dtype of signed integers of this size, with which values are counted.
    signed: tf.DType
    #: The number of bits of the mantissa.
    mantissa: int
    #: The number of values of the field. The last one is that of infinities and NaN.
    fields: int

    @property
    def exponent_of_field_1(self) -> int:
        """The exponent of the smallest normal number."""
        return 2 - self.fields // 2


# By name: a `tf.DType` equals a small integer.
_BITS = {
    "float16": _Bits(tf.uint16, tf.int16, 10, 2**5),
    "bfloat16": _Bits(tf.uint16, tf.int16, 7, 2**8),
    "float32": _Bits(tf.uint32, tf.int32, 23, 2**8),
    "float64": _Bits(tf.uint64, tf.int64, 52, 2**11),
}


def _counts(tensor: Gradient) -> tf.Tensor:
    values = values_of([tensor])
    if not values:
        return tf.zeros([NUM_COUNTS], tf.int64)
    if values[0].dtype.name not in _BITS:
        raise TypeError(f"powers of two are counted in floating-point tensors, got one of {values[0].dtype.name}.")
    flat = tf.reshape(values[0], [-1])
    return _counts_of_half(flat) if flat.dtype in HALF_TYPES else _counts_of_float(flat)


def _counts_of_half(values: tf.Tensor) -> tf.Tensor:
    """Count values of 16 bits: first each of the 2**16 values, then sums over those of one power of two."""
    bits = _BITS[values.dtype.name]
    each = _bincount(tf.cast(tf.bitcast(values, bits.unsigned), tf.int32), 2**16)
    of_magnitudes = tf.reduce_sum(tf.reshape(each, [2, bits.fields, 2**bits.mantissa]), axis=0)
    normal = tf.reduce_sum(of_magnitudes[1:-1], axis=1)
    # The field 0 holds 0, then the subnormal numbers: 1, 2, 4 and so on of them have the same exponent.
    starts = [0, *(2**power for power in range(bits.mantissa + 1))]
    before = tf.gather(tf.pad(tf.cumsum(of_magnitudes[0]), [[1, 0]]), starts)
    zero, subnormal = tf.split(before[1:] - before[:-1], [1, bits.mantissa])
    infinite, nan = of_magnitudes[-1, :1], tf.reduce_sum(of_magnitudes[-1, 1:], keepdims=True)
    return _laid_out(bits, tf.concat([subnormal, normal], axis=0), zero, infinite, nan)


def _counts_of_float(values: tf.Tensor) -> tf.Tensor:
    """Count values of 32 or 64 bits by their field, and look at single bits only where the field does not suffice."""
    bits = _BITS[values.dtype.name]
    as_integers = tf.bitcast(values, bits.signed)
    by_sign = _counts_of_fields(as_integers, bits)
    lowest, normal, highest = tf.split(tf.reduce_sum(by_sign, axis=0), [1, bits.fields - 2, 1])
    subnormal = _if(
        _any_subnormal(as_integers, bits, by_sign[:, 0]),
        lambda: _counts_of_subnormal(as_integers, bits),
        lambda: tf.zeros([bits.mantissa], tf.int64),
    )
    zero = lowest - tf.reduce_sum(subnormal)
    infinite = _if(highest[0] > 0, lambda: _count_infinite(as_integers, bits), lambda: tf.zeros([1], tf.int64))
    nan = highest - infinite
    if values.dtype == tf.float32:
        return _laid_out(bits, tf.concat([subnormal, normal], axis=0), zero, infinite, nan)
    # The subnormal numbers of float64, and some of the normal ones, are below all bins; others are above.
    first = LOWEST_EXPONENT - bits.exponent_of_field_1
    below, in_bins, above = tf.split(normal, [first, NUM_BINS, bits.fields - 2 - first - NUM_BINS])
    below = tf.reduce_sum(tf.concat([below, subnormal], axis=0), keepdims=True)
    return tf.concat([in_bins, zero, infinite, nan, below, tf.reduce_sum(above, keepdims=True)], axis=0)


def _any_subnormal(as_integers: tf.Tensor, bits: _Bits, with_field_0: tf.Tensor) -> tf.Tensor:
    """Return whether the values whose field is 0 include subnormal numbers; the others are zeros.

    `with_field_0` is an int64 vector: how many positive and how many negative values have the field 0.
    """
    unsigned = tf.bitcast(as_integers, bits.unsigned)

    def found(zero: int) -> tf.Tensor:
        # Moved such that the number behind the zero of this sign is the lowest integer, and the zero itself the
        # highest. Then one minimum tells: comparing each value would take a pass for each comparison.
        offset = (bits.unsigned.max // 2 - zero) % (bits.unsigned.max + 1)
        moved = tf.bitcast(unsigned + tf.constant(offset, bits.unsigned), bits.signed)
        return tf.reduce_min(moved) < bits.signed.min + (1 << bits.mantissa) - 1

    negative_zero = bits.unsigned.max // 2 + 1
    positive = _if(with_field_0[0] > 0, lambda: found(0), lambda: tf.constant(False))
    negative = _if(with_field_0[1] > 0, lambda: found(negative_zero), lambda: tf.constant(False))
    return tf.logical_or(positive, negative)


def _counts_of_subnormal(as_integers: tf.Tensor, bits: _Bits) -> tf.Tensor:
    # A subnormal number is its mantissa times the smallest one. As a floating-point number of its own, which is
    # normal, the mantissa has an exponent in its field.
    magnitudes = tf.bitwise.bitwise_and(as_integers, bits.signed.max)
    mantissas = tf.where(magnitudes < 1 << bits.mantissa, magnitudes, 0)
    as_floats = tf.cast(mantissas, tf.float32 if bits.signed == tf.int32 else tf.float64)
    of_fields = tf.reduce_sum(_counts_of_fields(tf.bitcast(as_floats, bits.signed), bits), axis=0)
    field_of_1 = bits.fields // 2 - 1
    return of_fields[field_of_1 : field_of_1 + bits.mantissa]


def _count_infinite(as_integers: tf.Tensor, bits: _Bits) -> tf.Tensor:
    infinity = (bits.fields - 1) << bits.mantissa
    are_infinite = tf.equal(tf.bitwise.bitwise_and(as_integers, bits.signed.max), infinity)
    return tf.reduce_sum(tf.cast(are_infinite, tf.int64), keepdims=True)


def _counts_of_fields(as_integers: tf.Tensor, bits: _Bits) -> tf.Tensor:
    """Return how many values have each field: a row for positive values, and one for negative values."""
    shift = tf.constant(bits.mantissa, bits.unsigned)
    # The shift of an unsigned integer: that of a signed one would repeat the sign.
    fields = tf.bitwise.right_shift(tf.bitcast(as_integers, bits.unsigned), shift)
    return tf.reshape(_bincount(tf.bitcast(fields, bits.signed), 2 * bits.fields), [2, bits.fields])


def _bincount(indices: tf.Tensor, size: int) -> tf.Tensor:
    # The op itself: tf.math.bincount would first look for the largest index. It counts in int32, for which it also
    # has kernels for GPUs, so a tensor may have up to 2**31 - 1 values.
    size_as_index, no_weights = tf.cast(size, indices.dtype), tf.zeros([0], tf.int32)
    counts = tf.raw_ops.DenseBincount(input=indices, size=size_as_index, weights=no_weights)
    return tf.cast(counts, tf.int64)


def _laid_out(bits: _Bits, of_exponents: tf.Tensor, zero: tf.Tensor, infinite: tf.Tensor, nan: tf.Tensor) -> tf.Tensor:
    missing = bits.exponent_of_field_1 - bits.mantissa - LOWEST_EXPONENT
    padded = tf.pad(of_exponents, [[missing, NUM_BINS - missing - of_exponents.shape[0]]])
    return tf.concat([padded, zero, infinite, nan, tf.zeros([2], tf.int64)], axis=0)


def _if(needed: tf.Tensor, then: Callable[[], tf.Tensor], otherwise: Callable[[], tf.Tensor]) -> tf.Tensor:
    # Not with the default name, `cond`, whose numbers are part of checkpoint keys in scripts that used tf.contrib.
    return tf.cond(needed, then, otherwise, name="told_apart")
