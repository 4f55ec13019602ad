"""Continuing a run of Keras' own LossScaleOptimizer with tfmp's, in every Keras."""

import math
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, TypeAlias

import numpy as np
import pytest
import tensorflow as tf
from kerases import (
    dense_model,
    fit_linear,
    for_every_keras,
    kernel_and_bias,
    linear_model,
    optimizer,
    state,
    values,
    wrap,
)

import tfmp

# Keras 3 passes its variables to h5py, which requests a copy from NumPy.
pytestmark = [
    pytest.mark.essential,
    pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept a copy:DeprecationWarning"),
]

# A function that saves a model and returns a model that was loaded from the file.
_Restore: TypeAlias = Callable[[ModuleType, Any, Path], Any]

_MAX = float(np.finfo(np.float32).max)


def _model(keras: ModuleType, **settings: Any) -> Any:
    schedule = keras.optimizers.schedules.PolynomialDecay(0.125, 10)
    settings = {"initial_scale": 1024, "dynamic_growth_steps": 4} | settings
    inner = optimizer(keras, "Adam", learning_rate=schedule)
    return dense_model(keras, keras.mixed_precision.LossScaleOptimizer(inner, **settings), run_eagerly=True)


def _take_over(model: Any) -> None:
    model.compile(tfmp.LossScaleOptimizer.from_keras(model.optimizer), "mse", run_eagerly=True)


def _scale_and_count(opt: Any) -> list[Any]:
    if isinstance(opt, tfmp.LossScaleOptimizer):
        return state(opt, "loss_scale", "good_steps")
    # The state is in two variables of Keras 3's wrapper, and in two properties of Keras 2's that `variables` omits.
    names = ("dynamic_scale", "step_counter") if hasattr(opt, "step_counter") else ("loss_scale", "dynamic_counter")
    return [getattr(opt, name).numpy() for name in names]


def _train(model: Any, steps: int, overflows: float, seed: int = 0) -> list[Any]:
    """Take steps, some of which overflow; return the values that both wrappers have after each."""
    rng = np.random.default_rng(seed)
    seen = []
    for _ in range(steps):
        x = rng.random((8, 3), np.float32)
        if rng.random() < overflows:
            x[0, 0] = np.inf
        model.train_on_batch(x, np.ones([8, 1]))
        opt = model.optimizer
        seen.append([values([*model.weights, *opt.inner_optimizer.variables]), _scale_and_count(opt)])
    return seen


@for_every_keras()
def test_run_after_takeover_equals_that_of_keras_own_wrapper_step_for_step(keras: ModuleType) -> None:
    stock, ours = _model(keras), _model(keras)
    _take_over(ours)
    expected = _train(stock, 30, overflows=0.2)
    assert _train(ours, 30, overflows=0.2) == expected
    assert {scale for _, (scale, _) in expected} >= {1024, 2048, 4096}
    assert int(ours.optimizer.skipped_steps) == 3


def _keras_file(keras: ModuleType, model: Any, path: Path) -> Any:
    model.save(path / "model.keras")
    return keras.saving.load_model(path / "model.keras")


def _weights_file(keras: ModuleType, model: Any, path: Path) -> Any:
    model.save_weights(path / "model.weights.h5")
    restored = _model(keras)
    restored.optimizer.build(restored.trainable_variables)
    restored.load_weights(path / "model.weights.h5")
    return restored


def _checkpoint(keras: ModuleType, model: Any, path: Path) -> Any:
    saved = tf.train.Checkpoint(model=model, optimizer=model.optimizer).save(path / "checkpoint")
    restored = _model(keras)
    restored.optimizer.build(restored.trainable_variables)
    tf.train.Checkpoint(model=restored, optimizer=restored.optimizer).restore(saved).assert_consumed()
    return restored


@pytest.mark.parametrize("restore", [_keras_file, _weights_file, _checkpoint])
@for_every_keras()
def test_saved_run_continues_as_it_would_with_keras_own_wrapper(
    keras: ModuleType, restore: _Restore, tmp_path: Path
) -> None:
    model = _model(keras)
    _train(model, 6, overflows=0.25)
    stock, ours = restore(keras, model, tmp_path), restore(keras, model, tmp_path)
    _take_over(ours)
    assert _scale_and_count(ours.optimizer) == _scale_and_count(stock.optimizer)
    if restore is _checkpoint or keras.__version__.startswith("3."):
        # Keras 2's own wrapper does not write the scale to these files.
        assert _scale_and_count(stock.optimizer) == _scale_and_count(model.optimizer)
    # Before Keras 3.9, Keras' own wrapper has a count of its own, so the inner optimizer's is compared.
    assert int(ours.optimizer.iterations) == int(model.optimizer.inner_optimizer.iterations)
    assert _train(ours, 6, overflows=0.25, seed=2) == _train(stock, 6, overflows=0.25, seed=2)


@for_every_keras("keras3")
def test_weights_file_of_keras_own_wrapper_loads_into_a_wrapped_model(keras: ModuleType, tmp_path: Path) -> None:
    model = _model(keras)
    _train(model, 6, overflows=0.25)
    model.save_weights(tmp_path / "model.weights.h5")
    inner = optimizer(keras, "Adam", learning_rate=keras.optimizers.schedules.PolynomialDecay(0.125, 10))
    ours = dense_model(keras, wrap(inner, init_loss_scale=8, incr_every_n_steps=4), run_eagerly=True)
    ours.optimizer.build(ours.trainable_variables)
    ours.load_weights(tmp_path / "model.weights.h5")
    assert _scale_and_count(ours.optimizer) == _scale_and_count(model.optimizer)
    assert _train(ours, 6, overflows=0.25, seed=2) == _train(model, 6, overflows=0.25, seed=2)


@for_every_keras("keras2", "tf_keras")
def test_weights_file_of_keras_own_wrapper_lacks_only_the_scale(keras: ModuleType, tmp_path: Path) -> None:
    model, ours = _model(keras), _model(keras, initial_scale=8)
    _train(model, 6, overflows=0.25)
    model.save_weights(tmp_path / "model.weights.h5")
    _take_over(ours)
    ours.optimizer.build(ours.trainable_variables)
    ours.load_weights(tmp_path / "model.weights.h5")
    variables = ours.optimizer.inner_optimizer.variables
    assert values([*ours.weights, *variables]) == values([*model.weights, *model.optimizer.variables])
    assert (float(ours.optimizer.loss_scale), int(ours.optimizer.iterations)) == (8, 6)


@pytest.mark.parametrize("built", [False, True])
@pytest.mark.parametrize(("scale", "allowed"), [(0.0, 1.0), (0.5, 1.0), (math.inf, _MAX)])
@for_every_keras()
def test_scale_out_of_bounds_becomes_the_nearest_allowed(
    keras: ModuleType, scale: float, allowed: float, built: bool
) -> None:
    stock = keras.mixed_precision.LossScaleOptimizer(optimizer(keras), initial_scale=scale)
    if built:
        stock.build(kernel_and_bias(keras))
    assert float(tfmp.LossScaleOptimizer.from_keras(stock).loss_scale) == allowed


@for_every_keras("keras2", "tf_keras")
def test_fixed_scale_stays_fixed_and_overflows_are_skipped(keras: ModuleType) -> None:
    stock = keras.mixed_precision.LossScaleOptimizer(optimizer(keras), dynamic=False, initial_scale=256)
    opt = tfmp.LossScaleOptimizer.from_keras(stock)
    model = linear_model(keras, opt)
    fit_linear(model, [1, math.inf, 1])
    assert values(model.weights) == [[[-1]]]
    assert (float(opt.loss_scale), int(opt.skipped_steps), int(opt.iterations)) == (256, 1, 3)
    assert "FixedLossScaleManager" in str(opt.get_config()["loss_scale_manager"])


@for_every_keras("keras2", "tf_keras")
def test_iterations_continue_to_count_skipped_steps_after_takeover(keras: ModuleType, tmp_path: Path) -> None:
    model = _model(keras)
    _take_over(model)
    _train(model, 6, overflows=0.5)
    model = _keras_file(keras, model, tmp_path)
    _train(model, 6, overflows=0.5)
    assert int(model.optimizer.iterations) == 12
    assert int(model.optimizer.skipped_steps) > 3
