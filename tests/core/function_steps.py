"""Takes steps with a function in place of an optimizer."""

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfmp.core.accumulation.accumulator import GradientAccumulator
from tfmp.core.adapters import OptimizerAdapter
from tfmp.core.gradients.origins import Change
from tfmp.core.step.scaler import LossScaler, Step
from tfmp.types import Gradients


class FunctionAdapter(OptimizerAdapter):
    """Applies float32 gradients by a function, which can also take them scaled."""

    def __init__(self, names: Sequence[str], apply: Callable[[Gradients], Any]) -> None:
        super().__init__(None, [])
        self.names = list(names)
        self.dtypes = [tf.float32] * len(self.names)
        self._apply = apply

    def unscales(self, grads: Gradients) -> bool:
        del grads
        return True

    def apply(
        self,
        grads: Gradients,
        loss_scale: tf.Tensor | None = None,
        measures: Sequence[tf.Tensor] = (),
        changes: Sequence[Change | None] = (),
    ) -> tf.Operation:
        del loss_scale, measures, changes
        return self._apply(grads)


def take_step(
    scaler: LossScaler,
    grads: Gradients,
    names: Sequence[str],
    apply: Callable[[Gradients], Any],
    *,
    are_scaled: bool = False,
    accumulator: GradientAccumulator | None = None,
) -> tf.Operation:
    adapter, distribution = FunctionAdapter(names, apply), scaler.distribution()
    if accumulator is not None:
        return scaler.accumulate(Step(adapter, grads), distribution, accumulator)
    step = scaler.step_of_scaled_grads(adapter, grads, distribution) if are_scaled else Step(adapter, grads)
    return scaler.step(step, distribution)
