"""Adapters that keep what reaches them, and scalers that need to know different things of gradients."""

from collections.abc import Callable, Collection, Iterable
from typing import Any

import tensorflow as tf
from function_steps import FunctionAdapter

import tfmp
from tfmp.core.distribute import SingleProcess
from tfmp.core.step.scaler import LossScaler
from tfmp.types import Gradient, Gradients


class RecordingAdapter(FunctionAdapter):
    """Keeps with what its optimizer or its programs are asked to apply gradients, and which steps it is told of."""

    def __init__(
        self,
        *,
        has_program: bool = True,
        is_compiled: bool = False,
        overwritten: Collection[int] = (),
    ) -> None:
        super().__init__(["kernel", "bias"], lambda grads: tf.no_op())
        self.overwritten = frozenset(overwritten)
        self.dtypes = [tf.float16, tf.float32]
        self.applied: list[Any] = []
        self.steps: list[bool] = []
        self._has_program, self._is_compiled = has_program, is_compiled

    def program(self, grads: Gradients) -> "_RecordingProgram | None":
        return _RecordingProgram(self.applied) if self._has_program and len(grads) == 2 else None

    def compiled_program(self, grads: Gradients) -> "_RecordingProgram | None":
        return self.program(grads) if self._is_compiled else None

    def apply(self, grads: Gradients) -> tf.Operation:
        self.applied.append(numbers(grads))
        return tf.no_op()

    def on_step(self, applied: tf.Tensor) -> None:
        self.steps.append(bool(applied))


class _RecordingProgram:
    def __init__(self, applied: list[Any]) -> None:
        self._applied = applied

    def measure(self, grads: Gradients, loss_scale: tf.Tensor) -> list[tf.Tensor]:
        return [tf.cast(grads[0], tf.float32) / loss_scale]

    def apply(self, grads: Gradients, loss_scale: tf.Tensor, measures: Gradients) -> tf.Operation:
        self._applied.append((numbers(grads), float(loss_scale), numbers(measures)))
        return tf.no_op()


def numbers(grads: Iterable[Gradient]) -> list[float | None]:
    return [None if grad is None else float(grad) for grad in grads]


class OfTwo(SingleProcess):
    """Says that an optimizer sums the gradients of two replicas."""

    num_summed = 2


class StricterDetector(tfmp.NonFiniteDetector):
    """A user's detector, which may look at more than whether the gradients are finite."""


def halving(**settings: Any) -> tfmp.ExponentialUpdateLossScaleManager:
    """Return a manager that starts at 8 and halves the scale after each overflow."""
    return tfmp.ExponentialUpdateLossScaleManager(8, 100, decr_every_n_nan_or_inf=1, decr_ratio=0.5, **settings)


def scaler_of(manager: tfmp.LossScaleManager, detector: tfmp.OverflowDetector | None = None) -> LossScaler:
    return LossScaler(manager, detector or tfmp.NonFiniteDetector(), is_distributed=False)


#: Scalers that need to know different things of gradients.
SCALERS: dict[str, Callable[[], LossScaler]] = {
    "finite": lambda: scaler_of(halving()),
    "below 1": lambda: scaler_of(halving(min_loss_scale=0.5)),
    "saturation": lambda: scaler_of(halving(), tfmp.SaturationDetector()),
    "own detector": lambda: scaler_of(halving(), StricterDetector()),
    "largest magnitude": lambda: scaler_of(tfmp.LogMaxLossScaleManager(init_loss_scale=8)),
}
