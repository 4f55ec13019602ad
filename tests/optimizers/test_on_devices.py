"""Steps in mixed_float16 on a CPU, and on a GPU if TensorFlow sees one."""

from collections.abc import Iterator
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from gradient_forms import MODES, in_every_mode
from kerases import SCALE, for_every_keras, kernel_and_bias, optimizer, take_step, values, wrap

import tfmp
from tfmp import gpus

#: The gradients of two steps that are applied, and between them of one that overflows.
_GRADIENTS = [
    [[[1.0, 2.0], [4.0, 8.0]], [0.5, 0.25]],
    [[[1.0, 2.0], [4.0, np.inf]], [0.5, 0.25]],
    [[[2.0, 2.0], [2.0, 2.0]], [4.0, 4.0]],
]
_AFTER = [[[-0.5, 0], [0, -1]], [2.75, 3.875]]


@pytest.fixture(params=["CPU", "GPU"], autouse=True)
def device(request: pytest.FixtureRequest) -> Iterator[str]:
    """Make variables and run ops on a device of the kind, and return the end of its name."""
    if not tf.config.list_logical_devices(request.param):
        pytest.skip(f"needs a GPU: {gpus.none_visible()}")
    with tf.device(f"{request.param}:0"):
        yield f"device:{request.param}:0"


def _places(variables: list[Any]) -> set[str]:
    tensors = [variable if isinstance(variable, tf.Variable) else variable.value for variable in variables]
    return {tensor.device.rpartition("/")[2] for tensor in tensors}


@pytest.mark.parametrize("jit_compile", [False, True])
@in_every_mode
@for_every_keras()
def test_step_of_the_wrapper_changes_weights_where_they_are(
    keras: ModuleType, mode: str, jit_compile: bool, device: str
) -> None:
    variables = kernel_and_bias(keras)
    opt = tfmp.LossScaleOptimizer(
        optimizer(keras), tfmp.ExponentialUpdateLossScaleManager(SCALE, 1000, 1, 2.0, 0.5), jit_compile=jit_compile
    )
    opt.build(variables)
    step = MODES[mode](lambda *grads: take_step(opt, variables, grads))
    for grads in _GRADIENTS:
        step(*(tf.constant(grad) for grad in grads))
    assert values(variables) == _AFTER
    assert (float(opt.loss_scale), int(opt.applied_steps), int(opt.skipped_steps)) == (SCALE / 2, 2, 1)
    assert _places(variables) == {device}


@in_every_mode
@for_every_keras()
def test_step_of_grad_scaler_changes_weights_where_they_are(keras: ModuleType, mode: str, device: str) -> None:
    variables, opt = kernel_and_bias(keras), optimizer(keras)
    scaler = tfmp.GradScaler(init_scale=SCALE)
    scaler.prepare(opt, variables)

    def step(*grads: tf.Tensor) -> None:
        with tf.GradientTape() as tape:
            sums = [tf.reduce_sum(variable * grad) for variable, grad in zip(variables, grads, strict=True)]
            loss = scaler.scale(tf.add_n(sums))
        scaler.step(opt, zip(tape.gradient(loss, variables), variables, strict=True))
        scaler.update()

    run = MODES[mode](step)
    for grads in _GRADIENTS:
        run(*(tf.constant(grad) for grad in grads))
    assert values(variables) == _AFTER
    assert _places(variables) == {device}


@pytest.mark.parametrize("jit_compile", [False, True])
@for_every_keras()
def test_fit_in_float16_skips_the_batch_that_overflows(keras: ModuleType, jit_compile: bool, device: str) -> None:
    layer = keras.layers.Dense(1, use_bias=False, kernel_initializer="ones", dtype="mixed_float16")
    model = keras.Sequential([keras.Input([2]), layer])
    model.compile(wrap(optimizer(keras, learning_rate=2.0**-6)), "mse", jit_compile=jit_compile)
    # Float16 holds neither 2**17 nor the gradient of the second batch.
    x = np.float32([[1, 2], [2.0**17, 2], [2, 1]])
    model.fit(x, np.float32([[1], [1], [1]]), batch_size=1, shuffle=False, verbose=0)
    opt = model.optimizer
    assert (float(opt.loss_scale), int(opt.applied_steps), int(opt.skipped_steps)) == (SCALE / 2, 2, 1)
    # The errors are 2 and 1.75, and each weight moves by 2 * error * input / 64.
    assert values(model.weights) == [[[1 - 4 / 64 - 7 / 64], [1 - 8 / 64 - 3.5 / 64]]]
    assert _places(model.weights) == {device}
