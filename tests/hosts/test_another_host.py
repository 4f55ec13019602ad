"""A host that tfmp does not know, in one file: its optimizer, the adapter, the program and the front-end."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import tensorflow as tf

import tfmp
from tfmp.core.adapters import OptimizerAdapter
from tfmp.core.step.choice import update_of_scaled, update_of_unscaled
from tfmp.core.step.scaler import LossScaler
from tfmp.types import Done, Gradient, Gradients


class _Descent:
    """The host's optimizer: it has no method of TensorFlow's or Keras' optimizers, and can divide by itself."""

    def __init__(self, rate: float) -> None:
        self.rate = rate
        self.divisors: list[float] = []

    def descend(self, weights: Sequence[tf.Variable], slopes: Sequence[Gradient], divisor: Any = 1.0) -> tf.Operation:
        self.divisors.append(divisor)
        moved = zip(weights, slopes, strict=True)
        return tf.group(*(weight.assign_sub(self.rate * slope / divisor) for weight, slope in moved))


class _Adapter(OptimizerAdapter):
    def apply(self, grads: Gradients) -> Done:
        return self.optimizer.descend(self.variables, grads)

    def program(self, grads: Gradients) -> "_Program | None":
        return None if any(grad is None for grad in grads) else _Program(self)


class _Program:
    def __init__(self, adapter: _Adapter) -> None:
        self._adapter = adapter

    def measure(self, grads: Gradients, loss_scale: tf.Tensor) -> list[tf.Tensor]:
        del grads, loss_scale
        return []

    def apply(self, grads: Gradients, loss_scale: tf.Tensor, measures: Any) -> Done:
        assert not measures
        return self._adapter.optimizer.descend(self._adapter.variables, grads, loss_scale)


class _LossScaledDescent:
    """The front-end."""

    def __init__(self, inner: _Descent, manager: tfmp.LossScaleManager) -> None:
        self._inner = inner
        self._scaler = LossScaler(manager, tfmp.NonFiniteDetector(), is_distributed=False)

    def descend(self, loss: Callable[[], tf.Tensor], weights: Sequence[tf.Variable], *, late: bool) -> Done:
        with tf.GradientTape() as tape:
            scaled = self._scaler.scale(loss())
        grads, facts = tape.gradient(scaled, weights), self._scaler.facts()
        adapter = _Adapter(self._inner, weights)
        if late:
            update = update_of_scaled(adapter, grads, facts)
        else:
            update = update_of_unscaled(adapter, self._scaler.unscale(grads), facts)
        return self._scaler.step(update)


@pytest.mark.parametrize("in_function", [False, True], ids=["eager", "function"])
@pytest.mark.parametrize("late", [False, True], ids=["unscaled before", "unscaled by the optimizer"])
def test_optimizer_of_another_host_takes_and_skips_steps(in_function: bool, late: bool) -> None:
    manager = tfmp.ExponentialUpdateLossScaleManager(8, 100, decr_every_n_nan_or_inf=1, decr_ratio=0.5)
    inner, weights = _Descent(0.5), [tf.Variable(1.0), tf.Variable([2.0, 3.0])]
    opt = _LossScaledDescent(inner, manager)

    def step(factor: tf.Tensor) -> None:
        opt.descend(lambda: factor * (weights[0] + tf.reduce_sum(weights[1])), weights, late=late)

    run = tf.function(step) if in_function else step
    for factor in (1.0, math.inf, 2.0):
        run(tf.constant(factor))
    assert [weight.numpy().tolist() for weight in weights] == [-0.5, [0.5, 1.5]]
    status = manager.get_status()
    assert (float(status.loss_scale), int(status.applied_steps), int(status.skipped_steps)) == (4, 2, 1)
    if not in_function:
        assert [float(each) for each in inner.divisors] == ([8, 4] if late else [1, 1])
