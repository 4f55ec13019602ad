"""Arithmetic on losses and gradients: None, dense tensors, IndexedSlices.

Nothing outside this file asks what a gradient is. Half-precision values are computed on in float32 and stay
there: a loss scale of 2**16 is already infinite in float16. Wider types keep their width.
"""

from collections.abc import Callable

import tensorflow as tf

from tfmp.core.xla import within_xla
from tfmp.types import Gradient, Gradients

#: The types that are computed on in float32.
HALF_TYPES = (tf.float16, tf.bfloat16)


def scale(loss: tf.Tensor, loss_scale: tf.Tensor) -> tf.Tensor:
    """Multiply a loss by the loss scale.

    Args:
        loss: The loss, of any shape; float16, bfloat16, float32 or float64.
        loss_scale: A float32 scalar.

    Returns:
        The scaled loss: float64 if the loss was, else float32.

    Raises:
        TypeError: The loss is not of a floating-point type.

    Example:
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
        loss_scale: The float32 scalar that the loss was scaled by.

    Returns:
        The gradients in true magnitude: float64 where they were, else float32. Above a scale of 2**126 the
        reciprocal is a denormal number, which CPU kernels flush to 0: such gradients become 0.

    Example:
        >>> grads = [tf.constant([8.0, 16.0], tf.float16), None]
        >>> [None if g is None else g.numpy() for g in unscale(grads, tf.constant(8.0))]
        [array([1., 2.], dtype=float32), None]
    """
    reciprocal = tf.math.reciprocal(loss_scale)

    def unscale_values(values: tf.Tensor) -> tf.Tensor:
        values = widen(values)
        return values * tf.cast(reciprocal, values.dtype)

    return [map_values(unscale_values, grad) for grad in grads]


def shrink(grad: Gradient, factor: tf.Tensor) -> Gradient:
    """Multiply one gradient by a factor up to 1, keeping its form and type.

    Args:
        grad: The gradient; its values may be as large as its type holds.
        factor: A float64 scalar; 1 changes nothing.

    Returns:
        The smaller gradient; None stays None.

    Example:
        >>> shrink(tf.constant([2.0**127]), tf.constant(2.0**-130, tf.float64)).numpy()
        array([0.125], dtype=float32)
    """
    # In float32 a factor below 2**-126 is a denormal number, which CPU kernels flush to 0. In graphs TensorFlow would
    # multiply two factors first; not a factor with a divisor.
    divisor = tf.where(factor < 2.0**-64, tf.constant(2.0**64, factor.dtype), 1)

    def shrink_values(values: tf.Tensor) -> tf.Tensor:
        wide = widen(values)
        return tf.cast(wide / tf.cast(divisor, wide.dtype) * tf.cast(factor * divisor, wide.dtype), values.dtype)

    return map_values(shrink_values, grad)


def cast(grad: Gradient, dtype: tf.DType) -> Gradient:
    """Cast one gradient, keeping its form.

    Args:
        grad: The gradient.
        dtype: The type wanted.

    Returns:
        The gradient in that type; None stays None.

    Example:
        >>> cast(tf.constant([1e6]), tf.float16).numpy()
        array([inf], dtype=float16)
    """
    return map_values(lambda values: tf.cast(values, dtype), grad)


def pad_rows(grad: Gradient) -> Gradient:
    """Give an IndexedSlices rows of zeros, which change no sum, so that few numbers of rows are met: powers of two.

    Args:
        grad: The gradient.

    Returns:
        An IndexedSlices, whose further rows have the index of the first, or 0 if there is none; another gradient as it
        is.

    Example:
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
    # A row that has none would see an update by 0 else.
    index = tf.concat([grad.indices, tf.zeros([1], grad.indices.dtype)], axis=0)[0]
    return tf.IndexedSlices(
        tf.concat([grad.values, zeros], axis=0),
        tf.concat([grad.indices, tf.fill([missing], index)], axis=0),
        grad.dense_shape,
    )


def densify(grad: Gradient) -> tf.Tensor | None:
    """Turn an IndexedSlices into a dense tensor, summing rows named twice.

    Args:
        grad: The gradient.

    Returns:
        A dense tensor; None stays None.

    Example:
        >>> slices = tf.IndexedSlices(tf.constant([1.0, 2.0]), tf.constant([1, 1]), tf.constant([3]))
        >>> densify(slices).numpy()
        array([0., 3., 0.], dtype=float32)
    """
    return tf.convert_to_tensor(grad) if isinstance(grad, tf.IndexedSlices) else grad


def widen(values: tf.Tensor) -> tf.Tensor:
    """Cast half-precision values to float32, leaving wider ones alone.

    Args:
        values: A tensor of a floating-point type.

    Returns:
        The tensor in float32, or in float64 if it was.

    Example:
        >>> widen(tf.constant(1.5, tf.bfloat16)).dtype.name
        'float32'
    """
    return tf.cast(values, tf.float32) if values.dtype in HALF_TYPES else values


def map_values(function: Callable[[tf.Tensor], tf.Tensor], grad: Gradient) -> Gradient:
    """Apply an elementwise function to the values that a gradient holds.

    Args:
        function: From a tensor to one of the same shape.
        grad: The gradient.

    Returns:
        A gradient of the same form: None, dense, or IndexedSlices with the same indices.

    Example:
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
    """Apply a function to each tensor that a gradient is made of.

    Args:
        of_dense: From a dense gradient to another.
        of_rows: From the rows of an IndexedSlices to others.
        of_indices: From their indices to others.
        grad: The gradient.

    Returns:
        A gradient of the same form: None, dense, or IndexedSlices.

    Example:
        >>> slices = tf.IndexedSlices(tf.constant([2.0]), tf.constant([1]))
        >>> map_parts(tf.identity, tf.negative, lambda indices: indices + 1, slices).indices.numpy()
        array([2], dtype=int32)
    """
    if isinstance(grad, tf.IndexedSlices):
        return tf.IndexedSlices(of_rows(grad.values), of_indices(grad.indices), grad.dense_shape)
    return map_values(of_dense, grad)


def is_sparse(grad: Gradient) -> bool:
    """Tell whether a gradient is an IndexedSlices.

    Args:
        grad: The gradient.

    Example:
        >>> is_sparse(tf.IndexedSlices(tf.ones([1]), tf.constant([2]))), is_sparse(None)
        (True, False)
    """
    return isinstance(grad, tf.IndexedSlices)


def rows_not_zero(values: tf.Tensor) -> tf.IndexedSlices:
    """Return the rows of a tensor that hold anything but 0; within XLA all rows.

    Args:
        values: The tensor.

    Example:
        >>> rows_not_zero(tf.constant([[0.0], [2.0], [0.0]])).indices.numpy()
        array([1])
    """
    if within_xla():
        # How many rows there are must not depend on values: of those that XLA pads with, optimizers apply some.
        return tf.IndexedSlices(values, tf.range(tf.shape(values)[0]), tf.shape(values))
    rows = tf.reshape(values, [tf.shape(values)[0], -1])
    indices = tf.where(tf.reduce_any(tf.not_equal(rows, 0), axis=1))[:, 0]
    return tf.IndexedSlices(tf.gather(values, indices), indices, tf.shape(values))


def forms(grads: Gradients) -> tf.Tensor:
    """Tell for each gradient whether there is one, and whether it is an IndexedSlices.

    Args:
        grads: The gradients.

    Returns:
        Booleans of shape `[number of gradients, 2]`.

    Example:
        >>> forms([tf.constant(1.0), None]).numpy().tolist()
        [[True, False], [False, False]]
    """
    return tf.constant([(grad is not None, isinstance(grad, tf.IndexedSlices)) for grad in grads])


def values_of(grads: Gradients) -> list[tf.Tensor]:
    """Return the tensors that hold the gradients' values.

    Args:
        grads: Gradients; None is left out.

    Example:
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

    Example:
        >>> grads = [tf.constant(1.0), None, tf.constant(2.0)]
        >>> [float(grad) for grad in without(grads, grads[:1])]
        [2.0]
    """
    known = {id(values) for values in values_of(others)}
    return [grad for grad in grads if grad is not None and id(values_of([grad])[0]) not in known]
