"""`fit`, `train_on_batch` and callbacks with the wrapper, in every Keras."""

import math
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from kerases import (
    SCALE,
    dense_model,
    fit_linear,
    for_every_keras,
    linear_model,
    optimizer,
    values,
    wrap,
)

pytestmark = pytest.mark.essential


def _check_learning(keras: ModuleType, jit_compile: bool | str) -> None:
    opt = wrap(optimizer(keras, "Adam", learning_rate=0.125), init_loss_scale=2.0**30)
    model = dense_model(keras, opt, policy="mixed_float16", jit_compile=jit_compile)
    x = np.random.default_rng(0).random((32, 3), np.float32)
    history = model.fit(x, x.sum(axis=1, keepdims=True), batch_size=8, epochs=20, verbose=0).history["loss"]
    assert history[-1] < history[0] / 4
    assert int(opt.skipped_steps) > 5
    assert int(opt.applied_steps) + int(opt.skipped_steps) == 80
    assert int(opt.iterations) == int(opt.applied_steps)
    assert float(opt.loss_scale) == 2.0 ** (30 - int(opt.skipped_steps))


@pytest.mark.parametrize("jit_compile", [False, True])
@for_every_keras()
def test_fit_with_a_too_high_initial_scale_skips_steps_and_learns(keras: ModuleType, jit_compile: bool) -> None:
    _check_learning(keras, jit_compile)


@for_every_keras("keras3")
def test_fit_learns_if_keras_decides_whether_to_compile(keras: ModuleType) -> None:
    _check_learning(keras, "auto")


# Keras 3.5 warns by itself with steps_per_execution.
@pytest.mark.filterwarnings("ignore:Your input ran out of data:UserWarning")
@pytest.mark.parametrize("settings", [{}, {"run_eagerly": True}, {"steps_per_execution": 2}], ids=str)
@for_every_keras()
def test_fit_skips_the_steps_that_overflow(keras: ModuleType, settings: dict[str, Any]) -> None:
    opt = wrap(optimizer(keras, momentum=0.5))
    model = linear_model(keras, opt, **settings)
    fit_linear(model, [1, math.inf, 2, math.nan, -math.inf, -4])
    plain_model = linear_model(keras, optimizer(keras, momentum=0.5), **settings)
    fit_linear(plain_model, [1, 2, -4])
    assert values(model.weights) == values(plain_model.weights)
    assert (float(opt.loss_scale), int(opt.applied_steps), int(opt.skipped_steps)) == (SCALE / 8, 3, 3)
    assert (bool(opt.last_step_finite), int(opt.consecutive_skipped_steps), int(opt.iterations)) == (True, 0, 3)


@for_every_keras()
def test_moving_average_at_the_end_of_fit_covers_the_applied_steps(keras: ModuleType) -> None:
    options = {"use_ema": True, "ema_momentum": 0.5}
    model, plain_model = (
        linear_model(keras, wrap(optimizer(keras, **options))),
        linear_model(keras, optimizer(keras, **options)),
    )
    fit_linear(model, [1, math.inf, 2, math.nan])
    fit_linear(plain_model, [1, 2])
    assert values(model.weights) == values(plain_model.weights)
    assert values(model.weights) != [[[-1.5]]]


@for_every_keras()
def test_train_on_batch_takes_a_step(keras: ModuleType) -> None:
    model = linear_model(keras, wrap(optimizer(keras)))
    for target in (2.0, math.inf):
        model.train_on_batch(np.ones([1, 1]), np.full([1, 1], target))
    assert values(model.weights) == [[[-1]]]
    assert (int(model.optimizer.applied_steps), int(model.optimizer.skipped_steps)) == (1, 1)


@for_every_keras()
def test_compile_under_mixed_float16_does_not_wrap_again(keras: ModuleType) -> None:
    keras.mixed_precision.set_global_policy("mixed_float16")
    try:
        opt = wrap(optimizer(keras))
        model = linear_model(keras, opt)
    finally:
        keras.mixed_precision.set_global_policy("float32")
    assert model.optimizer is opt
    fit_linear(model, [2])
    assert values(model.weights) == [[[-1]]]


# Keras 3 converts the learning rate, a variable, to an array.
@pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept a copy:DeprecationWarning")
@for_every_keras()
def test_callback_sets_the_learning_rate_of_the_inner_optimizer(keras: ModuleType) -> None:
    model = linear_model(keras, wrap(optimizer(keras)))
    halve = keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate / 2)
    fit_linear(model, [1], epochs=2, callbacks=[halve])
    assert values(model.weights) == [[[-0.25 - 0.125]]]


@pytest.mark.filterwarnings("ignore:The model does not have any trainable weights:UserWarning")
@for_every_keras()
def test_model_without_trainable_weights_takes_no_step(keras: ModuleType) -> None:
    model = keras.Sequential([keras.Input([1]), keras.layers.Rescaling(2.0)])
    model.compile(wrap(optimizer(keras)), "mse")
    model.fit(np.ones([2, 1]), np.ones([2, 1]), verbose=0)
    assert (int(model.optimizer.iterations), int(model.optimizer.applied_steps)) == (0, 0)
