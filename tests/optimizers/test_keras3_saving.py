"""Saving and resuming Keras 3 models with the wrapper."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfmp

if not keras.__version__.startswith("3."):
    pytest.skip(f"needs Keras 3, this is Keras {keras.__version__}", allow_module_level=True)

# Keras hands its variables to h5py, which asks NumPy for a copy.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept a copy:DeprecationWarning")


def _model() -> keras.Model:
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input([3]), keras.layers.Dense(4, activation="relu"), keras.layers.Dense(1)])
    manager = tfmp.ExponentialUpdateLossScaleManager(1024, 4, decr_every_n_nan_or_inf=2, decr_ratio=0.5)
    model.compile(tfmp.LossScaleOptimizer(keras.optimizers.Adam(0.125, use_ema=True), manager), "mse")
    return model


def _train(model: keras.Model, steps: range) -> list[list[Any]]:
    """Take the steps, of which some overflow; return everything after each."""
    seen = []
    for step in steps:
        x = np.random.default_rng(step).random((8, 3), np.float32)
        if step % 3 == 1:
            x[step % 8, 0] = np.inf
        model.train_on_batch(x, np.ones([8, 1]))
        seen.append([variable.numpy().tolist() for variable in [*model.weights, *model.optimizer.variables]])
    return seen


def _by_keras_file(model: keras.Model, path: Path) -> keras.Model:
    model.save(path / "model.keras")
    return keras.saving.load_model(path / "model.keras")


def _by_weights_file(model: keras.Model, path: Path) -> keras.Model:
    model.save_weights(path / "model.weights.h5")
    restored = _model()
    restored.optimizer.build(restored.trainable_variables)
    restored.load_weights(path / "model.weights.h5")
    return restored


def _by_checkpoint(model: keras.Model, path: Path) -> keras.Model:
    saved = tf.train.Checkpoint(model=model, optimizer=model.optimizer).save(path / "checkpoint")
    restored = _model()
    restored.optimizer.build(restored.trainable_variables)
    tf.train.Checkpoint(model=restored, optimizer=restored.optimizer).restore(saved).assert_consumed()
    return restored


@pytest.mark.parametrize("save_and_load", [_by_keras_file, _by_weights_file, _by_checkpoint])
@pytest.mark.parametrize("at", [2, 5, 8])
def test_resumed_run_equals_the_uninterrupted_one(
    tmp_path: Path, save_and_load: Callable[[keras.Model, Path], keras.Model], at: int
) -> None:
    uninterrupted = _train(_model(), range(12))
    model = _model()
    _train(model, range(at))
    resumed = save_and_load(model, tmp_path)
    assert _train(resumed, range(at, 12)) == uninterrupted[at:]


def test_config_makes_the_same_optimizer_again() -> None:
    manager = tfmp.ExponentialUpdateLossScaleManager(1024, 4, 3, 2, 0.25)
    opt = tfmp.LossScaleOptimizer(keras.optimizers.Adam(0.125), manager, name="mine")
    again = type(opt).from_config(opt.get_config())
    assert again.get_config() == opt.get_config()
    assert (again.name, float(again.inner_optimizer.learning_rate.numpy())) == ("mine", 0.125)
    assert again._loss_scale_manager.get_config() == {
        "init_loss_scale": 1024,
        "incr_every_n_steps": 4,
        "decr_every_n_nan_or_inf": 3,
        "incr_ratio": 2,
        "decr_ratio": 0.25,
    }


def test_fixed_manager_is_saved_too(tmp_path: Path) -> None:
    opt = tfmp.LossScaleOptimizer(keras.optimizers.SGD(0.5), tfmp.FixedLossScaleManager(256))
    model = keras.Sequential([keras.Input([1]), keras.layers.Dense(1)])
    model.compile(opt, "mse")
    model.train_on_batch(np.ones([1, 1]), np.ones([1, 1]))
    assert float(_by_keras_file(model, tmp_path).optimizer.loss_scale) == 256
