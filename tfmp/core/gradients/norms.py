"""Measures how large gradients are: L2 norms, and the largest magnitude.

Norms are in float64. They come from sums of squares in the gradients' types (half precision in float32). Where squares
overflow or are too small for that, the values are divided by the largest one first.
"""

from collections.abc import Sequence

import tensorflow as tf

from tfmp.core.gradients import sums
from tfmp.core.gradients.arithmetic import added_up, values_of, widen
from tfmp.types import Gradients


def max_abs(grads: Gradients) -> tf.Tensor:
    """Return the largest magnitude among all values of gradients, in float32: 0 if there is none, NaN if one is NaN."""
    return _largest([tf.cast(values, tf.float32) for values in values_of(grads)], tf.float32)


def _largest(values: Sequence[tf.Tensor], dtype: tf.DType = tf.float64) -> tf.Tensor:
    tops = [tf.cast(tf.reduce_max(tf.abs(each)), dtype) for each in values]
    return tf.reduce_max(tf.stack([tf.constant(0, dtype), *tops]))


def halves_of_square_sums(grads: Gradients) -> tf.Tensor:
    """Return halves of sums of squares in float64: of each large gradient, and of all small ones of a dtype together.

    If a graph also contains `all_finite` of the same gradients, and these are many and not in half precision, the sums
    are the same, and TensorFlow computes them once.
    """
    return sums.each_half_of_square_sum(sums.joined(values_of(grads)))


#: A norm that was computed from squares in float32 is exact to float32's precision from here on. A square below 2**-126
#: is lost, but so many values that their lost squares matter do not fit into memory.
_LEAST_BY_SQUARES = 2.0**-33


def global_norm(grads: Gradients, halves: tf.Tensor | None = None, *, is_finite: tf.Tensor | None = None) -> tf.Tensor:
    """Return the L2 norm of all gradients together; infinite or NaN if a value is.

    Rows with the same index in an `IndexedSlices` count separately, as in `tf.linalg.global_norm`. `halves` is the
    result of `halves_of_square_sums(grads)`, if it is known already. If `is_finite` is False, the norm is known not to
    be finite, and not computed again.
    """
    norm = tf.sqrt(2 * tf.reduce_sum(halves_of_square_sums(grads) if halves is None else halves))
    needs_look = tf.logical_or(tf.math.is_inf(norm), norm < _LEAST_BY_SQUARES)
    if is_finite is not None:
        needs_look = tf.logical_and(needs_look, is_finite)
    return sums.look_again(needs_look, lambda: _norm_by_largest(grads), norm)


def norm_of_each(grads: Gradients) -> tf.Tensor:
    """Return the L2 norm of each of at least one gradient; the norm of None is 0."""
    norms = tf.sqrt(2 * tf.stack([tf.reduce_sum(halves_of_square_sums([grad])) for grad in grads]))
    infinite = tf.math.is_inf(norms)

    def mend() -> tf.Tensor:
        return tf.where(infinite, tf.stack([_norm_by_largest([grad]) for grad in grads]), norms)

    return sums.look_again(tf.reduce_any(infinite), mend, norms)


def _norm_by_largest(grads: Gradients) -> tf.Tensor:
    wide = sums.joined([widen(values) for values in values_of(grads)])
    largest = _largest(wide)
    halves = sums.each_half_of_square_sum([_divided(each, largest) for each in wide])
    norm = largest * tf.sqrt(2 * tf.reduce_sum(halves))
    return tf.where(tf.math.is_finite(largest), norm, largest)


def _divided(values: tf.Tensor, largest: tf.Tensor) -> tf.Tensor:
    # A float64 gradient can be so small that float32 has no number for it but 0.
    return tf.math.divide_no_nan(values, tf.cast(largest, values.dtype))


def large_norm_of_each(grads: Gradients) -> tf.Tensor:
    """Return the L2 norm of each of at least one gradient; all values must be finite.

    What is far smaller than the largest value is rounded to 0. Rows with the same index are added up, as they are when
    they are applied. With many small gradients this takes fewer ops than `norm_of_each`.
    """
    values = {index: widen(values_of([added_up(grad)])[0]) for index, grad in enumerate(grads) if grad is not None}
    largest = _largest(sums.joined(list(values.values())))
    squares = [tf.zeros([], tf.float64)] * len(grads)
    small = {index: tf.cast(each, tf.float64) for index, each in values.items() if sums.is_small(each)}
    if small:
        shares = tf.square(_divided(sums.end_to_end(list(small.values())), largest))
        for index, square in zip(small, tf.unstack(sums.sum_of_each(shares, small.values())), strict=True):
            squares[index] = square
    for index, each in values.items():
        if index not in small:
            squares[index] = tf.cast(tf.reduce_sum(tf.square(_divided(each, largest))), tf.float64)
    return largest * tf.sqrt(tf.stack(squares))
