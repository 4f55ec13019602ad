"""Steps of a `GradScaler` whose updates XLA compiles; that of one optimizer trains in tests/contract."""

import math
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from kerases import for_every_keras, gradients, kernel_and_bias, num_programs, optimizer, variable
from scaler_loops import IN_BOTH_WAYS, WAYS, sgd

import tfmp


@for_every_keras()
@IN_BOTH_WAYS
@pytest.mark.parametrize("beside", ["Adam", "tf1"])
def test_optimizers_that_step_together_each_get_their_gradients(keras: ModuleType, way: str, beside: str) -> None:
    def made() -> tuple[list[Any], list[Any]]:
        other = sgd(0.5) if beside == "tf1" else optimizer(keras, "Adam")
        return [optimizer(keras, "SGD", global_clipnorm=0.5), other], [*kernel_and_bias(keras), tf.Variable([5.0, 6.0])]

    scaler, (optimizers, trained), (plain, expected) = tfmp.GradScaler(8.0, jit_compile=True), made(), made()
    for opt, own in zip(optimizers, (trained[:2], trained[2:]), strict=True):
        scaler.prepare(opt, own)

    @WAYS[way]
    def step(*grads: tf.Tensor) -> None:
        pairs = [(scaler.scale(tf.constant(1.0)) * grad, each) for grad, each in zip(grads, trained, strict=True)]
        scaler.step_all([(optimizers[1], pairs[2:]), (optimizers[0], pairs[:2])])
        scaler.update()

    for seed, last in enumerate([None, math.inf, None]):
        grads = [*gradients(seed, last), tf.constant([0.5, 0.25])]
        step(*grads)
        if last is None:
            pairs = list(zip(grads, expected, strict=True))
            plain[0].apply_gradients(pairs[:2])
            plain[1].apply_gradients(pairs[2:])
    for one, other in zip(trained, expected, strict=True):
        np.testing.assert_allclose(one.numpy(), other.numpy(), rtol=1e-5, atol=1e-6)


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
