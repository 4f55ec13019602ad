"""What looks at steps without changing them: a monitor in each step, and what a graph tells of the steps in it."""

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import tensorflow as tf

from tfmp.core.distribute import Distribution
from tfmp.core.gradients.arithmetic import values_of
from tfmp.core.managers import LossScaleManager
from tfmp.core.overflow.found import OverflowCounts
from tfmp.core.storage.graph_variables import OncePerGraph
from tfmp.types import Done, Gradients


class StepMonitor(Protocol):
    """Looks at the gradients of each step, in ops that are a part of the step."""

    def _record(
        self, names: Sequence[str], grads: Gradients, loss_scale: tf.Tensor | None, distribution: Distribution
    ) -> Done:
        """Look at this replica's gradients; `loss_scale` is None if they are unscaled."""


class RecordedLoss(NamedTuple):
    """An unscaled loss, which can be fetched."""

    manager: LossScaleManager
    loss: tf.Tensor


class RecordedGradients(NamedTuple):
    """The gradients of a step on one replica, which can be fetched."""

    manager: LossScaleManager
    #: The names of the variables.
    names: Sequence[str]
    grads: Gradients
    #: The factor of the gradients; None if they are unscaled.
    loss_scale: tf.Tensor | None


class RecordedNorm(NamedTuple):
    """The norm of the gradients of a step."""

    manager: LossScaleManager
    #: The `StepNorms` of the optimizer or scaler that built the step.
    norms: Any
    #: The norm; None if it cannot be fetched.
    norm: tf.Tensor | None
    #: An op that runs if and only if the step runs, or the norm is fetched.
    op: tf.Operation


class GraphRecords(NamedTuple):
    """What was built in a graph, in the order of building, so that a monitor finds it without the optimizer."""

    losses: list[RecordedLoss]
    gradients: list[RecordedGradients]
    norms: list[RecordedNorm]
    #: The manager of each step, and its counts.
    steps: list[tuple[LossScaleManager, OverflowCounts]]

    @property
    def managers(self) -> list[LossScaleManager]:
        """The managers whose steps were built, each once."""
        return list(dict.fromkeys(manager for manager, _ in self.steps))

    def overflow_counts(self, manager: LossScaleManager) -> list[OverflowCounts]:
        """Return the overflow counts of a manager's steps, each once."""
        return list(dict.fromkeys(counts for owner, counts in self.steps if owner is manager))


_RECORDS = OncePerGraph(lambda: GraphRecords([], [], [], []))


def records_of_graph() -> GraphRecords:
    """Return the records of the current graph; those of eager code are empty."""
    return _RECORDS.get()


def record_loss(manager: LossScaleManager, loss: Any) -> None:  # noqa: ANN401 - whatever converts to a tensor
    """Record an unscaled loss if it can be fetched, so not inside a conditional, a loop or a `tf.function`."""
    if can_be_fetched(loss):
        records_of_graph().losses.append(RecordedLoss(manager, loss))


def record_gradients(recorded: RecordedGradients) -> None:
    """Record gradients if they can be fetched, so not inside a conditional, a loop or a `tf.function`."""
    # Eager code takes steps without building them: each would ask here again.
    if not tf.executing_eagerly() and all(map(can_be_fetched, values_of(recorded.grads))):
        records_of_graph().gradients.append(recorded)


def can_be_fetched(value: Any) -> bool:  # noqa: ANN401 - whatever converts to a tensor
    """Return whether a value is a tensor that a session of the current graph can fetch."""
    with tf.init_scope():
        graph = tf.compat.v1.get_default_graph()
        is_of_graph = tf.is_tensor(value) and getattr(value, "graph", None) is graph
        return not tf.executing_eagerly() and is_of_graph and graph.is_fetchable(value)
