"""Records the losses and steps that are built in a graph, so that a monitor finds them without the optimizer."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from tfmp.core.gradients.arithmetic import values_of
from tfmp.core.managers import LossScaleManager
from tfmp.core.overflow.overflow_counts import OverflowCounts, OverflowReport
from tfmp.core.storage.graph_variables import OncePerGraph
from tfmp.types import Gradients


class RecordedLoss(NamedTuple):
    """A loss that was scaled in a graph by the scale of a manager."""

    manager: LossScaleManager
    #: The unscaled loss, which can be fetched.
    loss: tf.Tensor


class RecordedStep(NamedTuple):
    """A step that was built in a graph."""

    manager: LossScaleManager
    overflow_counts: OverflowCounts


class RecordedGradients(NamedTuple):
    """The gradients of a step that was built in a graph, on one replica."""

    manager: LossScaleManager
    #: The names of the variables.
    names: Sequence[str]
    #: The gradients of these variables, which can be fetched.
    grads: Gradients
    #: The factor of the gradients; None if they are unscaled.
    loss_scale: tf.Tensor | None


class RecordedNorm(NamedTuple):
    """The norm of the gradients of a step that was built in a graph."""

    manager: LossScaleManager
    #: The `StepNorms` of the optimizer or scaler that built the step.
    norms: Any
    #: The norm; None if it cannot be fetched.
    norm: tf.Tensor | None
    #: An op that runs if and only if the step runs, or the norm is fetched.
    op: tf.Operation


_LOSSES: OncePerGraph[list[RecordedLoss]] = OncePerGraph(list)
_STEPS: OncePerGraph[list[RecordedStep]] = OncePerGraph(list)
_GRADIENTS: OncePerGraph[list[RecordedGradients]] = OncePerGraph(list)
_NORMS: OncePerGraph[list[RecordedNorm]] = OncePerGraph(list)


def record_loss(manager: LossScaleManager, loss: Any) -> None:  # noqa: ANN401 - whatever converts to a tensor
    """Record an unscaled loss if it can be fetched, so not inside a conditional, a loop or a `tf.function`."""
    if _can_be_fetched(loss):
        _LOSSES.get().append(RecordedLoss(manager, loss))


def record_gradients(recorded: RecordedGradients) -> None:
    """Record gradients if they can be fetched, so not inside a conditional, a loop or a `tf.function`."""
    # Eager code takes steps without building them: each would ask here again.
    if not tf.executing_eagerly() and all(map(_can_be_fetched, values_of(recorded.grads))):
        _GRADIENTS.get().append(recorded)


def record_norm(recorded: RecordedNorm) -> None:
    """Record the norm of a step that is built in a graph."""
    _NORMS.get().append(recorded if _can_be_fetched(recorded.norm) else recorded._replace(norm=None))


def record_step(manager: LossScaleManager, overflow_counts: OverflowCounts) -> None:
    """Record a step that is built in a graph."""
    _STEPS.get().append(RecordedStep(manager, overflow_counts))


def losses_of_graph() -> list[RecordedLoss]:
    """Return the losses that were scaled in the current graph, in the order of building.

    Examples:
        >>> import tfmp
        >>> manager = tfmp.FixedLossScaleManager(8)
        >>> with tf.Graph().as_default():
        ...     loss = tf.constant(2.0)
        ...     record_loss(manager, loss)
        ...     [recorded.loss is loss for recorded in losses_of_graph()]
        [True]
    """
    return list(_LOSSES.get())


def gradients_of_graph() -> list[RecordedGradients]:
    """Return the gradients of the steps that were built in the current graph, in the order of building."""
    return list(_GRADIENTS.get())


def norms_of_graph() -> list[RecordedNorm]:
    """Return the norms of the steps that were built in the current graph, in the order of building."""
    return list(_NORMS.get())


def managers_of_graph() -> list[LossScaleManager]:
    """Return the managers whose steps were built in the current graph, each once, in the order of building."""
    return list(dict.fromkeys(step.manager for step in _STEPS.get()))


def overflow_counts_of_graph(manager: LossScaleManager) -> list[OverflowCounts]:
    """Return the overflow counts of the steps that were built in the current graph for a manager, each once."""
    return list(dict.fromkeys(step.overflow_counts for step in _STEPS.get() if step.manager is manager))


def overflow_reports_of_graph(manager: LossScaleManager) -> list[OverflowReport]:
    """Return the overflow reports of the steps that were built in the current graph for a manager."""
    return [counts.report() for counts in overflow_counts_of_graph(manager)]


def _can_be_fetched(value: Any) -> bool:  # noqa: ANN401 - whatever converts to a tensor
    with tf.init_scope():
        graph = tf.compat.v1.get_default_graph()
        is_of_graph = tf.is_tensor(value) and getattr(value, "graph", None) is graph
        return not tf.executing_eagerly() and is_of_graph and graph.is_fetchable(value)
