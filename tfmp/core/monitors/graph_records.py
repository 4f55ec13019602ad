"""Records the losses and steps that are built in a graph, so that a monitor finds them without the optimizer."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from tfmp.core.gradients.arithmetic import values_of
from tfmp.core.managers import LossScaleManager
from tfmp.core.overflow.overflow_counts import OverflowCounts, OverflowReport
from tfmp.core.storage.graph_registry import GraphList
from tfmp.types import Gradients


class RecordedLoss(NamedTuple):
    """A loss that was scaled in a graph.

    Attributes:
        manager: The manager whose scale multiplied it.
        loss: The unscaled loss, a tensor that can be fetched.
    """

    manager: LossScaleManager
    loss: tf.Tensor


class RecordedStep(NamedTuple):
    """A step that was built in a graph.

    Attributes:
        manager: The manager that decides its scale.
        overflow_counts: The counts of the values that overflowed in it.
    """

    manager: LossScaleManager
    overflow_counts: OverflowCounts


class RecordedGradients(NamedTuple):
    """The gradients of a step that was built in a graph, on one replica.

    Attributes:
        manager: The manager that decides the loss scale of the step.
        names: The names of the variables.
        grads: Their gradients, tensors that can be fetched.
        loss_scale: The factor of the gradients; None if they are unscaled.
    """

    manager: LossScaleManager
    names: Sequence[str]
    grads: Gradients
    loss_scale: tf.Tensor | None


_LOSSES: GraphList[RecordedLoss] = GraphList("losses")
_STEPS: GraphList[RecordedStep] = GraphList("steps")
_GRADIENTS: GraphList[RecordedGradients] = GraphList("gradients")


def record_loss(manager: LossScaleManager, loss: Any) -> None:  # noqa: ANN401 - whatever converts to a tensor
    """Record a loss that is scaled at the top level of a graph, where it can be fetched.

    A loss inside a conditional, a loop or a `tf.function` cannot be fetched and is not recorded.

    Args:
        manager: The manager whose scale multiplies the loss.
        loss: The unscaled loss.
    """
    if _can_be_fetched(loss):
        _LOSSES.append(RecordedLoss(manager, loss))


def record_gradients(recorded: RecordedGradients) -> None:
    """Record the gradients of a step that is built at the top level of a graph, where they can be fetched.

    Args:
        recorded: The gradients. Those inside a conditional, a loop or a `tf.function` are not recorded.
    """
    # Eager code takes steps without building them: each would ask here again.
    if not tf.executing_eagerly() and all(map(_can_be_fetched, values_of(recorded.grads))):
        _GRADIENTS.append(recorded)


def record_step(manager: LossScaleManager, overflow_counts: OverflowCounts) -> None:
    """Record a step that is built in a graph.

    Args:
        manager: The manager that decides the loss scale of the step.
        overflow_counts: The counts of the values that overflow in the step.
    """
    _STEPS.append(RecordedStep(manager, overflow_counts))


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
    return _LOSSES.items()


def gradients_of_graph() -> list[RecordedGradients]:
    """Return the gradients of the steps that were built in the current graph, in the order of building."""
    return _GRADIENTS.items()


def managers_of_graph() -> list[LossScaleManager]:
    """Return the managers whose steps were built in the current graph, each once, in the order of building.

    Examples:
        >>> with tf.Graph().as_default():
        ...     managers_of_graph()
        []
    """
    return list(dict.fromkeys(step.manager for step in _STEPS.items()))


def overflow_counts_of_graph(manager: LossScaleManager) -> list[OverflowCounts]:
    """Return the overflow counts of the steps that were built in the current graph for a manager, each once.

    Args:
        manager: The manager that decides the loss scale of the steps.
    """
    return list(dict.fromkeys(step.overflow_counts for step in _STEPS.items() if step.manager is manager))


def overflow_reports_of_graph(manager: LossScaleManager) -> list[OverflowReport]:
    """Return the overflow reports of the steps that were built in the current graph for a manager.

    Args:
        manager: The manager that decides the loss scale of the steps.

    Examples:
        >>> import tfmp
        >>> with tf.Graph().as_default():
        ...     overflow_reports_of_graph(tfmp.FixedLossScaleManager(8))
        []
    """
    return [counts.report() for counts in overflow_counts_of_graph(manager)]


def _can_be_fetched(value: Any) -> bool:  # noqa: ANN401 - whatever converts to a tensor
    with tf.init_scope():
        graph = tf.compat.v1.get_default_graph()
        is_of_graph = tf.is_tensor(value) and getattr(value, "graph", None) is graph
        return not tf.executing_eagerly() and is_of_graph and graph.is_fetchable(value)
