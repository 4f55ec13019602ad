"""Arithmetic on losses and gradients, where a gradient is None, a dense tensor or an `IndexedSlices`.

The other modules use these functions, so that they need not distinguish the three forms themselves. Values in float16
and bfloat16 are converted to float32 before they are scaled or unscaled, and results stay in float32, because a loss
scale of 2**16 is already infinite in float16. Values in float64 stay in float64.
"""

from collections.abc import Callable

import tensorflow as tf

from tfmp.core import lists
from tfmp.core.gradients.origins import note_change
from tfmp.core.tracing import within_xla
from tfmp.types import Gradient, Gradients

#: The half-precision dtypes, whose values are converted to float32 before arithmetic.
HALF_TYPES = (tf.float16, tf.bfloat16)


def scale(loss: tf.Tensor, loss_scale: tf.Tensor) -> tf.Tensor:
    """Multiply a loss by the loss scale.

    Args:
        loss: The loss, of any shape, in any floating-point dtype.
        loss_scale: A float32 scalar.

    Returns:
        The scaled loss: in float64 if the loss is in float64, otherwise in float32.

    Raises:
        TypeError: The loss does not have a floating-point dtype.

    Examples:
        >>> float(scale(tf.constant(2.0, tf.float16), tf.constant(2.0**17)))
        262144.0
    """
    loss = tf.convert_to_tensor(loss)
    if not loss.dtype.is_floating:
        raise TypeError(f"the loss must be of a floating-point type, got {loss.dtype.name}.")
    loss = widen(loss)
    return loss * tf.cast(loss_scale, loss.dtype)


def unscale(grads: Gradients, loss_scale: tf.Tensor) -> list[Gradient]:
    """Divide gradients by the loss scale.

    Args:
        grads: Gradients of a scaled loss.
        loss_scale: The float32 scalar by which the loss was multiplied.

    Returns:
        The unscaled gradients: in float64 if they were in float64, otherwise in float32. If the scale is above 2**126,
        the gradients become 0, because the reciprocal of the scale is denormal and CPU kernels replace it by 0.

    Raises:
        TypeError: A gradient is complex.

    Examples:
        >>> grads = [tf.constant([8.0, 16.0], tf.float16), None]
        >>> [None if g is None else g.numpy() for g in unscale(grads, tf.constant(8.0))]
        [array([1., 2.], dtype=float32), None]
    """
    lists.refuse_complex(grads)
    reciprocal = tf.math.reciprocal(loss_scale)

    def unscale_values(values: tf.Tensor) -> tf.Tensor:
        values = widen(values)
        return values * tf.cast(reciprocal, values.dtype)

    return [map_values(unscale_values, grad) for grad in grads]


def shrink(grad: Gradient, factor: tf.Tensor) -> Gradient:
    """Multiply one gradient by a factor of at most 1, keeping its form and dtype.

    Args:
        grad: The gradient. Its values may be as large as its dtype allows.
        factor: A float64 scalar.

    Returns:
        The smaller gradient; None stays None.

    Examples:
        >>> shrink(tf.constant([2.0**127]), tf.constant(2.0**-130, tf.float64)).numpy()
        array([0.125], dtype=float32)
    """
    # A factor below 2**-126 is denormal in float32, and CPU kernels replace it by 0. A small factor is therefore
    # applied in two parts. The first part is a division: TensorFlow's graph optimizer would combine two multiplications
    # into one by their product, the denormal factor, but it does not combine a division with a multiplication. XLA does
    # neither, and divides more slowly than it multiplies.
    divisor = tf.where(factor < 2.0**-64, tf.constant(2.0**64, factor.dtype), 1)

    def shrink_values(values: tf.Tensor) -> tf.Tensor:
        wide = widen(values)
        first = wide * tf.cast(1 / divisor, wide.dtype) if within_xla() else wide / tf.cast(divisor, wide.dtype)
        return tf.cast(first * tf.cast(factor * divisor, wide.dtype), values.dtype)

    shrunk = map_values(shrink_values, grad)
    note_change(shrunk, grad, shrink_values, keeps_finite=tf.abs(factor) <= 1)
    return shrunk


def cast(grad: Gradient, dtype: tf.DType) -> Gradient:
    """Cast one gradient, keeping its form.

    Args:
        grad: The gradient.
        dtype: The dtype of the result.

    Returns:
        The gradient in that dtype; None stays None.

    Examples:
        >>> cast(tf.constant([1e6]), tf.float16).numpy()
        array([inf], dtype=float16)
    """
    return map_values(lambda values: tf.cast(values, dtype), grad)


def pad_rows(grad: Gradient) -> Gradient:
    """Add rows of zeros to an `IndexedSlices` until the number of rows is a power of two.

    XLA compiles a program for each number of rows. Padding makes these numbers few. Rows of zeros do not change the
    sum of the rows.

    Returns:
        An `IndexedSlices` whose new rows have the index of the first row, or 0 if there was no row. A gradient of
        another form is returned unchanged.

    Examples:
        >>> slices = tf.IndexedSlices(tf.ones([3]), tf.constant([4, 5, 5]))
        >>> pad_rows(slices).indices.numpy()
        array([4, 5, 5, 4], dtype=int32)
    """
    if not isinstance(grad, tf.IndexedSlices):
        return grad
    count = tf.shape(grad.indices)[0]
    powers = tf.constant([2**exponent for exponent in range(31)])
    missing = tf.reduce_min(tf.boolean_mask(powers, powers >= count)) - count
    zeros = tf.zeros(tf.concat([[missing], tf.shape(grad.values)[1:]], axis=0), grad.values.dtype)
    # The new rows repeat an existing index. With another index, a row of the variable that has no gradient would get a
    # gradient of 0, and an optimizer with momentum would then move it.
    index = tf.concat([grad.indices, tf.zeros([1], grad.indices.dtype)], axis=0)[0]
    return tf.IndexedSlices(
        tf.concat([grad.values, zeros], axis=0),
        tf.concat([grad.indices, tf.fill([missing], index)], axis=0),
        grad.dense_shape,
    )


def densify(grad: Gradient) -> tf.Tensor | None:
    """Convert an `IndexedSlices` into a dense tensor; rows with the same index are summed.

    Returns:
        A dense tensor; None stays None.

    Examples:
        >>> slices = tf.IndexedSlices(tf.constant([1.0, 2.0]), tf.constant([1, 1]), tf.constant([3]))
        >>> densify(slices).numpy()
        array([0., 3., 0.], dtype=float32)
    """
    return tf.convert_to_tensor(grad) if isinstance(grad, tf.IndexedSlices) else grad


def widen(values: tf.Tensor) -> tf.Tensor:
    """Cast half-precision values to float32; other values are returned unchanged.

    Args:
        values: A tensor of a floating-point dtype.

    Returns:
        The tensor in float32, or in float64 if it was in float64.

    Examples:
        >>> widen(tf.constant(1.5, tf.bfloat16)).dtype.name
        'float32'
    """
    return tf.cast(values, tf.float32) if values.dtype in HALF_TYPES else values


def map_values(function: Callable[[tf.Tensor], tf.Tensor], grad: Gradient) -> Gradient:
    """Apply an elementwise function to the values of a gradient.

    Args:
        function: Takes a tensor, and returns a tensor of the same shape.
        grad: The gradient.

    Returns:
        A gradient of the same form: None, dense, or an `IndexedSlices` with the same indices.

    Examples:
        >>> map_values(tf.negative, None) is None
        True
    """
    if grad is None:
        return None
    if isinstance(grad, tf.IndexedSlices):
        return tf.IndexedSlices(function(grad.values), grad.indices, grad.dense_shape)
    return function(tf.convert_to_tensor(grad))


def map_parts(
    of_dense: Callable[[tf.Tensor], tf.Tensor],
    of_rows: Callable[[tf.Tensor], tf.Tensor],
    of_indices: Callable[[tf.Tensor], tf.Tensor],
    grad: Gradient,
) -> Gradient:
    """Apply a function to each tensor that a gradient consists of.

    Args:
        of_dense: Applied to the tensor of a dense gradient.
        of_rows: Applied to the values of an `IndexedSlices`.
        of_indices: Applied to the indices of an `IndexedSlices`.
        grad: The gradient.

    Returns:
        A gradient of the same form: None, dense, or an `IndexedSlices`.

    Examples:
        >>> slices = tf.IndexedSlices(tf.constant([2.0]), tf.constant([1]))
        >>> map_parts(tf.identity, tf.negative, lambda indices: indices + 1, slices).indices.numpy()
        array([2], dtype=int32)
    """
    if isinstance(grad, tf.IndexedSlices):
        return tf.IndexedSlices(of_rows(grad.values), of_indices(grad.indices), grad.dense_shape)
    return map_values(of_dense, grad)


def is_sparse(grad: Gradient) -> bool:
    """Return whether a gradient is an `IndexedSlices`.

    Examples:
        >>> is_sparse(tf.IndexedSlices(tf.ones([1]), tf.constant([2]))), is_sparse(None)
        (True, False)
    """
    return isinstance(grad, tf.IndexedSlices)


def rows_not_zero(values: tf.Tensor) -> tf.IndexedSlices:
    """Return the rows of a tensor that contain a value other than 0; under XLA return all rows.

    Args:
        values: A tensor with at least one dimension.

    Examples:
        >>> rows_not_zero(tf.constant([[0.0], [2.0], [0.0]])).indices.numpy()
        array([1])
    """
    if within_xla():
        # Under XLA the number of rows must not depend on values. XLA would pad the indices that `tf.where` finds, and
        # optimizers would apply part of the padding as if it were rows of the gradient.
        return tf.IndexedSlices(values, tf.range(tf.shape(values)[0]), tf.shape(values))
    rows = tf.reshape(values, [tf.shape(values)[0], -1])
    indices = tf.where(tf.reduce_any(tf.not_equal(rows, 0), axis=1))[:, 0]
    return tf.IndexedSlices(tf.gather(values, indices), indices, tf.shape(values))


def forms(grads: Gradients) -> tf.Tensor:
    """Return, for each gradient, whether it is not None and whether it is an `IndexedSlices`.

    Returns:
        A boolean tensor of shape `[number of gradients, 2]`.

    Examples:
        >>> forms([tf.constant(1.0), None]).numpy().tolist()
        [[True, False], [False, False]]
    """
    found = [(grad is not None, isinstance(grad, tf.IndexedSlices)) for grad in grads]
    return tf.constant(found, tf.bool, [len(found), 2])


def values_of(grads: Gradients) -> list[tf.Tensor]:
    """Return the tensors that contain the gradients' values.

    Args:
        grads: Gradients of any form. Those that are None are left out.

    Examples:
        >>> slices = tf.IndexedSlices(tf.constant([2.0]), tf.constant([1]))
        >>> [values.numpy().tolist() for values in values_of([tf.constant([1.0]), None, slices])]
        [[1.0], [2.0]]
    """
    return [
        grad.values if isinstance(grad, tf.IndexedSlices) else tf.convert_to_tensor(grad)
        for grad in grads
        if grad is not None
    ]


def without(grads: Gradients, others: Gradients) -> list[Gradient]:
    """Return the gradients whose values are none of the tensors of others.

    Args:
        grads: The gradients; None is left out.
        others: The gradients to leave out.

    Examples:
        >>> grads = [tf.constant(1.0), None, tf.constant(2.0)]
        >>> [float(grad) for grad in without(grads, grads[:1])]
        [2.0]
    """
    known = {id(values) for values in values_of(others)}
    return [grad for grad in grads if grad is not None and id(values_of([grad])[0]) not in known]
