"""Rounds float32 values to half precision: to the nearest value, or to one of the two next ones at random."""

from collections.abc import Sequence

import tensorflow as tf

from tfmp.core.tensorflow_internals import within_xla


def rounded(values: tf.Tensor, dtype: tf.DType, seed: Sequence[tf.Tensor | int] | None = None) -> tf.Tensor:
    """Round float32 values to a half-precision type.

        nearest       the nearest value of the type
        stochastic    low + spacing with probability (x - low) / spacing, otherwise low;
                      low is the largest value of the type that is not above x

    The mean of a stochastically rounded value is x. So many small steps that are added one after another come out right
    in the mean, where rounding to the nearest value would lose each of them. A value that the type has stays as it is
    in both ways. Finite values beyond the range of the type become its largest value.

    The random numbers follow from the integers or integer scalars of `seed`; None rounds to the nearest value.

    Examples:
        >>> x = tf.fill([10000], 1.0 + 0.25 * 2.0**-10)
        >>> float(tf.reduce_mean(tf.cast(rounded(x, tf.float16), tf.float32)))
        1.0
        >>> up = rounded(x, tf.float16, seed=[0, 3]) > 1.0
        >>> 2300 < int(tf.reduce_sum(tf.cast(up, tf.int32))) < 2700
        True

    Source: Gupta et al., "Deep Learning with Limited Numerical Precision" (2015).
    """
    limited = tf.where(tf.math.is_finite(values), tf.clip_by_value(values, dtype.min, dtype.max), values)
    if seed is None:
        return tf.cast(limited, dtype)
    random_bits = _random_bits(tf.shape(values), seed)
    return (_to_bfloat16 if dtype == tf.bfloat16 else _to_float16)(limited, random_bits)


def _to_bfloat16(values: tf.Tensor, random_bits: tf.Tensor) -> tf.Tensor:
    """Round stochastically: bfloat16 is the upper half of float32's bits.

    A random number is added to the lower half, which is cut off then. What it carries over is 1 with the probability
    that is wanted, for negative numbers too, whose bits are those of the magnitude. NaN and infinities stay.
    """
    with_carry = tf.bitcast(values, tf.uint32) + _shifted(random_bits, 16)
    cut_off = tf.bitcast(tf.bitwise.bitwise_and(with_carry, tf.constant(0xFFFF0000, tf.uint32)), tf.float32)
    # A cast to finish with: XLA would compute a bitcast again for each use of what is stored.
    return tf.cast(tf.where(tf.math.is_finite(values), cut_off, values), tf.bfloat16)


def _to_float16(values: tf.Tensor, random_bits: tf.Tensor) -> tf.Tensor:
    """Round stochastically: count in the distance between two numbers of float16, which is a power of two.

    So no operation but the choice rounds. The same numbers of bits would not do: float16 has fewer for small values.
    """
    # The bits of the exponent alone are the power of two that is not above the value.
    power = tf.bitcast(tf.bitwise.bitwise_and(tf.bitcast(values, tf.int32), 0x7F800000), tf.float32)
    spacing = tf.maximum(power * 2.0**-10, 2.0**-24)
    quotient = values / spacing
    low = tf.floor(quotient)
    # Between 0 and 1, both excluded: a value that float16 has does not go up.
    uniform = (tf.cast(tf.bitcast(_shifted(random_bits, 9), tf.int32), tf.float32) + 0.5) * 2.0**-23
    chosen = (low + tf.cast(uniform < quotient - low, tf.float32)) * spacing
    return tf.cast(tf.where(tf.math.is_finite(chosen), chosen, values), tf.float16)


def _random_bits(shape: tf.Tensor, seed: Sequence[tf.Tensor | int]) -> tf.Tensor:
    """Return random numbers of 32 bits, hashes of the seed and of the number of the element.

    So they are the same on all devices, in eager code and within XLA, and need no state. XLA computes them where they
    are used; on a CPU, `tf.random.stateless_uniform` takes more than a hundred times as long within XLA.
    """
    key = tf.constant(0, tf.uint32)
    for number in seed:
        key = _hash(tf.bitwise.bitwise_xor(key, tf.cast(number, tf.uint32)) + _GOLDEN)
    # 30 bits, so that int32 can count on from it.
    first = tf.bitcast(_shifted(key, 2), tf.int32)
    count = tf.reduce_prod(shape)
    # XLA needs constants for a range. Elsewhere TensorFlow would keep a range of constants in memory.
    elements = first + tf.range(count) if within_xla() else tf.range(first, first + count)
    return _hash(tf.bitcast(tf.reshape(elements, shape), tf.uint32))


#: 2**32 divided by the golden ratio: keeps a key of zeros from being hashed to itself.
_GOLDEN = 0x9E3779B9


def _hash(numbers: tf.Tensor) -> tf.Tensor:
    """Return 32-bit numbers, each bit of which depends on each bit of the given one.

    Source: Chris Wellons, "Prospecting for Hash Functions" (2018), the function "lowbias32".
    """
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        numbers = tf.bitwise.bitwise_xor(numbers, _shifted(numbers, shift)) * tf.constant(factor, tf.uint32)
    return tf.bitwise.bitwise_xor(numbers, _shifted(numbers, 16))


def _shifted(numbers: tf.Tensor, bits: int) -> tf.Tensor:
    return tf.bitwise.right_shift(numbers, tf.constant(bits, tf.uint32))
