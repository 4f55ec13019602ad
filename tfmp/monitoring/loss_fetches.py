"""Chooses the losses of a graph that are fetched together with a step."""

from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfmp.core.managers import LossScaleManager
from tfmp.core.noted_losses import losses_of_graph


class GraphLosses:
    """The unscaled losses of the current graph, to be fetched by the run that takes the step.

    Args:
        managers: The managers that are watched.
        loss: The loss of all of them, a tensor or its name; by default those that were scaled in the graph.

    Raises:
        ValueError: `loss` is no tensor that can be fetched from the graph.

    Example:
        >>> with tf.Graph().as_default():
        ...     loss = tf.constant(2.0, name="loss")
        ...     GraphLosses([], "loss").of(None) == [loss]
        True
    """

    def __init__(self, managers: Sequence[LossScaleManager], loss: tf.Tensor | str | None = None) -> None:
        self._graph = tf.compat.v1.get_default_graph()
        self._managers = managers
        self._given = None if loss is None else _tensor(self._graph, loss)
        self._noted = losses_of_graph()
        self._found: dict[frozenset[tf.Operation], bool] = {}

    def of(self, manager: LossScaleManager | None) -> list[tf.Tensor]:
        """Return the losses of a manager.

        A loss of a manager that is not watched counts for all: under Estimator each replica makes a manager, and only
        the first one's takes steps.

        Args:
            manager: One of the managers.
        """
        if self._given is not None:
            return [self._given]
        return [loss for owner, loss in self._noted if owner is manager or not self._is_watched(owner)]

    def are_computed_by(self, fetches: Any) -> bool:  # noqa: ANN401 - whatever `session.run` takes
        """Tell whether a run takes a step, so that its losses may be fetched too.

        A run of anything else, an iterator's initializer say, may have no input for them. The graph is walked once for
        the same fetches: sessions come when it is final.

        Args:
            fetches: What is fetched.
        """
        try:
            ops = frozenset(_op(self._graph, fetch) for fetch in tf.nest.flatten(fetches))
        except (KeyError, TypeError, ValueError):
            return False
        if ops not in self._found:
            self._found[ops] = self._take_a_step(ops)
        return self._found[ops]

    def _take_a_step(self, ops: frozenset[tf.Operation]) -> bool:
        steps = set(self._graph.get_collection(tf.compat.v1.GraphKeys.TRAIN_OP))
        queue, seen = deque(ops), set(ops)
        while queue:
            op = queue.popleft()
            if op in steps:
                return True
            before = {*op.control_inputs, *(tensor.op for tensor in op.inputs)} - seen
            seen |= before
            queue.extend(before)
        return False

    def _is_watched(self, owner: object) -> bool:
        return any(owner is manager for manager in self._managers)


def values_of(fetched: Sequence[np.ndarray]) -> list[float]:
    """Return the values of losses, of those of examples each one.

    Args:
        fetched: The losses.

    Example:
        >>> values_of([np.float32(2), np.float32([3, 4])])
        [2.0, 3.0, 4.0]
    """
    return [float(value) for loss in fetched for value in np.ravel(loss)]


def _tensor(graph: tf.Graph, loss: tf.Tensor | str) -> tf.Tensor:
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
