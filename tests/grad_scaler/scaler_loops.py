"""A training loop with a `GradScaler`, and the ways to run it, for the tests of this folder."""

from collections.abc import Callable, Sequence
from typing import Any

import kerases
import pytest
import tensorflow as tf
from gradient_forms import MODES

import tfmp

#: What makes a step of a function.
WAYS = MODES
IN_ALL_WAYS = pytest.mark.parametrize("way", WAYS)
IN_BOTH_WAYS = pytest.mark.parametrize("way", ["eager", "function"])

#: The hosts of optimizers.
HOSTS = ["tf1", *kerases.installed()]


def sgd(rate: float = 1.0, host: str = "tf1", **options: float) -> Any:
    """Return an optimizer without a wrapper; "NAME legacy" is the host of the legacy optimizers of a Keras 2."""
    if host != "tf1":
        name, *legacy = host.split()
        optimizers = kerases.installed()[name].optimizers
        return (optimizers.legacy if legacy else optimizers).SGD(rate, **options)
    if options:
        return tf.compat.v1.train.MomentumOptimizer(rate, **options)
    return tf.compat.v1.train.GradientDescentOptimizer(rate)


def counts(scaler: tfmp.GradScaler) -> list[int]:
    """Return how many steps were applied, skipped, and skipped in a row."""
    return [int(scaler.applied_steps), int(scaler.skipped_steps), int(scaler.consecutive_skipped_steps)]


class Training:
    """Two weights, 1 and 2 at first, whose gradients are 1 and a factor; SGD steps by half a gradient."""

    def __init__(self, scaler: tfmp.GradScaler | None = None, host: str = "tf1") -> None:
        self.scaler: Any = tfmp.GradScaler(1024.0) if scaler is None else scaler
        self.optimizer = sgd(0.5, host)
        self.weights = [tf.Variable(1.0, name="first"), tf.Variable(2.0, name="second")]
        self.scaler.prepare(self.optimizer, self.weights)

    def scaled(self, factor: Any = 3.0) -> list[tf.Tensor]:
        """Return the gradients of the scaled loss."""
        with tf.GradientTape() as tape:
            loss = self.scaler.scale(self.weights[0] + self.weights[1] * factor)
        return list(tape.gradient(loss, self.weights))

    def unscale(self, grads: Any) -> list[Any]:
        return self.scaler.unscale(self.optimizer, grads)

    def step(self, grads: Sequence[Any]) -> None:
        """Step with gradients, those of the last weights if there are fewer than weights."""
        self.scaler.step(self.optimizer, zip(grads, self.weights[-len(grads) :], strict=True))

    def run(self, iterate: Callable[[tf.Tensor], Any], way: str, *factors: Any) -> tuple[float, ...]:
        """Run iterations with an update at the end of each; return the state after the last."""

        def whole(factor: tf.Tensor) -> None:
            iterate(factor)
            self.scaler.update()

        run = WAYS[way](whole)
        for factor in factors:
            run(tf.constant(factor))
        return self.state()

    def state(self) -> tuple[float, ...]:
        """Return the weights, the loss scale and the number of skipped steps."""
        weights = [round(float(weight), 6) for weight in self.weights]
        return (*weights, float(self.scaler.loss_scale), int(self.scaler.skipped_steps))
