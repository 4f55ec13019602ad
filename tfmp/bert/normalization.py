"""Layer normalization for BERT, with the variable names of tf.contrib."""

import numbers

import tensorflow as tf

from tfmp.core.gradients import arithmetic
from tfmp.mixed_precision.autocast import state

tf1 = tf.compat.v1


def layer_norm(
    inputs: tf.Tensor, begin_norm_axis: int = -1, *, begin_params_axis: int = -1, scope: str | None = None
) -> tf.Tensor:
    """Normalize activations by their mean and variance, as `tf.contrib.layers.layer_norm` does in BERT's model.

    The rule is computed in float32 for half-precision inputs, because the square of a float16 number overflows from 256
    on:

        (inputs - mean) / sqrt(variance + epsilon) * gamma + beta

    As in tf.contrib, epsilon is 1e-3 for float16 inputs and 1e-12 for all other types. At level O1 and within
    `tfmp.autocast`, it is 1e-12 for float16 inputs too, as it is if the same code runs in float32.

    Args:
        inputs: The activations, of a floating-point type and of known rank.
        begin_norm_axis: The mean and the variance are computed over this axis and all axes after it.
        begin_params_axis: `gamma` and `beta` have the shape of `inputs` from this axis on. The sizes of these axes must
            be known.
        scope: The variable scope; by default LayerNorm, with a number if that is already taken. The variables `beta`
            and `gamma` have the type of `inputs`, unless a custom getter such as
            `tfmp.float32_variable_storage_getter` stores them in float32.

    Returns:
        The normalized activations, of the same shape and type as `inputs`.

    Raises:
        TypeError: `inputs` is not of a floating-point type, or an axis is not a whole number. (The second argument of
            BERT's own function is a name, so a script may pass one here.)
        ValueError: An axis is out of range, or the size of an axis of `gamma` and `beta` is not known.

    Examples:
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
        epsilon = 1e-3 if dtype == tf.float16 and state.current() is None else 1e-12
        offset, scale = (tf.cast(each, wide.dtype) for each in (beta, gamma))
        return tf.cast(tf.nn.batch_normalization(wide, mean, variance, offset, scale, epsilon), dtype)


def _axis(name: str, axis: int, inputs: tf.Tensor) -> int:
    if not isinstance(axis, numbers.Integral) or isinstance(axis, bool):
        advice = f": pass the name as scope={axis!r}" if isinstance(axis, str) else ""
        raise TypeError(f"{name} must be a whole number, got {axis!r}{advice}.")
    rank = inputs.shape.rank
    if rank is None or not -rank <= axis < rank:
        raise ValueError(f"{name} must be an axis of inputs, got {axis!r} for the shape {inputs.shape}.")
    return axis % rank
