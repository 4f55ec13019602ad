"""The layer normalization of BERT, with the names of tf.contrib's variables."""

import numbers

import tensorflow as tf

from tfmp.core.gradients import arithmetic

tf1 = tf.compat.v1


def layer_norm(
    inputs: tf.Tensor, begin_norm_axis: int = -1, begin_params_axis: int = -1, scope: str | None = None
) -> tf.Tensor:
    """Normalize activations by their mean and variance, as `tf.contrib.layers.layer_norm` did in BERT's model.

    The rule, in float32 whatever the inputs' type, since the squares of float16 overflow from 256 on:

        (inputs - mean) / sqrt(variance + epsilon) * gamma + beta

    epsilon is 1e-12, and 1e-3 for float16, as in tf.contrib.

    Args:
        inputs: Activations of a floating-point type, of known rank.
        begin_norm_axis: The first of the axes that are normalized together.
        begin_params_axis: The first of the axes that `gamma` and `beta` have; their sizes must be known.
        scope: The variables' scope; by default LayerNorm, made unique. The variables `beta` and `gamma` are of the
            inputs' type, unless a custom getter such as `tfmp.float32_variable_storage_getter` stores them in float32.

    Returns:
        The normalized activations, of the inputs' shape and type.

    Raises:
        TypeError: The inputs are not of a floating-point type, or an axis is no whole number: BERT's own function takes
            a name there.
        ValueError: An axis is out of range, or a size is not known.

    Example:
        >>> with tf.Graph().as_default(), tf1.Session() as session:
        ...     normalized = layer_norm(tf.constant([[1.0, 3.0]]))
        ...     session.run(tf1.global_variables_initializer())
        ...     session.run(normalized).tolist(), [variable.op.name for variable in tf1.trainable_variables()]
        ([[-1.0, 1.0]], ['LayerNorm/beta', 'LayerNorm/gamma'])
    """
    inputs = tf.convert_to_tensor(inputs)
    dtype = inputs.dtype.base_dtype
    if not dtype.is_floating:
        raise TypeError(f"inputs must be of a floating-point type, got {dtype.name}.")
    norm_axis = _axis("begin_norm_axis", begin_norm_axis, inputs)
    shape = inputs.shape[_axis("begin_params_axis", begin_params_axis, inputs) :]
    if not shape.is_fully_defined():
        raise ValueError(f"the sizes of inputs from begin_params_axis on must be known, got {inputs.shape}.")
    collections = [tf1.GraphKeys.GLOBAL_VARIABLES, tf1.GraphKeys.MODEL_VARIABLES]
    with tf1.variable_scope(scope, "LayerNorm", [inputs]):
        beta, gamma = (
            tf1.get_variable(name, shape, dtype, initializer, collections=collections)
            for name, initializer in (("beta", tf1.zeros_initializer()), ("gamma", tf1.ones_initializer()))
        )
        wide = arithmetic.widen(inputs)
        mean, variance = tf.nn.moments(wide, list(range(norm_axis, inputs.shape.rank)), keepdims=True)
        epsilon = 1e-3 if dtype == tf.float16 else 1e-12
        offset, scale = (tf.cast(each, wide.dtype) for each in (beta, gamma))
        return tf.cast(tf.nn.batch_normalization(wide, mean, variance, offset, scale, epsilon), dtype)


def _axis(name: str, axis: int, inputs: tf.Tensor) -> int:
    if not isinstance(axis, numbers.Integral):
        advice = f": pass the name as scope={axis!r}" if isinstance(axis, str) else ""
        raise TypeError(f"{name} must be a whole number, got {axis!r}{advice}.")
    rank = inputs.shape.rank
    if rank is None or not -rank <= axis < rank:
        raise ValueError(f"{name} must be an axis of inputs, got {axis!r} for the shape {inputs.shape}.")
    return axis % rank
