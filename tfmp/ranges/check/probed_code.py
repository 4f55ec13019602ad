"""Checks code of raw TensorFlow, functions and the losses of TF1 graphs, through its probes."""

from collections.abc import Callable, Collection, Sequence
from typing import Any

import tensorflow as tf

from tfmp.core.gradients import arithmetic
from tfmp.ranges.check.model_runs import (
    ModelRun,
    Precision,
    RunTensors,
    by_name,
    eager_run,
    measurements,
    run_of,
    told_apart,
)
from tfmp.ranges.probes import Probe, probes_of_graph, recorded_probes
from tfmp.types import Gradients


class _Probed:
    """Code of raw TensorFlow; no probe can be kept in float32."""

    needs_labels = False
    keeps_float32 = False
    already_float32: Sequence[str] = ()

    def failed_in(self, kept: Collection[str]) -> None:
        """Return None: no probe can be kept in float32."""


class Functions(_Probed):
    """A function that takes a batch and computes a loss, and perhaps another one that does so in float16.

    `variables` are those to differentiate by; None stands for those that the loss depends on.
    """

    def __init__(
        self,
        in_float32: Callable[[Any], tf.Tensor],
        in_float16: Callable[[Any], tf.Tensor] | None,
        variables: Sequence[tf.Variable] | None,
    ) -> None:
        self._in_float32 = in_float32
        self._in_float16 = in_float16
        self._variables = variables
        self.has_float16 = in_float16 is not None

    def run(self, batch: Any, precision: Precision) -> ModelRun:  # noqa: ANN401 - whatever the function takes
        """Run a batch forward and backward."""
        function = self._in_float16 if precision.dtype == "float16" and self._in_float16 else self._in_float32
        with recorded_probes() as probes, tf.GradientTape(persistent=False) as tape:
            loss = tf.reduce_mean(arithmetic.widen(tf.convert_to_tensor(function(batch))))
            scaled = loss * precision.loss_scale
        variables = list(tape.watched_variables() if self._variables is None else self._variables)
        grads = tape.gradient(scaled, [*(probe.tensor for probe in probes), *variables])
        return eager_run(_tensors_of_probes(loss, probes, variables, grads), precision.loss_scale)


class GraphLoss(_Probed):
    """A loss that is a tensor of a TF1 graph, and perhaps another one that the graph computes in float16.

    `variables` are those to differentiate both losses by; None stands for those that are trained.
    """

    def __init__(
        self,
        in_float32: tf.Tensor,
        in_float16: tf.Tensor | None,
        variables: Sequence[tf.Variable] | None,
        session: tf.compat.v1.Session,
    ) -> None:
        self._session = session
        self.has_float16 = in_float16 is not None
        with in_float32.graph.as_default():
            self._loss_scale = tf.compat.v1.placeholder(tf.float32, [], "loss_scale_of_check")
            self._variables = tf.compat.v1.trainable_variables() if variables is None else list(variables)
            self._in_float32 = measurements(self._tensors(in_float32))
            self._in_float16 = None if in_float16 is None else measurements(self._tensors(in_float16))

    def run(self, batch: Any, precision: Precision) -> ModelRun:  # noqa: ANN401 - whatever can be fed
        """Run a batch, a `feed_dict` or None, forward and backward."""
        fetches = self._in_float16 if precision.dtype == "float16" else self._in_float32
        values = self._session.run(fetches, {**(batch or {}), self._loss_scale: precision.loss_scale})
        return run_of(values, precision.loss_scale)

    def _tensors(self, loss: tf.Tensor) -> RunTensors:
        loss = tf.reduce_mean(arithmetic.widen(loss))
        probes = probes_of_graph()
        grads = tf.gradients(loss * self._loss_scale, [*(probe.tensor for probe in probes), *self._variables])
        of_probes, of_variables = grads[: len(probes)], grads[len(probes) :]
        # The graph may hold the same model twice, in float32 and in float16: a probe belongs to the loss that depends
        # on it.
        reached = [(probe, grad) for probe, grad in zip(probes, of_probes, strict=True) if grad is not None]
        of_reached = [grad for _, grad in reached]
        return _tensors_of_probes(loss, [probe for probe, _ in reached], self._variables, [*of_reached, *of_variables])


def _tensors_of_probes(
    loss: tf.Tensor, probes: Sequence[Probe], variables: Sequence[tf.Variable], grads: Gradients
) -> RunTensors:
    """Return the tensors of a run through probes.

    The gradients are those of the scaled loss for the probes, then those for the variables.
    """
    names = told_apart(variable.name.partition(":")[0] for variable in variables)
    values = by_name((probe.name, probe.tensor) for probe in probes)
    return RunTensors(
        loss=loss,
        inputs={},
        outputs=values,
        output_gradients=by_name(zip((probe.name for probe in probes), grads, strict=False)),
        weights=by_name(zip(names, map(tf.convert_to_tensor, variables), strict=True)),
        weight_gradients=by_name(zip(names, grads[len(probes) :], strict=True)),
        cast_inputs={},
        own_outputs=values,
    )
