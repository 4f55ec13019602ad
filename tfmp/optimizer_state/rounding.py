"""Rounds float32 values to half precision: to the nearest value, or to one of the two next ones at random."""

import functools
import logging
import operator
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfmp.core.tensorflow_internals import ops_are_watched, unrecorded, within_xla
from tfmp.core.tracing import has_apple_gpu

_logger = logging.getLogger("tfmp")

#: Computes a float32 value from float32 values.
Computation = Callable[..., tf.Tensor]

#: Integers or integer scalars from which random numbers follow; None rounds to the nearest value.
Seed = Sequence[tf.Tensor | int] | None


def rounded(values: tf.Tensor, dtype: tf.DType, seed: Seed = None) -> tf.Tensor:
    """Round float32 values to a half-precision type.

        nearest       the nearest value of the type
        stochastic    low + spacing with probability (x - low) / spacing, otherwise low;
                      low is the largest value of the type that is not above x

    The mean of a stochastically rounded value is x, so many small steps are right in the mean, where rounding to the
    nearest value would lose each of them. A value that the type has stays as it is in both ways. Finite values beyond
    the range of the type become its largest value.

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


def rounded_result(compute: Computation, values: Sequence[tf.Tensor], dtype: tf.DType, seed: Seed = None) -> tf.Tensor:
    """Convert values to float32, compute a result from them, and round it as `rounded` does.

    One by one, each operation of the rounding reads and writes a tensor; XLA needs one pass for all. So outside of XLA
    they run as a program of their own, traced once for tensors of all shapes, with the same result. Programs are kept
    for `compute`, such as `operator.add`, so it must be no new function in each call.
    """
    is_random, numbers = seed is not None, [tf.cast(number, tf.int64) for number in seed or ()]
    if not _can_be_program():
        return _run(compute, dtype, is_random, values, numbers)
    program = _program(compute, tuple(value.dtype for value in values), dtype, is_random, len(numbers))
    # A tape would otherwise need a gradient of the program.
    with unrecorded():
        return program(list(values), numbers)


@functools.cache
def _program(compute: Computation, dtypes: Sequence[tf.DType], dtype: tf.DType, is_random: bool, numbers: int) -> Any:  # noqa: ANN401 - TensorFlow has no types
    """Return the program for values of these types, and for a seed of so many numbers if it rounds at random."""
    signature = [[tf.TensorSpec(None, each) for each in dtypes], [tf.TensorSpec([], tf.int64)] * numbers]
    # Not an inner function: TensorFlow would take the programs for one that is traced too often.
    run = functools.partial(_run, compute, dtype, is_random)
    return tf.function(run, jit_compile=True, autograph=False, input_signature=signature)


def _run(
    compute: Computation,
    dtype: tf.DType,
    is_random: bool,
    values: Sequence[tf.Tensor],
    numbers: Sequence[tf.Tensor],
) -> tf.Tensor:
    return rounded(compute(*(tf.cast(value, tf.float32) for value in values)), dtype, numbers if is_random else None)


def _can_be_program() -> bool:
    # XLA has no ops such as those that check numerics.
    if within_xla() or ops_are_watched() or has_apple_gpu():
        return False
    # Without eager execution, as in scripts for TF1's sessions, XLA cannot be tried.
    with tf.init_scope():
        return tf.executing_eagerly() and _xla_works()


@functools.cache
def _xla_works() -> bool:
    """Try XLA, which not every build of TensorFlow has."""
    try:
        _program(operator.add, (tf.bfloat16, tf.float32), tf.bfloat16, False, 0)([tf.zeros([], tf.bfloat16), 0.0], [])
    except tf.errors.OpError as error:
        _logger.warning("half-precision optimizer state is rounded without XLA, in more time, because of: %s", error)
        return False
    return True
