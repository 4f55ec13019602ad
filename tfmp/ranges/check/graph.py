"""Checks the loss of a TF1 graph through the probes of that graph."""

from collections.abc import Collection, Iterator, Sequence
from typing import Any

import tensorflow as tf

from tfmp.core.gradients import arithmetic
from tfmp.ranges.check.passes import Pass, PassTensors, Precision, measurements, pass_of
from tfmp.ranges.check.probe_tensors import tensors_of_probes
from tfmp.ranges.probes import probes_of_graph


class GraphLoss:
    """A loss that is a tensor of a TF1 graph, and perhaps another one that the graph computes in float16.

    `variables` are those to differentiate both losses by; None stands for those that are trained.
    """

    keeps_float32 = False

    def __init__(
        self,
        in_float32: tf.Tensor,
        in_float16: tf.Tensor | None,
        variables: Sequence[tf.Variable] | None,
        session: tf.compat.v1.Session,
    ) -> None:
        self._session = session
        with in_float32.graph.as_default():
            self._loss_scale = tf.compat.v1.placeholder(tf.float32, [], "loss_scale_of_check")
            self._variables = tf.compat.v1.trainable_variables() if variables is None else list(variables)
            self._in_float32 = measurements(self._tensors(in_float32))
            self._in_float16 = None if in_float16 is None else measurements(self._tensors(in_float16))

    @property
    def has_float16(self) -> bool:
        """Whether the graph has the loss in float16, too."""
        return self._in_float16 is not None

    def holders(self, names: Collection[str]) -> Iterator[dict[str, str]]:
        """Yield nothing: no probe holds another one."""
        return iter(())

    def run(self, batch: Any, precision: Precision) -> Pass:  # noqa: ANN401 - whatever can be fed
        """Run a batch, a `feed_dict` or None, forward and backward; no probe can be kept in float32."""
        fetches = self._in_float16 if precision.dtype == "float16" else self._in_float32
        values = self._session.run(fetches, {**(batch or {}), self._loss_scale: precision.loss_scale})
        return pass_of(values, precision.loss_scale)

    def _tensors(self, loss: tf.Tensor) -> PassTensors:
        loss = tf.reduce_mean(arithmetic.widen(loss))
        probes = probes_of_graph()
        grads = tf.gradients(loss * self._loss_scale, [*(probe.tensor for probe in probes), *self._variables])
        # The graph may hold the same model twice, in float32 and in float16: a probe belongs to the loss that depends
        # on it.
        reached = [index for index, _ in enumerate(probes) if grads[index] is not None]
        of_probes = [grads[index] for index in reached]
        return tensors_of_probes(
            loss, [probes[index] for index in reached], self._variables, [*of_probes, *grads[len(probes) :]]
        )
