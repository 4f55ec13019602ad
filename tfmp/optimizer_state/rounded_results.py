"""Rounds results to half precision, outside of XLA by programs that XLA compiles."""

import functools
import logging
import operator
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfmp.core.tensorflow_internals import ops_are_watched, unrecorded, within_xla
from tfmp.core.tracing import has_apple_gpu
from tfmp.optimizer_state.rounding import rounded

_logger = logging.getLogger("tfmp")

#: Computes a float32 value from float32 values.
Computation = Callable[..., tf.Tensor]


def rounded_result(
    compute: Computation, values: Sequence[tf.Tensor], dtype: tf.DType, seed: Sequence[tf.Tensor | int] | None = None
) -> tf.Tensor:
    """Convert values to float32, compute a result from them, and round it to a half-precision type; see `rounded`.

    Run one by one, each operation of the rounding reads and writes a tensor. XLA needs one pass for all of them. So
    where XLA does not compile the surrounding code anyway, they run as a program of their own, which is traced once for
    tensors of all shapes. Where XLA cannot be used, they run one by one. The result is the same.

    Args:
        compute: A function such as `operator.add`. Programs are kept for it, so it must be no new one in each call.
        values: Its arguments, tensors of floating-point types.
        dtype: The half-precision type.
        seed: Integers or integer scalars from which the random numbers follow; None rounds to the nearest value.

    Examples:
        >>> slot, delta = tf.constant([1.0, 2.0], tf.bfloat16), tf.constant([0.5, 0.001])
        >>> rounded_result(operator.add, [slot, delta], tf.bfloat16).numpy().tolist()
        [1.5, 2.0]
    """
    if not _can_be_program():
        return _rounded_result(compute, values, dtype, seed)
    numbers = [tf.cast(number, tf.int64) for number in seed or ()]
    program = _program(compute, tuple(value.dtype for value in values), dtype, None if seed is None else len(numbers))
    # A tape would otherwise need a gradient of the program.
    with unrecorded():
        return program(list(values), numbers)


def _rounded_result(
    compute: Computation, values: Sequence[tf.Tensor], dtype: tf.DType, seed: Sequence[tf.Tensor | int] | None
) -> tf.Tensor:
    return rounded(compute(*(tf.cast(value, tf.float32) for value in values)), dtype, seed)


@functools.cache
def _program(compute: Computation, dtypes: Sequence[tf.DType], dtype: tf.DType, numbers: int | None) -> Any:  # noqa: ANN401 - TensorFlow has no types
    """Return the program for values of these types and a seed of so many numbers, or no seed."""
    signature = [[tf.TensorSpec(None, each) for each in dtypes], [tf.TensorSpec([], tf.int64)] * (numbers or 0)]
    # Not an inner function: TensorFlow would take the programs for one that is traced too often.
    run = functools.partial(_run, compute, dtype, numbers is not None)
    return tf.function(run, jit_compile=True, autograph=False, input_signature=signature)


def _run(
    compute: Computation,
    dtype: tf.DType,
    has_seed: bool,
    values: Sequence[tf.Tensor],
    numbers: Sequence[tf.Tensor],
) -> tf.Tensor:
    return _rounded_result(compute, values, dtype, numbers if has_seed else None)


def _can_be_program() -> bool:
    """Return whether a program of its own can run here. XLA has no ops such as those that check numerics."""
    return not (within_xla() or ops_are_watched() or has_apple_gpu()) and _xla_works()


def _xla_works() -> bool:
    # Without eager execution, as in scripts for TF1's sessions, nothing can be tried.
    with tf.init_scope():
        return tf.executing_eagerly() and _xla_compiled()


@functools.cache
def _xla_compiled() -> bool:
    """Try XLA, which not every build of TensorFlow has, and return whether it compiled a program."""
    try:
        _program(operator.add, (tf.bfloat16, tf.float32), tf.bfloat16, None)([tf.zeros([], tf.bfloat16), 0.0], [])
    except tf.errors.OpError as error:
        _logger.warning("half-precision optimizer state is rounded without XLA, in more time, because of: %s", error)
        return False
    return True
