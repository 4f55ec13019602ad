"""Float32 master weights for a float16 graph."""

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfmp.core.dtypes import HALF_TYPES

#: The types between which levels and getters cast; float64 stays as it is.
FLOAT32_OR_HALF = (tf.float32, *HALF_TYPES)


def float32_variable_storage_getter(
    getter: Callable[..., tf.Variable],
    name: str,
    *,
    dtype: tf.DType = tf.float32,
    trainable: bool | None = True,
    initializer: Any = None,  # noqa: ANN401 - anything that get_variable takes
    **kwargs: Any,  # noqa: ANN401 - anything that get_variable takes
) -> tf.Variable | tf.Tensor:
    """Store a trainable half-precision variable in float32, and return a half-precision cast of it to the model.

    Pass this function as the `custom_getter` of `tf.compat.v1.variable_scope`. An update smaller than 2**-12 of a
    float16 weight is lost to rounding, however often it is repeated. In float32 such updates add up, while the layers
    still compute in half precision. The gradients are those of the float32 variable, so the optimizer's slots and the
    checkpoint are float32 too.

    Variables that are not trainable (for example moving averages), and variables of other types, are created as the
    layer asks for them. A regularizer receives the float32 variable.

    Args:
        getter: The getter that this function wraps. TensorFlow passes this argument and all others.
        name: The name of the variable.
        dtype: The type that the layer asks for.
        trainable: Whether the variable is trainable.
        initializer: The initial value, or a function that returns it, as `tf.compat.v1.get_variable` accepts it. A
            value is cast to float32.
        **kwargs: All other arguments of `tf.compat.v1.get_variable`.

    Returns:
        For a trainable half-precision variable: a tensor of that type, cast from the float32 variable. Otherwise: the
        variable itself.

    Examples:
        >>> import tfmp
        >>> with tf.Graph().as_default():
        ...     with tf.compat.v1.variable_scope(
        ...         "net", dtype=tf.float16, custom_getter=tfmp.float32_variable_storage_getter
        ...     ):
        ...         kernel = tf.compat.v1.get_variable("kernel", [2, 3])
        ...     kernel.dtype.name, tf.compat.v1.trainable_variables()[0].dtype.base_dtype.name
        ('float16', 'float32')

    Source: NVIDIA's "Training with Mixed Precision" guide, from which public scripts copied this function.
    """
    if trainable is False or tf.as_dtype(dtype) not in HALF_TYPES:
        return getter(name, dtype=dtype, trainable=trainable, initializer=initializer, **kwargs)
    if initializer is not None and not callable(initializer):
        value = tf.convert_to_tensor(initializer)
        # TensorFlow gives a variable the type of a value, whatever type is asked for.
        if value.dtype not in FLOAT32_OR_HALF:
            return getter(name, dtype=dtype, trainable=trainable, initializer=initializer, **kwargs)
        initializer = tf.cast(value, tf.float32)
    variable = getter(name, dtype=tf.float32, trainable=trainable, initializer=initializer, **kwargs)
    return tf.cast(variable, dtype)
