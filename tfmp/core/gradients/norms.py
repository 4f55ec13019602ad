"""Measures how large gradients are: L2 norms, and the largest magnitude."""

from collections.abc import Sequence

import tensorflow as tf

from tfmp.core.gradients import sums
from tfmp.core.gradients.arithmetic import added_up, values_of, widen
from tfmp.types import Gradients


def max_abs(grads: Gradients) -> tf.Tensor:
    """Return the largest magnitude among all values of gradients, in float32: 0 if there is none, NaN if one is NaN."""
    tops = [tf.reduce_max(tf.abs(tf.cast(values, tf.float32))) for values in values_of(grads)]
    return tf.reduce_max(tf.stack([tf.constant(0.0), *tops]))


def halves_of_square_sums(grads: Gradients) -> tf.Tensor:
    """Return halves of sums of squares in float64: of each large gradient, and of all small ones of a dtype together.

    The sums are computed in the gradients' dtypes (half precision in float32), so squares can overflow there. If a
    graph also contains `all_finite` of the same gradients, and these are many and not in half precision, this costs
    nothing more: the sums are the same, and TensorFlow computes them once.
    """
    return sums.each_half_of_square_sum(sums.joined(values_of(grads)))


def global_norm(grads: Gradients, halves: tf.Tensor | None = None, *, is_finite: tf.Tensor | None = None) -> tf.Tensor:
    """Return the L2 norm of all gradients together, in float64; infinite or NaN if a value is.

    Rows with the same index in an `IndexedSlices` count separately, as in `tf.linalg.global_norm`. `halves` is the
    result of `halves_of_square_sums(grads)`, if it is known already. The norm is correct even if squares overflow in
    float32, or are too small for it. If `is_finite` is False, it is known not to be finite, and not computed again.

    Examples:
        >>> float(global_norm([tf.constant([3.0]), tf.constant([4.0]), None]))
        5.0
        >>> [float(global_norm([tf.constant([2.0**power])])) == 2.0**power for power in (100, -100)]
        [True, True]
    """
    norm = tf.sqrt(2 * tf.reduce_sum(halves_of_square_sums(grads) if halves is None else halves))
    needs_look = tf.logical_or(tf.math.is_inf(norm), norm < _LEAST_BY_SQUARES)
    if is_finite is not None:
        needs_look = tf.logical_and(needs_look, is_finite)
    return sums.look_again(needs_look, lambda: _norm_by_largest(grads), norm)


#: A norm that was computed from squares in float32 is exact to float32's precision from here on. A square below 2**-126
#: is lost, but so many values that their lost squares matter do not fit into memory.
_LEAST_BY_SQUARES = 2.0**-33


def _norm_by_largest(grads: Gradients) -> tf.Tensor:
    """Return the L2 norm of all gradients together, computed from values that are divided by the largest one."""
    wide = sums.joined([widen(values) for values in values_of(grads)])
    largest = _largest(wide)
    shares = [_divided(values, largest) for values in wide]
    norm = largest * tf.sqrt(2 * tf.reduce_sum(sums.each_half_of_square_sum(shares)))
    return tf.where(tf.math.is_finite(largest), norm, largest)


def _largest(values: Sequence[tf.Tensor]) -> tf.Tensor:
    tops = [tf.cast(tf.reduce_max(tf.abs(each)), tf.float64) for each in values]
    return tf.reduce_max(tf.stack([tf.constant(0.0, tf.float64), *tops]))


def _divided(values: tf.Tensor, largest: tf.Tensor) -> tf.Tensor:
    # A float64 gradient can be so small that float32 has no number for it but 0.
    return tf.math.divide_no_nan(values, tf.cast(largest, values.dtype))


def norm_of_each(grads: Gradients) -> tf.Tensor:
    """Return the L2 norm of each of at least one gradient, computed as in `global_norm`; the norm of None is 0."""
    norms = tf.sqrt(2 * tf.stack([tf.reduce_sum(halves_of_square_sums([grad])) for grad in grads]))
    infinite = tf.math.is_inf(norms)

    def mend() -> tf.Tensor:
        return tf.where(infinite, tf.stack([_norm_by_largest([grad]) for grad in grads]), norms)

    return sums.look_again(tf.reduce_any(infinite), mend, norms)


def large_norm_of_each(grads: Gradients) -> tf.Tensor:
    """Return the L2 norm of each of at least one gradient, in float64; all values must be finite.

    What is far smaller than the largest value is rounded to 0. Rows with the same index are added up, as they are when
    they are applied. With many small gradients this takes fewer ops than `norm_of_each`.

    Examples:
        >>> large_norm_of_each([tf.constant([3.0, 4.0]), None, tf.constant([2.0])]).numpy().round(6).tolist()
        [5.0, 0.0, 2.0]
    """
    values = {index: widen(values_of([added_up(grad)])[0]) for index, grad in enumerate(grads) if grad is not None}
    small = {index: tf.cast(each, tf.float64) for index, each in values.items() if sums.is_small(each)}
    largest = _largest(sums.joined(list(values.values())))
    squares = {
        index: tf.cast(tf.reduce_sum(tf.square(_divided(each, largest))), tf.float64)
        for index, each in values.items()
        if index not in small
    }
    if small:
        of_small = sums.sum_of_each(tf.square(_divided(sums.end_to_end(list(small.values())), largest)), small.values())
        squares.update(zip(small, tf.unstack(of_small), strict=True))
    return largest * tf.sqrt(tf.stack([squares.get(index, tf.zeros([], tf.float64)) for index in range(len(grads))]))
