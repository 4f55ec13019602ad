"""Steps of the core with adapters that keep what reaches them, and scalers that need to know different things."""

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import tensorflow as tf

import tfmp
from tfmp.core.accumulation import GradientAccumulator
from tfmp.core.adapter import OptimizerAdapter
from tfmp.core.distribute import Distribution, SingleProcess
from tfmp.core.overflow.found import Checked
from tfmp.core.step.scaler import Facts, LossScaler
from tfmp.core.step.step import accumulate, step_of, take
from tfmp.types import Done, Gradient, Gradients


class FunctionAdapter(OptimizerAdapter):
    """Applies gradients by a function, in the type that they have, also if they are still scaled."""

    def __init__(self, names: Sequence[str], apply: Callable[[Gradients], Any]) -> None:
        super().__init__(None, [])
        self.names = list(names)
        self.dtypes = [None] * len(self.names)
        self._apply = apply

    def program(self, grads: Gradients) -> "_Program | None":
        return _Program(lambda grads, *_: self._apply(grads), clips=False)

    def apply(self, grads: Gradients) -> Done:
        return self._apply(grads)


class _Program:
    """A program that hands on what it is to apply to a function."""

    def __init__(self, run: Callable[[Gradients, tf.Tensor, tf.Tensor | None], Any], *, clips: bool) -> None:
        self.run = run
        self.clips = clips


class RecordingAdapter(FunctionAdapter):
    """Keeps with what its optimizer or its programs are asked to apply gradients, and which steps it is told of."""

    def __init__(self, *, has_program: bool = True, clips: bool = False, overwritten: Collection[int] = ()) -> None:
        super().__init__(["kernel", "bias"], lambda grads: self.applied.append(numbers(grads)))
        self.overwritten = frozenset(overwritten)
        self.dtypes = [tf.float16, tf.float32]
        self.applied: list[Any] = []
        self.steps: list[bool] = []
        self._has_program, self._clips = has_program, clips

    def program(self, grads: Gradients) -> _Program | None:
        def apply(grads: Gradients, loss_scale: tf.Tensor, norm: tf.Tensor | None) -> None:
            self.applied.append((numbers(grads), float(loss_scale), *numbers([norm])))

        return _Program(apply, clips=self._clips) if self._has_program and len(grads) == 2 else None

    def on_step(self, applied: tf.Tensor) -> None:
        self.steps.append(bool(applied))


def numbers(grads: Iterable[Gradient]) -> list[float | None]:
    return [None if grad is None else float(grad) for grad in grads]


class OfTwo(SingleProcess):
    """Says that an optimizer sums the gradients of two replicas, which are alike."""

    num_summed = 2

    def sums(self, grads: Gradients, names: Sequence[str]) -> list[Gradient]:
        assert list(names) == ["kernel", "bias"]
        return [None if grad is None else grad * 2 for grad in grads]


def halving(**settings: Any) -> tfmp.ExponentialUpdateLossScaleManager:
    """Return a manager that starts at 8 and halves the scale after each overflow."""
    return tfmp.ExponentialUpdateLossScaleManager(8, 100, decr_every_n_nan_or_inf=1, decr_ratio=0.5, **settings)


def scaler_of(
    manager: tfmp.LossScaleManager, detector: tfmp.OverflowDetector | None = None, **settings: Any
) -> LossScaler:
    return LossScaler(manager, detector or tfmp.NonFiniteDetector(), **{"is_distributed": False} | settings)


class _StricterDetector(tfmp.NonFiniteDetector):
    """A user's detector, which may look at more than whether the gradients are finite."""


class _OfOneReplica(tfmp.NonFiniteDetector):
    ignores_sums = True


#: Scalers that need to know different things of gradients.
SCALERS: dict[str, Callable[[], LossScaler]] = {
    "finite": lambda: scaler_of(halving()),
    "below 1": lambda: scaler_of(halving(min_loss_scale=0.5)),
    "saturation": lambda: scaler_of(halving(), tfmp.SaturationDetector()),
    "own detector": lambda: scaler_of(halving(), _StricterDetector()),
    "ignores sums": lambda: scaler_of(halving(), _OfOneReplica()),
    "largest magnitude": lambda: scaler_of(tfmp.LogMaxLossScaleManager(init_loss_scale=8)),
}


def run(
    scaler: LossScaler,
    adapter: OptimizerAdapter,
    grads: Gradients,
    *,
    are_scaled: bool = False,
    known: Checked | None = None,
    distribution: Distribution | None = None,
) -> Done:
    """Take a step with gradients of a scaled loss, or in true magnitude; `known` is what is known of the latter."""
    facts = Facts(scaler, distribution or scaler.distribution(), scaler.manager.get_loss_scale())
    return take(step_of(adapter, grads, facts, are_scaled=are_scaled, checked=known))


def take_step(
    scaler: LossScaler,
    grads: Gradients,
    names: Sequence[str],
    apply: Callable[[Gradients], Any],
    *,
    are_scaled: bool = False,
    accumulator: GradientAccumulator | None = None,
) -> Done:
    """Take a step with a function in place of an optimizer, perhaps at the end of a window of micro-batches."""
    adapter = FunctionAdapter(names, apply)
    if accumulator is not None:
        return accumulate(adapter, grads, scaler.facts(), accumulator)
    return run(scaler, adapter, grads, are_scaled=are_scaled)
