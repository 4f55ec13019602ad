"""Chooses the loss tensors that a hook fetches in the `session.run` call that takes a training step."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfmp.core.graph_search import ancestors
from tfmp.core.managers import LossScaleManager
from tfmp.core.monitors.graph_records import losses_of_graph


class LossFetches:
    """The unscaled losses of the current graph, as fetches for the `session.run` call that takes a step.

    `managers` are those that the hook reports on, and `loss` is the loss of all of them, a tensor or its name. By
    default each manager has the losses that were scaled by it in the graph.

    Examples:
        >>> with tf.Graph().as_default():
        ...     loss = tf.constant(2.0, name="loss")
        ...     LossFetches([], "loss").for_manager(None) == [loss]
        True
    """

    def __init__(self, managers: Sequence[LossScaleManager], loss: tf.Tensor | str | None = None) -> None:
        self._graph = tf.compat.v1.get_default_graph()
        self._managers = managers
        self._given_loss = None if loss is None else _fetchable_tensor(self._graph, loss)
        self._scaled_losses = losses_of_graph()
        self._takes_step: dict[frozenset[tf.Operation], bool] = {}

    def for_manager(self, manager: LossScaleManager | None) -> list[tf.Tensor]:
        """Return the losses to fetch for a manager.

        A loss that was scaled by a manager outside `managers` is returned for every manager. Under Estimator each
        replica creates its own manager, but only the manager of the first replica takes steps and is reported on.
        """
        if self._given_loss is not None:
            return [self._given_loss]
        return [loss for owner, loss in self._scaled_losses if owner is manager or not self._is_watched(owner)]

    def can_join(self, fetches: Any) -> bool:  # noqa: ANN401 - whatever `session.run` takes
        """Return True if a `session.run` call with these fetches takes a training step, so that it computes the losses.

        Another call, such as the initializer of an iterator, may lack the input that the losses need. The answer is
        stored for each set of fetches: a `MonitoredSession` finalizes the graph, so the answer cannot change.
        """
        ops = fetched_ops(self._graph, fetches)
        if ops is None:
            return False
        if ops not in self._takes_step:
            self._takes_step[ops] = self._depends_on_train_op(ops)
        return self._takes_step[ops]

    def _depends_on_train_op(self, ops: frozenset[tf.Operation]) -> bool:
        train_ops = set(self._graph.get_collection(tf.compat.v1.GraphKeys.TRAIN_OP))
        return any(op in train_ops for op in ancestors(ops, along_control=True))

    def _is_watched(self, owner: object) -> bool:
        return any(owner is manager for manager in self._managers)


def fetched_ops(graph: tf.Graph, fetches: Any) -> frozenset[tf.Operation] | None:  # noqa: ANN401
    """Return the ops that a `session.run` call with these fetches asks for; None if they are not known."""
    try:
        return frozenset(_op(graph, fetch) for fetch in tf.nest.flatten(fetches))
    except (KeyError, TypeError, ValueError):
        return None


def flat_loss_values(fetched: Sequence[np.ndarray]) -> list[float]:
    """Return the fetched losses as one flat list of numbers. A loss may hold a value for each example."""
    return [float(value) for loss in fetched for value in np.ravel(loss)]


def _fetchable_tensor(graph: tf.Graph, loss: tf.Tensor | str) -> tf.Tensor:
    name = f"{loss}:0" if isinstance(loss, str) and ":" not in loss else loss
    try:
        tensor = graph.as_graph_element(name, allow_operation=False)
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"loss must be a tensor of the graph, or the name of one, got {loss!r}: {error}") from error
    if not graph.is_fetchable(tensor):
        raise ValueError(f"loss must be a tensor that can be fetched, got {loss!r} inside a conditional or a loop.")
    return tensor


def _op(graph: tf.Graph, fetch: Any) -> tf.Operation:  # noqa: ANN401 - whatever `session.run` takes
    element = graph.as_graph_element(fetch)
    return element if isinstance(element, tf.Operation) else element.op
