"""Measures gradients: whether all are finite, how large they are, and how many values have a property.

A check runs at every step, so each value is read once: sums of squares tell whether all values are finite, and give the
norm. Single values are looked at only where squares overflow, or are too small. Small tensors are read together.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import TypeAlias

import numpy as np
import tensorflow as tf

from tfmp.core.dtypes import HALF_TYPES
from tfmp.core.gradients.arithmetic import added_up, map_values, unscale, values_of, widen
from tfmp.core.tensorflow_internals import within_xla
from tfmp.core.tracing import computed_if, within_xla_for_cpu
from tfmp.types import Gradient, Gradients

_Elementwise: TypeAlias = Callable[[tf.Tensor], tf.Tensor]

#: Tensors with fewer values than this are concatenated, because the cost of an op dominates there.
_SMALL = 2**13

#: A norm that was computed from squares in float32 is exact to float32's precision from here on. A square below 2**-126
#: is lost, but so many values that their lost squares matter do not fit into memory.
_LEAST_BY_SQUARES = 2.0**-33


def all_finite(grads: Gradients, addends: int = 1, loss_scale: tf.Tensor | None = None) -> tf.Tensor:
    """Return whether no gradient contains an infinity or a NaN; a boolean scalar.

    With `addends` above 1 the answer also covers a later sum: it is True only if the sum of that many gradients, none
    of which is larger than these, is finite too; with a `loss_scale`, once they are divided by it. The rule reads each
    value once unless a sum of squares is infinite:

        any sum of squares is NaN         False
        any sum of squares is infinite    look at each value: in float32, squares overflow from 1.8e19
        otherwise                         True

    Values in half precision, and few values, are looked at one by one: that is as fast, or takes fewer ops.
    """
    values = list(_joined(values_of(grads)).values())
    summed = [] if _are_few(values) else [each for each in values if each.dtype not in HALF_TYPES]
    looked_at = [each for each in values if each.dtype in HALF_TYPES or not summed]
    flags = [
        *_each_finite(looked_at, addends, loss_scale),
        *([_finite_by_sums(summed, addends, loss_scale)] if summed else []),
    ]
    if not flags:
        return tf.constant(True)
    return tf.reduce_all(tf.stack(flags)) if len(flags) > 1 else flags[0]


def _finite_by_sums(values: Sequence[tf.Tensor], addends: int, loss_scale: tf.Tensor | None) -> tf.Tensor:
    halves = _halves_of_square_sums(values)
    are_infinite = tf.math.is_inf(halves)
    undecided = tf.logical_and(tf.reduce_any(are_infinite), tf.logical_not(tf.reduce_any(tf.math.is_nan(halves))))

    def look() -> tf.Tensor:
        looked_at = values if within_xla() else _rows_where(are_infinite, values)
        return tf.reduce_all(tf.stack(_each_finite(looked_at, addends, loss_scale)))

    # If all squares are finite, no value in float32 exceeds about 2e19, so the sum over replicas is finite as well.
    return computed_if(undecided, look, tf.reduce_all(tf.math.is_finite(halves)))


def _each_finite(values: Sequence[tf.Tensor], addends: int, loss_scale: tf.Tensor | None) -> list[tf.Tensor]:
    if addends == 1:
        return [tf.reduce_all(tf.math.is_finite(each)) for each in values]
    return [tf.reduce_all(tf.math.is_finite(each) & ~overflows_in_sum(each, addends, loss_scale)) for each in values]


def overflows_in_sum(values: tf.Tensor, addends: int, loss_scale: tf.Tensor | None = None) -> tf.Tensor:
    """Return, for each value, whether it is finite although its sum with equally large values could overflow.

    With a `loss_scale` the values are divided by it first, in float32 or float64.
    """
    if loss_scale is not None:
        [values] = unscale([values], loss_scale)
    # Not `is_inf(values * addends)`: XLA simplifies this to `is_inf(values)`, which is False for these values.
    return tf.logical_and(tf.math.is_finite(values), tf.abs(values) >= values.dtype.max / addends)


def are_suspect(grads: Gradients) -> tf.Tensor:
    """Return, for each large gradient that is not in half precision, whether its sum of squares is not finite."""
    return tf.logical_not(tf.math.is_finite(_halves_of_square_sums(list(filter(_is_summed, values_of(grads))))))


def only_suspects(grads: Gradients, flags: tf.Tensor) -> list[Gradient]:
    """Return the gradients without the values of those that `are_suspect` flagged False; they need not be read again.

    A large gradient becomes a matrix. Not for XLA, where shapes cannot depend on values.
    """
    rows = iter(_rows_where(flags, list(filter(_is_summed, values_of(grads)))))
    return [map_values(lambda values: next(rows) if _is_summed(values) else values, grad) for grad in grads]


def _is_summed(values: tf.Tensor) -> bool:
    return not _are_few([values]) and values.dtype not in HALF_TYPES


def _rows_where(flags: tf.Tensor, values: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """Return the rows of each tensor, or none of them where the flag is False; without copying them."""
    rows = list(map(_rows, values))
    if tf.executing_eagerly():
        # Python knows the flags already, and can save the ops that they decide about.
        return [each if flag else each[:0] for each, flag in zip(rows, flags.numpy(), strict=True)]
    # In the size of a slice, -1 stands for all that there are. `tf.slice` takes fewer ops than an index in brackets.
    sizes = tf.unstack(tf.stack([tf.where(flags, -1, 0), tf.fill([len(rows)], -1)], axis=1))
    begin = tf.constant([0, 0])
    return [tf.slice(each, begin, size) for each, size in zip(rows, sizes, strict=True)]


def global_norm(grads: Gradients, *, is_needed: tf.Tensor | None = None) -> tf.Tensor:
    """Return the L2 norm of all gradients together in float64; infinite or NaN if a value is.

    Rows with the same index in an `IndexedSlices` count separately, as in `tf.linalg.global_norm`. If `is_needed` is
    False, the norm is computed once, and may overflow or be too small.
    """
    values = values_of(grads)
    norm = tf.sqrt(2 * tf.reduce_sum(_halves_of_square_sums(_joined(values).values())))
    needs_look = tf.logical_or(tf.math.is_inf(norm), norm < _LEAST_BY_SQUARES)
    if is_needed is not None:
        needs_look = tf.logical_and(needs_look, is_needed)
    return computed_if(needs_look, lambda: _norm_by_largest(values), norm)


def norm_of_each(grads: Gradients) -> tf.Tensor:
    """Return the L2 norm of each of at least one gradient in float64; the norm of None is 0."""
    values = [tf.zeros([]) if grad is None else values_of([grad])[0] for grad in grads]
    norms = tf.sqrt(2 * _halves_of_square_sums(values))
    infinite = tf.math.is_inf(norms)

    def mend() -> tf.Tensor:
        return tf.where(infinite, tf.stack([_norm_by_largest([each]) for each in values]), norms)

    return computed_if(tf.reduce_any(infinite), mend, norms)


def large_norm_of_each(grads: Gradients) -> tf.Tensor:
    """Return the L2 norm of each of at least one gradient in float64; all values must be finite.

    What is far smaller than the largest value is rounded to 0. Rows with the same index are added up, as they are when
    they are applied. With many small gradients this takes fewer ops than `norm_of_each`.
    """
    wide = [map_values(widen, added_up(grad)) for grad in grads]
    largest = _largest(_joined(values_of(wide)).values())
    squares = sums_of_each(wide, [lambda values: tf.square(_divided(values, largest))], tf.float64)
    return largest * tf.sqrt(squares[:, 0])


def max_abs(grads: Gradients, loss_scale: tf.Tensor | None = None) -> tf.Tensor:
    """Return the largest magnitude among all values of gradients, in float32: 0 if there is none, NaN if one is NaN.

    With a `loss_scale` it is divided by it, in float64.
    """
    largest = _largest(map(widen, values_of(grads)))
    return tf.cast(largest if loss_scale is None else largest / tf.cast(loss_scale, tf.float64), tf.float32)


def sums_of_each(grads: Gradients, functions: Sequence[_Elementwise], dtype: tf.DType = tf.int64) -> tf.Tensor:
    """Sum what each elementwise function gives over each gradient; of a predicate, count where it is True.

    The result is a matrix in `dtype` with a row for each gradient, of zeros for None, and a column for each function.
    """

    def sums(rows: tf.Tensor) -> tf.Tensor:
        # Each row is summed in float32, which counts exactly up to 2**24 values in a row, and the sums of rows in
        # `dtype`. Casting all flags to int64 instead would take eight bytes for each flag.
        of_rows = [_sums_of_rows(tf.cast(function(rows), tf.float32), 1) for function in functions]
        return tf.stack([tf.reduce_sum(tf.cast(each, dtype)) for each in of_rows])

    of_each = [tf.zeros([len(functions)], dtype)] * len(grads)
    numbers = [number for number, grad in enumerate(grads) if grad is not None]
    values = values_of(grads)
    # To build a graph takes Python a quarter of a millisecond for each op. So the graph contains those of `sums` once
    # for each type of values, except in XLA, which needs to know the shapes.
    types = [] if tf.executing_eagerly() or within_xla() else {each.dtype for each in values}
    traced = {each: tf.function(sums, [tf.TensorSpec([None, None], each)], autograph=False) for each in types}
    for group, joined in _joined(values).items():
        if len(group) == 1:
            found = [traced.get(joined.dtype, sums)(_rows(joined))]
        else:
            sizes = [values[index].shape.num_elements() for index in group]
            parts = [_sums_of_parts(tf.cast(function(joined), dtype), sizes) for function in functions]
            found = tf.unstack(tf.stack(parts, axis=1))
        for index, row in zip(group, found, strict=True):
            of_each[numbers[index]] = row
    return tf.stack(of_each)


def _norm_by_largest(values: Sequence[tf.Tensor]) -> tf.Tensor:
    wide = _joined(list(map(widen, values))).values()
    largest = _largest(wide)
    norm = largest * tf.sqrt(2 * tf.reduce_sum(_halves_of_square_sums([_divided(each, largest) for each in wide])))
    return tf.where(tf.math.is_finite(largest), norm, largest)


def _largest(values: Iterable[tf.Tensor]) -> tf.Tensor:
    tops = [tf.cast(tf.reduce_max(tf.abs(each)), tf.float64) for each in values]
    return tf.reduce_max(tf.stack([tf.constant(0, tf.float64), *tops]))


def _divided(values: tf.Tensor, largest: tf.Tensor) -> tf.Tensor:
    # A float64 gradient can be so small that float32 has no number for it but 0.
    return tf.math.divide_no_nan(values, tf.cast(largest, values.dtype))


def _halves_of_square_sums(values: Iterable[tf.Tensor]) -> tf.Tensor:
    """Return half of the sum of squares of each tensor, in float64; half, because the fast `tf.nn.l2_loss` gives that.

    A sum is computed in the dtype of its tensor, or in float32 if that is in half precision.
    """
    wide = map(widen, values)
    if within_xla():
        halves = [tf.reduce_sum(_sums_of_rows(_rows(tf.square(each)), 0.5)) for each in wide]
    else:
        halves = [tf.nn.l2_loss(each) for each in wide]
    if len({each.dtype.name for each in halves}) > 1:
        halves = [tf.cast(each, tf.float64) for each in halves]
    return tf.cast(tf.stack(halves), tf.float64) if halves else tf.zeros([0], tf.float64)


def _sums_of_parts(vector: tf.Tensor, sizes: Sequence[int]) -> tf.Tensor:
    """Return the sums of the parts of a vector that have these sizes."""
    # Each sum is the difference of two running sums, so that a graph does not contain an op for each part.
    at_bounds = tf.gather(tf.pad(tf.cumsum(vector), [[1, 0]]), np.cumsum([0, *sizes]))
    return at_bounds[1:] - at_bounds[:-1]


def _sums_of_rows(matrix: tf.Tensor, weight: float) -> tf.Tensor:
    """Return the sum of each row of a matrix, whose values are multiplied by the weight before they are added."""
    if within_xla_for_cpu():
        # As a product of a matrix and a vector: on CPU, XLA (TensorFlow 2.15 to 2.21) multiplies matrices on all cores,
        # but computes `tf.reduce_sum` on one. The rows are long, so that few sums are left for `tf.reduce_sum`.
        return tf.linalg.matvec(matrix, tf.fill([matrix.shape[1]], tf.constant(weight, matrix.dtype)))
    # On a GPU a product could be rounded to TensorFloat-32, and it would not be fused with what computes the values.
    return tf.reduce_sum(matrix * tf.constant(weight, matrix.dtype), axis=1)


def _rows(values: tf.Tensor) -> tf.Tensor:
    """Return the values as a matrix with rows of a length that is known; without copying them."""
    length = 1
    for size in reversed(values.shape.as_list() if values.shape.rank else []):
        if size is None or length >= 256:
            break
        length *= size
    length = max(length, 1)
    is_matrix = values.shape.rank == 2 and values.shape[1] == length
    return values if is_matrix else tf.reshape(values, [-1, length])


def _joined(values: Sequence[tf.Tensor]) -> dict[tuple[int, ...], tf.Tensor]:
    """Return what is read together, by the numbers of its tensors: all small ones of a dtype, and each other one.

    Small tensors are concatenated into one vector, so that fewer ops are needed.
    """
    # The keys are strings, because a `tf.DType` equals a small integer and would be confused with a number.
    groups: dict[str, list[int]] = {}
    for index, each in enumerate(values):
        groups.setdefault(each.dtype.name if _are_few([each]) else str(index), []).append(index)
    joined = {}
    for group in groups.values():
        parts = [values[index] for index in group]
        if len(parts) > 1:
            parts = [tf.concat([each if each.shape.rank == 1 else tf.reshape(each, [-1]) for each in parts], axis=0)]
        joined[tuple(group)] = parts[0]
    return joined


def _are_few(values: Sequence[tf.Tensor]) -> bool:
    """Return whether tensors have so few values together that their number matters less than that of the ops."""
    sizes = [each.shape.num_elements() for each in values]
    return None not in sizes and sum(sizes) < _SMALL
