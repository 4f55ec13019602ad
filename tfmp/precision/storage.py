"""Float32 master weights for a float16 graph."""

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfmp.core.gradients.arithmetic import HALF_TYPES


def float32_variable_storage_getter(
    getter: Callable[..., tf.Variable],
    name: str,
    *,
    dtype: tf.DType = tf.float32,
    trainable: bool | None = True,
    initializer: Any = None,  # noqa: ANN401 - whatever get_variable takes
    **kwargs: Any,  # noqa: ANN401 - the same
) -> tf.Variable | tf.Tensor:
    """Store trainable half-precision variables in float32, and hand the graph a cast.

    A `custom_getter` for `tf.compat.v1.variable_scope`. An update smaller than 2**-12 of a float16 weight is
    rounded away, however often it comes; stored in float32 they add up, and the layers still compute in half
    precision. Gradients reach the float32 variable, so the optimizer and the checkpoint are float32.

    Variables that do not train (moving averages), and variables asked for in float32 or wider, are left as they
    are. A regularizer sees the float32 variable.

    Args:
        getter: The getter that this one wraps; TensorFlow passes it, and what follows.
        name: The variable's name.
        dtype: The type that the layer asked for.
        trainable: Whether the variable trains.
        initializer: What it starts from.
        **kwargs: More arguments of `tf.compat.v1.get_variable`.

    Returns:
        A tensor of the type asked for, cast from a float32 variable; or the variable itself.

    Example:
        >>> import tfmp
        >>> with tf.Graph().as_default():
        ...     with tf.compat.v1.variable_scope(
        ...         "net", dtype=tf.float16, custom_getter=tfmp.float32_variable_storage_getter
        ...     ):
        ...         kernel = tf.compat.v1.get_variable("kernel", [2, 3])
        ...     kernel.dtype.name, tf.compat.v1.trainable_variables()[0].dtype.base_dtype.name
        ('float16', 'float32')

    Source: NVIDIA's "Training with Mixed Precision" guide, where scripts have it from.
    """
    if trainable is False or tf.as_dtype(dtype) not in HALF_TYPES:
        return getter(name, dtype=dtype, trainable=trainable, initializer=initializer, **kwargs)
    if initializer is not None and not callable(initializer):
        initializer = tf.cast(initializer, tf.float32)
    variable = getter(name, dtype=tf.float32, trainable=trainable, initializer=initializer, **kwargs)
    return tf.cast(variable, dtype)
