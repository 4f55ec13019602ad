"""Counts the values of each gradient for which a predicate holds, such as being infinite."""

from collections.abc import Callable, Sequence

import tensorflow as tf

from tfmp.core.gradients import sums
from tfmp.core.gradients.arithmetic import values_of
from tfmp.core.tensorflow_internals import within_xla
from tfmp.types import Gradients


def counts(grads: Gradients, predicates: Sequence[Callable[[tf.Tensor], tf.Tensor]]) -> tf.Tensor:
    """Count, in each gradient, the values for which each elementwise predicate is True.

    The result is an int64 matrix with a row for each gradient and a column for each predicate; a gradient of None has
    no values.

    Examples:
        >>> counts([tf.constant([1.0, -2.0]), None], [lambda values: values > 0, lambda values: values < 3])
        <tf.Tensor: shape=(2, 2), dtype=int64, numpy=
        array([[1, 2],
               [0, 0]])>
    """
    # All small tensors of a dtype form one group, which is read together; each larger tensor forms a group of its own.
    # The keys are strings, because a `tf.DType` equals a small integer and would be confused with an index.
    groups: dict[str, dict[int, tf.Tensor]] = {}
    for index, grad in enumerate(grads):
        for values in values_of([grad]):
            groups.setdefault(values.dtype.name if sums.is_small(values) else str(index), {})[index] = values
    count = _TracedOnce(lambda rows: tf.stack([_count(holds(rows)) for holds in predicates]))
    counted = [tf.zeros([len(predicates)], tf.int64)] * len(grads)
    for group in groups.values():
        values = list(group.values())
        of_each = [count(sums.rows(values[0]))] if len(values) == 1 else _counts_of_each(values, predicates)
        for index, row in zip(group, of_each, strict=True):
            counted[index] = row
    return tf.stack(counted)


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
    joined = sums.end_to_end(values)
    counted = [sums.sum_of_each(tf.cast(holds(joined), tf.int64), values) for holds in predicates]
    return tf.unstack(tf.stack(counted, axis=1))


def _count(flags: tf.Tensor) -> tf.Tensor:
    # Each row is counted in float32, which is exact up to 2**24 values in a row, and the sums of rows in int64. Casting
    # all flags to int64 instead would take eight bytes for each flag.
    return tf.reduce_sum(tf.cast(sums.sums_of_rows(tf.cast(flags, tf.float32), 1), tf.int64))
