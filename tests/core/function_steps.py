"""Takes steps with a function in place of an optimizer."""

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfmp.core.accumulation.accumulator import GradientAccumulator
from tfmp.core.adapters import OptimizerAdapter
from tfmp.core.step.choice import update_of_scaled, update_of_unscaled
from tfmp.core.step.scaler import LossScaler
from tfmp.core.step.window import accumulate
from tfmp.types import Done, Gradients


class _FunctionProgram:
    """Applies gradients, scaled or not, by a function."""

    def __init__(self, apply: Callable[[Gradients], Any]) -> None:
        self._apply = apply

    def measure(self, grads: Gradients, loss_scale: tf.Tensor) -> list[tf.Tensor]:
        del grads, loss_scale
        return []

    def apply(self, grads: Gradients, loss_scale: tf.Tensor, measures: Sequence[tf.Tensor]) -> Done:
        del loss_scale, measures
        return self._apply(grads)


class FunctionAdapter(OptimizerAdapter):
    """Applies gradients by a function, in the type that they have, also if they are still scaled."""

    def __init__(self, names: Sequence[str], apply: Callable[[Gradients], Any]) -> None:
        super().__init__(None, [])
        self.names = list(names)
        self.dtypes = [None] * len(self.names)
        self._apply = apply

    def program(self, grads: Gradients) -> _FunctionProgram | None:
        del grads
        return _FunctionProgram(self._apply)

    def apply(self, grads: Gradients) -> Done:
        return self._apply(grads)


def take_step(
    scaler: LossScaler,
    grads: Gradients,
    names: Sequence[str],
    apply: Callable[[Gradients], Any],
    *,
    are_scaled: bool = False,
    accumulator: GradientAccumulator | None = None,
) -> Done:
    adapter, facts = FunctionAdapter(names, apply), scaler.facts()
    if accumulator is not None:
        return accumulate(scaler, adapter, grads, facts, accumulator)
    update_of = update_of_scaled if are_scaled else update_of_unscaled
    return scaler.step(update_of(adapter, grads, facts))
