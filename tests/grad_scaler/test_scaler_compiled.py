"""Steps of a `GradScaler` whose update XLA compiles, of one optimizer and of several."""

import math
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from kerases import for_every_keras, gradients, kernel_and_bias, num_programs, optimizer, values, variable
from scaler_loops import IN_BOTH_WAYS, WAYS, sgd

import tfmp
from tfmp.types import Gradients


class _Loop:
    """A kernel and a bias that the scaler trains, perhaps with clipping, and the same without it."""

    def __init__(self, keras: ModuleType, name: str, norm: float | None = None, **settings: Any) -> None:
        self.scaler, self._norm = tfmp.GradScaler(8.0, jit_compile=True), norm
        self.opt, self.plain = (optimizer(keras, name, **settings) for _ in range(2))
        self.variables, self.plain_variables = kernel_and_bias(keras), kernel_and_bias(keras)
        self.scaler.prepare(self.opt, self.variables)

    def _clipped(self, grads: Gradients) -> Gradients:
        return grads if self._norm is None else tfmp.clip_by_global_norm(grads, tf.constant(self._norm))[0]

    def step(self, grads: Gradients) -> None:
        scaled = [grad * self.scaler.scale(tf.constant(1.0)) for grad in grads]
        if self._norm is not None:
            scaled = self._clipped(self.scaler.unscale(self.opt, scaled))
        self.scaler.step(self.opt, list(zip(scaled, self.variables, strict=True)))
        self.scaler.update()

    def step_plain(self, grads: Gradients) -> None:
        self.plain.apply_gradients(list(zip(self._clipped(grads), self.plain_variables, strict=True)))

    def assert_alike(self) -> None:
        for one, other in zip(self.variables, self.plain_variables, strict=True):
            np.testing.assert_allclose(one.numpy(), other.numpy(), rtol=1e-5, atol=1e-6)


@for_every_keras()
@IN_BOTH_WAYS
@pytest.mark.parametrize(
    ("name", "norm"), [("SGD", None), ("SGD", 1.5), ("SGD", math.nan), ("Adam", None), ("Adam", 1.5)]
)
def test_compiled_steps_train_as_the_bare_optimizer(keras: ModuleType, name: str, norm: float | None, way: str) -> None:
    loop = _Loop(keras, name, norm)
    step = WAYS[way](loop.step)
    # The user's clipping may make NaN of finite gradients.
    always_skipped = norm is not None and math.isnan(norm)
    for seed, last in enumerate([None, math.inf, None, math.nan, None]):
        before = values(loop.variables)
        step(gradients(seed, last))
        if last is not None or always_skipped:
            assert values(loop.variables) == before
            continue
        loop.step_plain(gradients(seed))
        loop.assert_alike()
    (report,) = loop.scaler.overflow_reports()
    assert report.steps.numpy().tolist() == ([3, 5] if always_skipped else [0, 2])
    assert float(loop.scaler.loss_scale) == (1 if always_skipped else 2)


@for_every_keras()
@IN_BOTH_WAYS
@pytest.mark.parametrize("beside", ["Adam", "tf1"])
def test_optimizers_that_step_together_each_get_their_gradients(keras: ModuleType, way: str, beside: str) -> None:
    def others() -> list[Any]:
        return [sgd(0.5) if beside == "tf1" else optimizer(keras, "Adam") for _ in range(2)]

    loop, (other, plain) = _Loop(keras, "SGD", global_clipnorm=0.5), others()
    weight, plain_weight = tf.Variable([5.0, 6.0]), tf.Variable([5.0, 6.0])
    loop.scaler.prepare(other, [weight])

    @WAYS[way]
    def step(of_kernel: tf.Tensor, of_bias: tf.Tensor, of_weight: tf.Tensor) -> None:
        scaled = [loop.scaler.scale(tf.constant(1.0)) * grad for grad in (of_kernel, of_bias, of_weight)]
        steps = [(other, [(scaled[2], weight)]), (loop.opt, list(zip(scaled, loop.variables, strict=False)))]
        loop.scaler.step_all(steps)
        loop.scaler.update()

    for seed, last in enumerate([None, math.inf, None]):
        grads = gradients(seed, last)
        step(*grads, tf.constant([0.5, 0.25]))
        if last is None:
            loop.step_plain(grads)
            plain.apply_gradients([(tf.constant([0.5, 0.25]), plain_weight)])
    loop.assert_alike()
    np.testing.assert_allclose(weight.numpy(), plain_weight.numpy(), rtol=1e-5)


@for_every_keras()
def test_large_variables_are_compiled_unless_turned_off_or_by_code_of_a_user(keras: ModuleType) -> None:
    class Own(keras.optimizers.SGD):  # type: ignore[name-defined, misc] # one of two packages
        pass

    grad = tf.ones([1024, 1024])

    def programs(*opts: Any, together: bool = False, **settings: Any) -> int:
        scaler = tfmp.GradScaler(8.0, **settings)
        steps = [(opt, [(grad, variable(keras, np.ones([1024, 1024])))]) for opt in opts]
        for opt, [(_, kernel)] in steps:
            scaler.prepare(opt, [kernel])

        def step() -> None:
            for some in [steps] if together else [[each] for each in steps]:
                scaler.step_all(some)
            scaler.update()

        return num_programs(step)

    assert programs(optimizer(keras)) == 1
    assert programs(optimizer(keras), jit_compile=False) == 0
    assert programs(Own(0.5)) == 0
    # Each optimizer has a program of its own, also if it steps together with others.
    assert programs(optimizer(keras), optimizer(keras)) == 2
    assert programs(optimizer(keras), optimizer(keras), together=True) == 2
    assert programs(optimizer(keras), Own(0.5), together=True) == 1
