"""Checks functions of raw TensorFlow, in eager code, through their probes."""

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfmp.core.gradients import arithmetic
from tfmp.ranges.check.names import by_name, told_apart
from tfmp.ranges.check.passes import Pass, PassTensors, Precision, measurements, pass_of
from tfmp.ranges.probes import Probe, recorded_probes
from tfmp.types import Gradients


class Functions:
    """A function that computes a loss, and perhaps another one that does so in float16.

    Args:
        in_float32: Takes a batch; returns the loss.
        in_float16: The same, in float16; None if there is none.
        variables: The variables to differentiate by; by default those that the loss depends on.
    """

    keeps_float32 = False

    def __init__(
        self,
        in_float32: Callable[[Any], tf.Tensor],
        in_float16: Callable[[Any], tf.Tensor] | None,
        variables: Sequence[tf.Variable] | None,
    ) -> None:
        self._in_float32 = in_float32
        self._in_float16 = in_float16
        self._variables = variables

    @property
    def has_float16(self) -> bool:
        """Whether there is a function that computes in float16."""
        return self._in_float16 is not None

    def run(self, batch: Any, precision: Precision) -> Pass:  # noqa: ANN401 - whatever the function takes
        """Run a batch forward and backward.

        Args:
            batch: The batch.
            precision: How to compute; no probe can be kept in float32.
        """
        function = self._in_float16 if precision.dtype == "float16" and self._in_float16 else self._in_float32
        with recorded_probes() as probes, tf.GradientTape(persistent=False) as tape:
            loss = tf.reduce_mean(arithmetic.widen(tf.convert_to_tensor(function(batch))))
            scaled = loss * precision.loss_scale
        variables = list(tape.watched_variables() if self._variables is None else self._variables)
        grads = tape.gradient(scaled, [*(probe.tensor for probe in probes), *variables])
        tensors = tensors_of_probes(loss, probes, variables, grads)
        return pass_of(
            tf.nest.map_structure(lambda tensor: tensor.numpy(), measurements(tensors)), precision.loss_scale
        )


def tensors_of_probes(
    loss: tf.Tensor, probes: Sequence[Probe], variables: Sequence[tf.Variable], grads: Gradients
) -> PassTensors:
    """Return the tensors of a pass through probes.

    Args:
        loss: The loss, not scaled.
        probes: The probes.
        variables: The trained variables.
        grads: The gradients of the scaled loss, for the probes and then for the variables.
    """
    names = told_apart(variable.name.partition(":")[0] for variable in variables)
    return PassTensors(
        loss=loss,
        inputs={},
        outputs=by_name((probe.name, probe.tensor) for probe in probes),
        output_gradients=by_name(zip((probe.name for probe in probes), grads, strict=False)),
        weights=by_name(zip(names, map(tf.convert_to_tensor, variables), strict=True)),
        weight_gradients=by_name(zip(names, grads[len(probes) :], strict=True)),
    )


def weighted_mean(values: tf.Tensor, weights: tf.Tensor | None) -> tf.Tensor:
    """Return the mean of losses times the weights of their examples, as a float32 scalar.

    Args:
        values: The losses, of any shape.
        weights: A weight for each of the first dimensions of the losses; None for 1.

    Example:
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
