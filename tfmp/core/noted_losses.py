"""Remembers, in a graph, the losses that were scaled there: what monitors look at."""

from typing import Any, NamedTuple

import tensorflow as tf

#: Not a string, so that TensorFlow does not try to export what the collection holds.
_LOSSES_OF_GRAPH = ("tfmp", "losses")


class NotedLoss(NamedTuple):
    """A loss that was scaled.

    Attributes:
        owner: The manager whose scale it was multiplied by.
        loss: The loss itself, unscaled: a tensor that can be fetched.
    """

    owner: object
    loss: tf.Tensor


def note_loss(owner: object, loss: Any) -> None:  # noqa: ANN401 - whatever converts to a tensor
    """Remember a loss if it stands in a graph, at the top level, where it can be fetched.

    Args:
        owner: The manager whose scale it is multiplied by.
        loss: The unscaled loss. One inside a conditional, a loop or a `tf.function` is left out.
    """
    with tf.init_scope():
        if tf.executing_eagerly():
            return
        graph = tf.compat.v1.get_default_graph()
        is_of_graph = tf.is_tensor(loss) and getattr(loss, "graph", None) is graph
        if is_of_graph and graph.is_fetchable(loss):
            tf.compat.v1.add_to_collection(_LOSSES_OF_GRAPH, NotedLoss(owner, loss))


def losses_of_graph() -> list[NotedLoss]:
    """Return the losses that were scaled in the current graph, in that order.

    Example:
        >>> with tf.Graph().as_default():
        ...     loss = tf.constant(2.0)
        ...     note_loss(None, loss)
        ...     [noted.loss is loss for noted in losses_of_graph()]
        [True]
    """
    return list(tf.compat.v1.get_collection(_LOSSES_OF_GRAPH))
