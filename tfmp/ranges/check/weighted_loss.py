"""The mean of losses that examples have weights for."""

import tensorflow as tf

from tfmp.core.gradients import arithmetic


def weighted_mean(values: tf.Tensor, weights: tf.Tensor | None) -> tf.Tensor:
    """Return the mean of losses times the weights of their examples, as a float32 scalar.

    `weights` has a value for each of the first dimensions of the losses; None stands for 1.

    Examples:
        >>> float(weighted_mean(tf.constant([1.0, 3.0]), tf.constant([[1.0], [0.0]])))
        0.5
    """
    values = arithmetic.widen(tf.convert_to_tensor(values))
    if weights is not None:
        weights = tf.cast(weights, values.dtype)
        while weights.shape.rank > values.shape.rank and weights.shape[-1] == 1:
            weights = weights[..., 0]
        while weights.shape.rank < values.shape.rank:
            weights = weights[..., tf.newaxis]
        values *= weights
    return tf.cast(tf.reduce_mean(values), tf.float32)
