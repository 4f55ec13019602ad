"""Tells whether gradients are finite, and which of them need not be read to find the values that are not.

The check runs at every step, so it reads each value once: it computes sums of squares, which the norm needs as well,
and looks at single values only if those sums overflow.
"""

from collections.abc import Sequence

import tensorflow as tf

from tfmp.core.dtypes import HALF_TYPES
from tfmp.core.gradients import sums
from tfmp.core.gradients.arithmetic import map_values, values_of
from tfmp.core.tensorflow_internals import within_xla
from tfmp.types import Gradient, Gradients


def all_finite(grads: Gradients, addends: int = 1) -> tf.Tensor:
    """Return whether no gradient contains an infinity or a NaN; a boolean scalar.

    With `addends` above 1 the answer also covers a later sum: it is True only if the sum of that many gradients, none
    of which is larger than these, is finite too. The rule reads each value once unless a sum of squares is infinite:

        any sum of squares is NaN         False
        any sum of squares is infinite    look at each value: in float32, squares overflow from 1.8e19
        otherwise                         True

    Values in half precision are looked at one by one, which is equally fast, and so are few values, which takes fewer
    ops.
    """
    values = sums.joined(values_of(grads))
    summed = [each for each in values if each.dtype not in HALF_TYPES]
    if not summed or sums.are_few(values):
        return _each_finite(values, addends)
    looked_at = [each for each in values if each.dtype in HALF_TYPES]
    if not looked_at:
        return _finite_by_sums(summed, addends)
    return tf.logical_and(_each_finite(looked_at, addends), _finite_by_sums(summed, addends))


def _finite_by_sums(values: Sequence[tf.Tensor], addends: int) -> tf.Tensor:
    halves = sums.each_half_of_square_sum(values)
    finite = tf.reduce_all(tf.math.is_finite(halves))
    infinite = tf.reduce_any(tf.math.is_inf(halves))
    undecided = tf.logical_and(infinite, tf.logical_not(tf.reduce_any(tf.math.is_nan(halves))))

    def look() -> tf.Tensor:
        return _each_finite(values if within_xla() else _rows_where(tf.math.is_inf(halves), values), addends)

    # If all squares are finite, no value in float32 exceeds about 2e19, so the sum over replicas is finite as well.
    return sums.look_again(undecided, look, finite)


def _each_finite(values: Sequence[tf.Tensor], addends: int) -> tf.Tensor:
    def stays_finite(values: tf.Tensor) -> tf.Tensor:
        finite = tf.math.is_finite(values)
        return finite if addends == 1 else tf.logical_and(finite, tf.logical_not(overflows_in_sum(values, addends)))

    flags = [tf.reduce_all(stays_finite(each)) for each in values]
    if len(flags) == 1:
        return flags[0]
    return tf.reduce_all(tf.stack(flags)) if flags else tf.constant(True)


def overflows_in_sum(values: tf.Tensor, addends: int) -> tf.Tensor:
    """Return, for each value, whether it is finite although its sum with equally large values could overflow."""
    # Not `is_inf(values * addends)`: XLA simplifies this to `is_inf(values)`, which is False for these values.
    return tf.logical_and(tf.math.is_finite(values), tf.abs(values) >= values.dtype.max / addends)


def suspects(grads: Gradients) -> list[Gradient]:
    """Return the gradients without the values that sums of squares show to be finite, which need not be read again.

    A large gradient that is not in half precision becomes a matrix, without rows if its sum of squares is finite. If a
    graph also contains `all_finite` of the same gradients, the sums are the same, and TensorFlow computes them once.
    Not for XLA, where shapes cannot depend on values.
    """

    def is_summed(values: tf.Tensor) -> bool:
        return not sums.is_small(values) and values.dtype not in HALF_TYPES

    summed = list(filter(is_summed, values_of(grads)))
    rows = iter(_rows_where(tf.logical_not(tf.math.is_finite(sums.each_half_of_square_sum(summed))), summed))
    return [map_values(lambda values: next(rows) if is_summed(values) else values, grad) for grad in grads]


def _rows_where(flags: tf.Tensor, values: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """Return the rows of each tensor, or none of them where the flag is False; without copying them."""
    rows = list(map(sums.rows, values))
    if tf.executing_eagerly():
        # Python knows the flags already, and can save the ops that they decide about.
        return [each if flag else each[:0] for each, flag in zip(rows, flags.numpy(), strict=True)]
    # In the size of a slice, -1 stands for all that there are. `tf.slice` takes fewer ops than an index in brackets.
    heights = tf.where(flags, -1, 0)
    sizes = tf.unstack(tf.stack([heights, tf.fill([len(rows)], -1)], axis=1))
    begin = tf.constant([0, 0])
    return [tf.slice(each, begin, size) for each, size in zip(rows, sizes, strict=True)]
