"""Reduces all gradients to a few numbers: whether they are finite, the largest magnitude, norms, counts.

The check for infinities and NaN runs at every step, so it should read each value only once. It therefore computes sums
of squares first, which the norm needs as well, and looks at single values only if those sums overflow.
"""

from collections.abc import Callable, Sequence

import numpy as np
import tensorflow as tf

from tfmp.core.gradients.arithmetic import HALF_TYPES, map_values, values_of, widen
from tfmp.core.tracing import place_of_ops, within_xla
from tfmp.types import Gradient, Gradients

#: Tensors with fewer values than this are concatenated and read together, because the cost of an op dominates there.
_SMALL = 2**13
_HALF_SQUARE = "_tfmp_half_square"


def all_finite(grads: Gradients, addends: int = 1) -> tf.Tensor:
    """Return whether no gradient contains an infinity or a NaN; a boolean scalar.

    With `addends` above 1 the answer also covers a later sum: it is True only if the sum of that many gradients, none
    of which is larger than these, is finite too.

    The rule reads each value once unless a sum of squares is infinite:

        any sum of squares is NaN         False
        any sum of squares is infinite    look at each value: in float32, squares overflow from 1.8e19
        otherwise                         True

    Half-precision values are always looked at one by one, which is equally fast.

    Examples:
        >>> bool(all_finite([tf.constant([1.0, float("inf")]), None]))
        False
        >>> bool(all_finite([tf.constant(3e38)])), bool(all_finite([tf.constant(3e38)], addends=2))
        (True, False)
    """
    values = _joined(values_of(grads))
    summed = [each for each in values if each.dtype not in HALF_TYPES]
    if not summed:
        return _each_finite(values, addends)
    looked_at = [each for each in values if each.dtype in HALF_TYPES]
    return tf.logical_and(_each_finite(looked_at, addends), _squares_finite(summed, addends))


def max_abs(grads: Gradients) -> tf.Tensor:
    """Return the largest magnitude among all values of gradients, in float32: 0 if there is none, NaN if one is NaN."""
    tops = [tf.reduce_max(tf.abs(tf.cast(values, tf.float32))) for values in values_of(grads)]
    return tf.reduce_max(tf.stack([tf.constant(0.0), *tops]))


def counts(grads: Gradients, predicates: Sequence[Callable[[tf.Tensor], tf.Tensor]]) -> tf.Tensor:
    """Count, in each gradient, the values for which each elementwise predicate is True.

    The result is an int64 matrix with a row for each gradient and a column for each predicate; a gradient of None has
    no values.
    """
    # All small tensors of a dtype form one group, which is read together; each larger tensor forms a group of its own.
    # The keys are strings, because a `tf.DType` equals a small integer and would be confused with an index.
    groups: dict[str, dict[int, tf.Tensor]] = {}
    for index, grad in enumerate(grads):
        for values in values_of([grad]):
            groups.setdefault(values.dtype.name if _is_small(values) else str(index), {})[index] = values
    count = _TracedOnce(lambda rows: tf.stack([_count(holds(rows)) for holds in predicates]))
    counted = [tf.zeros([len(predicates)], tf.int64)] * len(grads)
    for group in groups.values():
        values = list(group.values())
        of_each = [count(_rows(values[0]))] if len(values) == 1 else _counts_of_each(values, predicates)
        for index, row in zip(group, of_each, strict=True):
            counted[index] = row
    return tf.stack(counted)


def large_squares(grads: Gradients) -> tf.Tensor:
    """Return, in float64, half of the sum of squares of each gradient that is large and not in half precision.

    `suspects` needs them: if an element is finite, all values of that gradient are finite. If a graph also contains
    `all_finite` of the same gradients, this costs nothing more: the sums are the same.
    """
    return _half_squares([each for each in values_of(grads) if _has_square(each)])


def suspects(grads: Gradients, squares: tf.Tensor) -> list[Gradient]:
    """Return the gradients, the large ones as matrices: without rows where the element of `squares` is finite.

    Their values are then known to be finite, and need not be read again. The other matrices share the memory of the
    gradients. Not for XLA, where shapes cannot depend on values.

    Examples:
        >>> finite, infinite = tf.ones([100, 1000]), tf.fill([100, 1000], float("inf"))
        >>> found = suspects([finite, infinite], large_squares([finite, infinite]))
        >>> [each.shape.as_list() for each in found]
        [[0, 1000], [100, 1000]]
    """
    large = [values for values in values_of(grads) if _has_square(values)]
    rows = iter(_rows_where(tf.logical_not(tf.math.is_finite(squares)), large))
    return [map_values(lambda values: next(rows) if _has_square(values) else values, grad) for grad in grads]


def _has_square(values: tf.Tensor) -> bool:
    return not _is_small(values) and values.dtype not in HALF_TYPES


def _rows_where(flags: tf.Tensor, values: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """Return the rows of each tensor, or none of them where the flag is False; without copying them."""
    rows = list(map(_rows, values))
    if tf.executing_eagerly():
        # Python knows the flags already, and can save the ops that they decide about.
        return [each if flag else each[:0] for each, flag in zip(rows, flags.numpy(), strict=True)]
    # In the size of a slice, -1 stands for all that there are. `tf.slice` takes fewer ops than an index in brackets.
    heights = tf.where(flags, -1, 0)
    sizes = tf.unstack(tf.stack([heights, tf.fill([len(rows)], -1)], axis=1))
    begin = tf.constant([0, 0])
    return [tf.slice(each, begin, size) for each, size in zip(rows, sizes, strict=True)]


def overflows_in_sum(values: tf.Tensor, addends: int) -> tf.Tensor:
    """Return, for each value, whether it is finite although its sum with equally large values could overflow."""
    # Not `is_inf(values * addends)`: XLA simplifies this to `is_inf(values)`, which is False for these values.
    return tf.logical_and(tf.math.is_finite(values), tf.abs(values) >= values.dtype.max / addends)


def half_squares(grads: Gradients) -> tf.Tensor:
    """Return halves of sums of squares in float64: of each large gradient, and of all small ones of a dtype together.

    The sums are computed in the gradients' dtypes (half precision in float32), so squares can overflow there. If a
    graph also contains `all_finite` of the same gradients, and none of them is in half precision, this costs nothing
    more: the sums are the same, and TensorFlow computes them once.
    """
    return _half_squares(_joined([widen(each) for each in values_of(grads)]))


def global_norm(grads: Gradients, squares: tf.Tensor | None = None) -> tf.Tensor:
    """Return the L2 norm of all gradients together, in float64; infinite or NaN if a value is.

    Rows with the same index in an `IndexedSlices` count separately, as in `tf.linalg.global_norm`. `squares` is the
    result of `half_squares(grads)`, if it is known already. The norm is correct even if squares overflow in float32.

    Examples:
        >>> float(global_norm([tf.constant([3.0]), tf.constant([4.0]), None]))
        5.0
        >>> float(global_norm([tf.constant([2.0**100])])) == 2.0**100
        True
    """

    def norm_of(squares: tf.Tensor) -> tf.Tensor:
        return tf.sqrt(2 * tf.reduce_sum(squares))

    norm = norm_of(half_squares(grads) if squares is None else squares)
    return _mended(norm, grads, lambda grads: norm_of(half_squares(grads)))


def norms(grads: Gradients) -> tf.Tensor:
    """Return the L2 norm of each of at least one gradient, computed as in `global_norm`; the norm of None is 0."""

    def norms_of(grads: Gradients) -> tf.Tensor:
        squares = [tf.reduce_sum(_half_squares([widen(each) for each in values_of([grad])])) for grad in grads]
        return tf.sqrt(2 * tf.stack(squares))

    return _mended(norms_of(grads), grads, norms_of)


def _mended(norms: tf.Tensor, grads: Gradients, norms_of: Callable[[Gradients], tf.Tensor]) -> tf.Tensor:
    """Return the norms, with those that are infinite computed again from smaller values, whose squares are finite."""
    infinite = tf.math.is_inf(norms)

    def mend() -> tf.Tensor:
        smaller = [map_values(lambda values: widen(values) * 2.0**-80, grad) for grad in grads]
        # The other norms are kept: multiplied by 2**-80, small gradients have squares that are 0 in float32.
        return tf.where(infinite, norms_of(smaller) * 2.0**80, norms)

    return _look_again(tf.reduce_any(infinite), mend, norms)


def _joined(values: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """Return the tensors with all small ones of a dtype concatenated into one, so that fewer ops are needed."""
    small = [each for each in values if _is_small(each)]
    types = dict.fromkeys(each.dtype for each in small)
    joined = [_end_to_end([each for each in small if each.dtype == dtype]) for dtype in types]
    return [*(each for each in values if not _is_small(each)), *joined]


def _is_small(values: tf.Tensor) -> bool:
    size = values.shape.num_elements()
    return size is not None and size < _SMALL


def _end_to_end(values: Sequence[tf.Tensor]) -> tf.Tensor:
    return tf.concat([each if each.shape.rank == 1 else tf.reshape(each, [-1]) for each in values], axis=0)


class _TracedOnce:
    """A function of a matrix, which a graph contains once for each dtype, and not once for each call.

    To build a graph takes Python a quarter of a millisecond for each op.
    """

    def __init__(self, function: Callable[[tf.Tensor], tf.Tensor]) -> None:
        self._function = function
        self._of_types: dict[str, Callable[[tf.Tensor], tf.Tensor]] = {}

    def __call__(self, matrix: tf.Tensor) -> tf.Tensor:
        # XLA needs to know the shapes.
        if tf.executing_eagerly() or within_xla():
            return self._function(matrix)
        if matrix.dtype.name not in self._of_types:
            signature = [tf.TensorSpec([None, None], matrix.dtype)]
            self._of_types[matrix.dtype.name] = tf.function(self._function, signature, autograph=False)
        return self._of_types[matrix.dtype.name](matrix)


def _counts_of_each(
    values: Sequence[tf.Tensor], predicates: Sequence[Callable[[tf.Tensor], tf.Tensor]]
) -> list[tf.Tensor]:
    # The count in each tensor is the difference of two running counts, so that each predicate runs only once.
    bounds = np.cumsum([0, *(each.shape.num_elements() for each in values)])
    joined = _end_to_end(values)
    before = [tf.pad(tf.cumsum(tf.cast(holds(joined), tf.int64)), [[1, 0]]) for holds in predicates]
    at_bounds = tf.gather(tf.stack(before, axis=1), bounds)
    return tf.unstack(at_bounds[1:] - at_bounds[:-1])


def _count(flags: tf.Tensor) -> tf.Tensor:
    # Each row is counted in float32, which is exact up to 2**24 values in a row, and the sums of rows in int64. Casting
    # all flags to int64 instead would take eight bytes for each flag.
    return tf.reduce_sum(tf.cast(_sums_of_rows(tf.cast(flags, tf.float32), 1), tf.int64))


def _squares_finite(values: Sequence[tf.Tensor], addends: int) -> tf.Tensor:
    squares = _half_squares(values)
    finite = tf.reduce_all(tf.math.is_finite(squares))
    infinite = tf.reduce_any(tf.math.is_inf(squares))
    undecided = tf.logical_and(infinite, tf.logical_not(tf.reduce_any(tf.math.is_nan(squares))))

    def look() -> tf.Tensor:
        if within_xla():
            return _small_sums_finite(values) if addends == 1 else _each_finite(values, addends)
        return _each_finite(_rows_where(tf.math.is_inf(squares), values), addends)

    # If all squares are finite, no value in float32 exceeds about 2e19, so the sum over replicas is finite as well.
    return _look_again(undecided, look, finite)


def _look_again(needed: tf.Tensor, look: Callable[[], tf.Tensor], seen: tf.Tensor) -> tf.Tensor:
    """Return `look()` if `needed` is True. Otherwise return `seen`, without computing `look()`."""
    if not within_xla():
        # Not with the default name, `cond`: TensorFlow numbers the scopes of that name, and these numbers are part of
        # checkpoint keys in scripts that used tf.contrib.
        return tf.cond(needed, look, lambda: seen, name="look_again")
    # Under XLA a conditional would copy the gradients that it captures. A loop of at most one iteration does not.
    looked, _ = tf.while_loop(lambda _, again: again, lambda *_: (look(), tf.constant(False)), [seen, needed])
    return looked


def _half_squares(values: Sequence[tf.Tensor]) -> tf.Tensor:
    """Return half of the sum of squares of each tensor; half, because the fast kernel `tf.nn.l2_loss` computes that."""
    sums = [_half_square(each) for each in values]
    if len({each.dtype.name for each in sums}) > 1:
        sums = [tf.cast(each, tf.float64) for each in sums]
    return tf.cast(tf.stack(sums), tf.float64) if sums else tf.zeros([0], tf.float64)


def _half_square(values: tf.Tensor) -> tf.Tensor:
    # The check, the norm and the counts of a step need the same sum. The tensor remembers it, for the place where it
    # was computed.
    here = place_of_ops()
    place, half_square = getattr(values, _HALF_SQUARE, (None, None))
    if place != here:
        half_square = _weighted_sum(tf.square(values), 0.5) if within_xla() else tf.nn.l2_loss(values)
        # A value from eager code may outlive the graph, and would keep it.
        if tf.executing_eagerly() or tf.is_symbolic_tensor(values):
            setattr(values, _HALF_SQUARE, (here, half_square))
    return half_square


def _small_sums_finite(values: Sequence[tf.Tensor]) -> tf.Tensor:
    # Values times 2**-64 are so small that their sum is finite if all of them are. An infinity or a NaN stays visible.
    return _all([tf.math.is_finite(_weighted_sum(each, 2.0**-64)) for each in values])


def _weighted_sum(values: tf.Tensor, weight: float) -> tf.Tensor:
    return tf.reduce_sum(_sums_of_rows(_rows(values), weight))


def _sums_of_rows(rows: tf.Tensor, weight: float) -> tf.Tensor:
    if within_xla() and not _has_accelerator():
        # As a product of a matrix and a vector: on CPU, XLA (TensorFlow 2.15 to 2.21) multiplies matrices on all cores,
        # but computes `tf.reduce_sum` on one. The rows are long, so that few sums are left for `tf.reduce_sum`.
        return tf.linalg.matvec(rows, tf.fill([rows.shape[1]], tf.constant(weight, rows.dtype)))
    # On a GPU a product could be rounded to TensorFloat-32, and it would not be fused with what computes the values.
    return tf.reduce_sum(rows * tf.constant(weight, rows.dtype), axis=1)


def _has_accelerator() -> bool:
    # Where a program will run is not known while it is traced, but it can only be a device that is there.
    return any(device.device_type != "CPU" for device in tf.config.list_logical_devices())


def _rows(values: tf.Tensor) -> tf.Tensor:
    """Return the values as a matrix with rows of a length that is known; without copying them."""
    length = _length_of_rows(values.shape)
    is_matrix = values.shape.rank == 2 and values.shape[1] == length
    return values if is_matrix else tf.reshape(values, [-1, length])


def _length_of_rows(shape: tf.TensorShape) -> int:
    length = 1
    for size in reversed(shape.as_list() if shape.rank else []):
        if size is None or length >= 256:
            break
        length *= size
    return max(length, 1)


def _each_finite(values: Sequence[tf.Tensor], addends: int) -> tf.Tensor:
    def stays_finite(values: tf.Tensor) -> tf.Tensor:
        finite = tf.math.is_finite(values)
        return finite if addends == 1 else tf.logical_and(finite, tf.logical_not(overflows_in_sum(values, addends)))

    return _all([tf.reduce_all(stays_finite(each)) for each in values])


def _all(flags: Sequence[tf.Tensor]) -> tf.Tensor:
    return tf.reduce_all(tf.stack(flags)) if flags else tf.constant(True)
