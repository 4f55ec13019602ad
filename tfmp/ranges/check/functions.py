"""Checks functions of raw TensorFlow, in eager code, through their probes."""

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import tensorflow as tf

from tfmp.core.gradients import arithmetic
from tfmp.ranges.check.passes import Pass, Precision, measurements, pass_of
from tfmp.ranges.check.probe_tensors import tensors_of_probes
from tfmp.ranges.probes import recorded_probes


class Functions:
    """A function that takes a batch and computes a loss, and perhaps another one that does so in float16.

    `variables` are those to differentiate by; None stands for those that the loss depends on.
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

    def holders(self, names: Collection[str]) -> Iterator[dict[str, str]]:
        """Yield nothing: no probe holds another one."""
        return iter(())

    def run(self, batch: Any, precision: Precision) -> Pass:  # noqa: ANN401 - whatever the function takes
        """Run a batch forward and backward; no probe can be kept in float32."""
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
