"""Exchanges values between replicas by sums alone, because every kind of distribution supports sums."""

from collections.abc import Callable, Sequence

import tensorflow as tf

from tfmp.types import Done


def sum_together(total: Callable[[tf.Tensor], tf.Tensor], parts: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """Sum this replica's tensors, in float32 with static shapes, over the replicas by one call of `total`.

    Examples:
        >>> sums = sum_together(lambda values: values * 2, [tf.constant(1.0), tf.constant([[2.0], [3.0]])])
        >>> [each.numpy().tolist() for each in sums]
        [2.0, [[4.0], [6.0]]]
    """
    if len(parts) == 1:
        return [total(parts[0])]
    sizes = [part.shape.num_elements() for part in parts]
    summed = tf.split(total(tf.concat([tf.reshape(part, [-1]) for part in parts], axis=0)), sizes)
    return [tf.reshape(each, part.shape) for each, part in zip(summed, parts, strict=True)]


def in_slot(values: tf.Tensor, replica: int | tf.Tensor, replicas: int) -> tf.Tensor:
    """Return a tensor with a row for each replica: this replica's values in its own row, zeros in all others.

    The sum of these tensors over the replicas contains the values of every replica.

    Examples:
        >>> in_slot(tf.constant([3.0]), 1, 2).numpy().tolist()
        [[0.0], [3.0]]
    """
    # The values are selected and not multiplied by 0 or 1: infinity times 0 is NaN.
    is_own = tf.reshape(tf.equal(tf.range(replicas), replica), [replicas] + [1] * values.shape.rank)
    return tf.where(is_own, values, tf.zeros([], values.dtype))


def alike_on_all(counts: tf.Tensor, replicas: int, names: Sequence[str]) -> Done:
    """Raise an error unless the replicas have gradients of the same forms: the same are None, and the same are sparse.

    `counts` is the sum of `arithmetic.forms` over the replicas, a float32 matrix. The error names the variables.
    """
    alike = tf.reduce_all(tf.logical_or(tf.equal(counts, 0), tf.equal(counts, replicas)), axis=1)
    differing = tf.boolean_mask(list(names), tf.logical_not(alike))
    return tf.debugging.Assert(
        tf.reduce_all(alike), ["the workers differ in whether the gradients of these are None, or sparse:", differing]
    )
