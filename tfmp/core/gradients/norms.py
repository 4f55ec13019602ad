"""Measures how large gradients are: L2 norms, and the largest magnitude."""

from collections.abc import Callable

import tensorflow as tf

from tfmp.core.gradients import sums
from tfmp.core.gradients.arithmetic import map_values, values_of, widen
from tfmp.types import Gradients


def max_abs(grads: Gradients) -> tf.Tensor:
    """Return the largest magnitude among all values of gradients, in float32: 0 if there is none, NaN if one is NaN."""
    tops = [tf.reduce_max(tf.abs(tf.cast(values, tf.float32))) for values in values_of(grads)]
    return tf.reduce_max(tf.stack([tf.constant(0.0), *tops]))


def halves_of_square_sums(grads: Gradients) -> tf.Tensor:
    """Return halves of sums of squares in float64: of each large gradient, and of all small ones of a dtype together.

    The sums are computed in the gradients' dtypes (half precision in float32), so squares can overflow there. If a
    graph also contains `all_finite` of the same gradients, and none of them is in half precision, this costs nothing
    more: the sums are the same, and TensorFlow computes them once.
    """
    return sums.each_half_of_square_sum(sums.joined([widen(each) for each in values_of(grads)]))


def global_norm(grads: Gradients, halves: tf.Tensor | None = None) -> tf.Tensor:
    """Return the L2 norm of all gradients together, in float64; infinite or NaN if a value is.

    Rows with the same index in an `IndexedSlices` count separately, as in `tf.linalg.global_norm`. `halves` is the
    result of `halves_of_square_sums(grads)`, if it is known already. The norm is correct even if squares overflow in
    float32.

    Examples:
        >>> float(global_norm([tf.constant([3.0]), tf.constant([4.0]), None]))
        5.0
        >>> float(global_norm([tf.constant([2.0**100])])) == 2.0**100
        True
    """

    def norm_of(halves: tf.Tensor) -> tf.Tensor:
        return tf.sqrt(2 * tf.reduce_sum(halves))

    norm = norm_of(halves_of_square_sums(grads) if halves is None else halves)
    return _mended(norm, grads, lambda grads: norm_of(halves_of_square_sums(grads)))


def norm_of_each(grads: Gradients) -> tf.Tensor:
    """Return the L2 norm of each of at least one gradient, computed as in `global_norm`; the norm of None is 0."""

    def norms_of(grads: Gradients) -> tf.Tensor:
        wide = ([widen(each) for each in values_of([grad])] for grad in grads)
        return tf.sqrt(2 * tf.stack([tf.reduce_sum(sums.each_half_of_square_sum(values)) for values in wide]))

    return _mended(norms_of(grads), grads, norms_of)


def _mended(norms: tf.Tensor, grads: Gradients, norms_of: Callable[[Gradients], tf.Tensor]) -> tf.Tensor:
    """Return the norms, with those that are infinite computed again from smaller values, whose squares are finite."""
    infinite = tf.math.is_inf(norms)

    def mend() -> tf.Tensor:
        smaller = [map_values(lambda values: widen(values) * 2.0**-80, grad) for grad in grads]
        # The other norms are kept: multiplied by 2**-80, small gradients have squares that are 0 in float32.
        return tf.where(infinite, norms_of(smaller) * 2.0**80, norms)

    return sums.look_again(tf.reduce_any(infinite), mend, norms)
