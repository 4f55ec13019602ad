"""Exchanges values between replicas by sums alone, because every kind of distribution supports sums."""

from collections.abc import Callable, Sequence

import tensorflow as tf

from tfmp.core.gradients import arithmetic
from tfmp.types import Done, Gradients


def largest_of_each(maximum: Callable[[tf.Tensor], tf.Tensor], answers: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """Return the largest of each boolean or float32 scalar over the replicas, by one call of `maximum` with a vector.

    Examples:
        >>> largest = largest_of_each(lambda values: values + 1, [tf.constant(False), tf.constant(3.0)])
        >>> [each.numpy().item() for each in largest]
        [True, 4.0]
    """
    largest = tf.unstack(maximum(tf.stack([tf.cast(answer, tf.float32) for answer in answers])))
    return [tf.cast(each, answer.dtype) for each, answer in zip(largest, answers, strict=True)]


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


def forms_and_opposites(grads: Gradients) -> tf.Tensor:
    """Return 1 for each form that a gradient has, and for each that it has not: what `alike_on_all` compares."""
    forms = arithmetic.forms(grads)
    return tf.cast(tf.stack([forms, tf.logical_not(forms)]), tf.float32)


def alike_on_all(largest: tf.Tensor, names: Sequence[str]) -> Done:
    """Raise an error unless the replicas have gradients of the same forms: the same are None, and the same are sparse.

    `largest` is the largest of `forms_and_opposites` over the replicas. The error names the variables.
    """
    # Where two replicas differ, one has the form, and the other its opposite.
    alike = tf.reduce_all(tf.equal(largest[0] * largest[1], 0), axis=1)
    differing = tf.boolean_mask(list(names), tf.logical_not(alike))
    return tf.debugging.Assert(
        tf.reduce_all(alike), ["the workers differ in whether the gradients of these are None, or sparse:", differing]
    )
