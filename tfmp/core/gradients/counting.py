"""Counts the values of each gradient for which a predicate holds, such as being infinite."""

import functools
from collections.abc import Callable, Sequence
from typing import TypeAlias

import tensorflow as tf

from tfmp.core.gradients import sums
from tfmp.core.gradients.arithmetic import values_of
from tfmp.core.tensorflow_internals import within_xla
from tfmp.types import Gradients

_Predicates: TypeAlias = Sequence[Callable[[tf.Tensor], tf.Tensor]]


def counts(grads: Gradients, predicates: _Predicates) -> tf.Tensor:
    """Count, in each gradient, the values for which each elementwise predicate is True; None has no values.

    The result is an int64 matrix with a row for each gradient and a column for each predicate.
    """
    # All small tensors of a dtype form one group, which is read together; each larger tensor forms a group of its own.
    # The keys are strings, because a `tf.DType` equals a small integer and would be confused with an index.
    groups: dict[str, dict[int, tf.Tensor]] = {}
    for index, grad in enumerate(grads):
        for values in values_of([grad]):
            groups.setdefault(values.dtype.name if sums.is_small(values) else str(index), {})[index] = values
    count_of = functools.cache(functools.partial(_count_of, predicates))
    counted = [tf.zeros([len(predicates)], tf.int64)] * len(grads)
    for group in groups.values():
        first, *others = group.values()
        of_each = _counts_of_each([first, *others], predicates) if others else [count_of(first.dtype)(sums.rows(first))]
        for index, row in zip(group, of_each, strict=True):
            counted[index] = row
    return tf.stack(counted)


def _count_of(predicates: _Predicates, dtype: tf.DType) -> Callable[[tf.Tensor], tf.Tensor]:
    """Return the function that counts in a matrix, which a graph then contains once for each dtype."""

    def count(rows: tf.Tensor) -> tf.Tensor:
        return tf.stack([_count(holds(rows)) for holds in predicates])

    # XLA needs to know the shapes.
    if tf.executing_eagerly() or within_xla():
        return count
    # To build a graph takes Python a quarter of a millisecond for each op.
    counted: Callable[[tf.Tensor], tf.Tensor] = tf.function(
        count, [tf.TensorSpec([None, None], dtype)], autograph=False
    )
    return counted


def _count(flags: tf.Tensor) -> tf.Tensor:
    # Each row is counted in float32, which is exact up to 2**24 values in a row, and the sums of rows in int64. Casting
    # all flags to int64 instead would take eight bytes for each flag.
    return tf.reduce_sum(tf.cast(sums.sums_of_rows(tf.cast(flags, tf.float32), 1), tf.int64))


def _counts_of_each(values: Sequence[tf.Tensor], predicates: _Predicates) -> list[tf.Tensor]:
    joined = sums.end_to_end(values)
    counted = [sums.sum_of_each(tf.cast(holds(joined), tf.int64), values) for holds in predicates]
    return tf.unstack(tf.stack(counted, axis=1))
