"""Sums the values of tensors, reading each once; looks at single values only where a sum tells too little."""

from collections.abc import Callable, Iterable, Sequence

import numpy as np
import tensorflow as tf

from tfmp.core.gradients.arithmetic import widen
from tfmp.core.tensorflow_internals import within_xla
from tfmp.core.tracing import within_xla_for_cpu

#: Tensors with fewer values than this are concatenated and read together, because the cost of an op dominates there.
_SMALL = 2**13


def each_half_of_square_sum(values: Sequence[tf.Tensor]) -> tf.Tensor:
    """Return half of the sum of squares of each tensor, in float64.

    Half, because the fast kernel `tf.nn.l2_loss` computes that. A sum is computed in the dtype of its tensor, or in
    float32 if that is in half precision. If a graph contains it several times, TensorFlow computes it once.
    """
    halves = [_half_of_square_sum(widen(each)) for each in values]
    if len({each.dtype.name for each in halves}) > 1:
        halves = [tf.cast(each, tf.float64) for each in halves]
    return tf.cast(tf.stack(halves), tf.float64) if halves else tf.zeros([0], tf.float64)


def _half_of_square_sum(wide: tf.Tensor) -> tf.Tensor:
    return tf.reduce_sum(sums_of_rows(rows(tf.square(wide)), 0.5)) if within_xla() else tf.nn.l2_loss(wide)


def sums_of_rows(matrix: tf.Tensor, weight: float) -> tf.Tensor:
    """Return the sum of each row of a matrix, whose values are multiplied by the weight before they are added."""
    if within_xla_for_cpu():
        # As a product of a matrix and a vector: on CPU, XLA (TensorFlow 2.15 to 2.21) multiplies matrices on all cores,
        # but computes `tf.reduce_sum` on one. The rows are long, so that few sums are left for `tf.reduce_sum`.
        return tf.linalg.matvec(matrix, tf.fill([matrix.shape[1]], tf.constant(weight, matrix.dtype)))
    # On a GPU a product could be rounded to TensorFloat-32, and it would not be fused with what computes the values.
    return tf.reduce_sum(matrix * tf.constant(weight, matrix.dtype), axis=1)


def rows(values: tf.Tensor) -> tf.Tensor:
    """Return the values as a matrix with rows of a length that is known; without copying them."""
    length = 1
    for size in reversed(values.shape.as_list() if values.shape.rank else []):
        if size is None or length >= 256:
            break
        length *= size
    length = max(length, 1)
    is_matrix = values.shape.rank == 2 and values.shape[1] == length
    return values if is_matrix else tf.reshape(values, [-1, length])


def joined(values: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """Return the tensors with all small ones of a dtype concatenated into one, so that fewer ops are needed."""
    small = [each for each in values if is_small(each)]
    types = dict.fromkeys(each.dtype for each in small)
    of_types = [end_to_end([each for each in small if each.dtype == dtype]) for dtype in types]
    return [*(each for each in values if not is_small(each)), *of_types]


def is_small(values: tf.Tensor) -> bool:
    """Return whether a tensor has so few values that it is read together with others."""
    return are_few([values])


def are_few(values: Sequence[tf.Tensor]) -> bool:
    """Return whether tensors have so few values together that their number matters less than that of the ops."""
    sizes = [each.shape.num_elements() for each in values]
    return None not in sizes and sum(sizes) < _SMALL


def end_to_end(values: Sequence[tf.Tensor]) -> tf.Tensor:
    """Return the values of all tensors in one vector."""
    return tf.concat([each if each.shape.rank == 1 else tf.reshape(each, [-1]) for each in values], axis=0)


def sum_of_each(joined: tf.Tensor, values: Iterable[tf.Tensor]) -> tf.Tensor:
    """Return the sum of the part of a vector that belongs to each tensor, of those that it has `end_to_end`."""
    # Each sum is the difference of two running sums, so that a graph does not contain an op for each tensor.
    bounds = np.cumsum([0, *(each.shape.num_elements() for each in values)])
    at_bounds = tf.gather(tf.pad(tf.cumsum(joined), [[1, 0]]), bounds)
    return at_bounds[1:] - at_bounds[:-1]


def look_again(needed: tf.Tensor, look: Callable[[], tf.Tensor], seen: tf.Tensor) -> tf.Tensor:
    """Return `look()` if `needed` is True. Otherwise return `seen`, without computing `look()`."""
    if not within_xla_for_cpu():
        # Not with the default name, `cond`: TensorFlow numbers the scopes of that name, and these numbers are part of
        # checkpoint keys in scripts that used tf.contrib.
        return tf.cond(needed, look, lambda: seen, name="look_again")
    # For CPUs, XLA copies the gradients that a conditional captures. A loop of at most one iteration copies none. For
    # GPUs it is the other way round: nothing is copied, and the host would have to wait for the condition of a loop.
    looked, _ = tf.while_loop(lambda _, again: again, lambda *_: (look(), tf.constant(False)), [seen, needed])
    return looked
