"""Arithmetic on losses and gradients, where a gradient is None, a dense tensor or an `IndexedSlices`.

Values in half precision become float32 before they are scaled or unscaled, and stay so: a loss scale of 2**16 is
infinite in float16. Values in float64 stay in float64.
"""

import functools
from collections.abc import Callable

import tensorflow as tf

from tfmp.core import lists
from tfmp.core.dtypes import HALF_TYPES
from tfmp.core.tensorflow_internals import within_xla
from tfmp.types import Gradient, Gradients


def scale(values: tf.Tensor, factor: tf.Tensor) -> tf.Tensor:
    """Multiply a loss, or the values of a gradient; those in float64 stay in it, all others are returned in float32."""
    values = widen(values)
    return values * tf.cast(factor, values.dtype)


def unscale(grads: Gradients, loss_scale: tf.Tensor) -> list[Gradient]:
    """Divide gradients by the loss scale; those in float64 stay in it, all others are returned in float32.

    By a scale above 2**126 they become 0: its reciprocal is denormal, and CPU kernels replace it by 0.
    """
    lists.refuse_complex(grads)
    by_reciprocal = functools.partial(scale, factor=tf.math.reciprocal(loss_scale))
    return [map_values(by_reciprocal, grad) for grad in grads]


def cast(grad: Gradient, dtype: tf.DType) -> Gradient:
    """Cast one gradient, keeping its form."""
    return map_values(lambda values: tf.cast(values, dtype), grad)


def pad_rows(grad: Gradient) -> Gradient:
    """Add rows of zeros to an `IndexedSlices` until the number of rows is a power of two; return other forms unchanged.

    XLA compiles a program for each number of rows. The new rows have the index of the first one, or 0 if there is none.
    """
    if not isinstance(grad, tf.IndexedSlices):
        return grad
    count = tf.shape(grad.indices)[0]
    powers = tf.constant([2**exponent for exponent in range(31)])
    missing = tf.reduce_min(tf.boolean_mask(powers, powers >= count)) - count
    zeros = tf.zeros(tf.concat([[missing], tf.shape(grad.values)[1:]], axis=0), grad.values.dtype)
    # With another index, a row of the variable without a gradient would get one of 0, and momentum would move it.
    index = tf.concat([grad.indices, tf.zeros([1], grad.indices.dtype)], axis=0)[0]
    indices = tf.concat([grad.indices, tf.fill([missing], index)], axis=0)
    return tf.IndexedSlices(tf.concat([grad.values, zeros], axis=0), indices, grad.dense_shape)


def densify(grad: Gradient) -> tf.Tensor | None:
    """Convert an `IndexedSlices` into a dense tensor, in which rows with the same index are summed."""
    return tf.convert_to_tensor(grad) if isinstance(grad, tf.IndexedSlices) else grad


def added_up(grad: Gradient) -> Gradient:
    """Sum the rows of an `IndexedSlices` that have the same index; under XLA return a dense tensor instead."""
    if not isinstance(grad, tf.IndexedSlices):
        return grad
    if within_xla():
        # Under XLA the number of rows must not depend on values.
        return densify(grad)
    indices, positions = tf.unique(grad.indices)
    rows = tf.math.unsorted_segment_sum(grad.values, positions, tf.size(indices))
    return tf.IndexedSlices(rows, indices, grad.dense_shape)


def widen(values: tf.Tensor) -> tf.Tensor:
    """Cast half-precision values to float32; return other values unchanged."""
    return tf.cast(values, tf.float32) if values.dtype in HALF_TYPES else values


def map_values(function: Callable[[tf.Tensor], tf.Tensor], grad: Gradient) -> Gradient:
    """Apply an elementwise function to the values of a gradient, keeping its form."""
    if grad is None:
        return None
    if isinstance(grad, tf.IndexedSlices):
        return tf.IndexedSlices(function(grad.values), grad.indices, grad.dense_shape)
    return function(tf.convert_to_tensor(grad))


def rows_not_zero(values: tf.Tensor) -> tf.IndexedSlices:
    """Return the rows of a tensor of rank 1 or more that contain a value other than 0; under XLA return all rows."""
    if within_xla():
        # XLA would pad the indices that `tf.where` finds, and optimizers would apply part of the padding as rows.
        return tf.IndexedSlices(values, tf.range(tf.shape(values)[0]), tf.shape(values))
    rows = tf.reshape(values, [tf.shape(values)[0], -1])
    indices = tf.where(tf.reduce_any(tf.not_equal(rows, 0), axis=1))[:, 0]
    return tf.IndexedSlices(tf.gather(values, indices), indices, tf.shape(values))


def forms(grads: Gradients) -> tf.Tensor:
    """Return a boolean row for each gradient: whether it is not None, and whether it is an `IndexedSlices`."""
    found = [(grad is not None, isinstance(grad, tf.IndexedSlices)) for grad in grads]
    return tf.constant(found, tf.bool, [len(found), 2])


def values_of(grads: Gradients) -> list[tf.Tensor]:
    """Return the tensors that contain the gradients' values, without those of gradients that are None."""
    return [tf.convert_to_tensor(lists.values(grad)) for grad in grads if grad is not None]


def without(grads: Gradients, others: Gradients) -> list[Gradient]:
    """Return the gradients, with None for those that have their values in the same tensors as one of `others`."""
    known = {id(values) for values in values_of(others)}
    return [None if grad is None or id(values_of([grad])[0]) in known else grad for grad in grads]
