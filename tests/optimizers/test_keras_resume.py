"""A run that is stopped at any step and resumed equals the uninterrupted run bit for bit, in every Keras."""

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, TypeAlias

import numpy as np
import pytest
import tensorflow as tf
from kerases import dense_model, for_every_keras, optimizer, state, values, wrap

import tfmp

# Keras 3 passes its variables to h5py, which requests a copy from NumPy.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept a copy:DeprecationWarning")

_STEPS = 8
# The steps that overflow: a single one, two in a row, which lower the scale, and the last one.
_OVERFLOWS = (1, 4, 5, 7)

# `_Save` saves a model in a file. `_Load` loads the file into a given model or a new one, and returns that model.
_Save: TypeAlias = Callable[[Any, str], object]
_Load: TypeAlias = Callable[[ModuleType, Any, str], Any]


def _model(keras: ModuleType) -> Any:
    schedule = keras.optimizers.schedules.PolynomialDecay(0.125, 10)
    inner = optimizer(keras, "Adam", learning_rate=schedule, use_ema=True, ema_overwrite_frequency=3)
    model = dense_model(keras, wrap(inner, incr_every_n_steps=2, decr_every_n_nan_or_inf=2))
    model.optimizer.build(model.trainable_variables)
    return model


def _accumulating_model(keras: ModuleType) -> Any:
    inner = optimizer(keras, "Adam", learning_rate=keras.optimizers.schedules.PolynomialDecay(0.125, 10))
    manager = tfmp.ExponentialUpdateLossScaleManager(1024, 2, decr_every_n_nan_or_inf=1, decr_ratio=0.5)
    settings = {"accumulation_steps": 3, "overflow_drops": "micro_batch", "micro_batches_per_epoch": 5}
    model = dense_model(keras, tfmp.LossScaleOptimizer(inner, manager, **settings), run_eagerly=True)
    model.optimizer.build(model.trainable_variables)
    return model


def _step(model: Any, step: int) -> list[Any]:
    """Take a step and return the values of all weights and variables of the optimizer."""
    x = np.random.default_rng(step).random((8, 3), np.float32)
    x[0, 0] = np.inf if step in _OVERFLOWS else x[0, 0]
    model.train_on_batch(x, np.ones([8, 1]))
    return values([*model.weights, *model.optimizer.variables])


def _save_weights(model: Any, path: str) -> None:
    model.save_weights(f"{path}.weights.h5")


def _load_weights(keras: ModuleType, model: Any, path: str) -> Any:
    model.load_weights(f"{path}.weights.h5")
    return model


def _save_checkpoint(model: Any, path: str) -> None:
    tf.train.Checkpoint(model=model, optimizer=model.optimizer).write(path)


def _load_checkpoint(keras: ModuleType, model: Any, path: str) -> Any:
    tf.train.Checkpoint(model=model, optimizer=model.optimizer).read(path).assert_consumed()
    return model


def _save_keras_file(model: Any, path: str) -> None:
    model.save(f"{path}.keras")


def _load_keras_file(keras: ModuleType, model: Any, path: str) -> Any:
    return keras.saving.load_model(f"{path}.keras")


_FORMATS = [
    (_save_weights, _load_weights),
    (_save_checkpoint, _load_checkpoint),
    (_save_keras_file, _load_keras_file),
]


@pytest.mark.parametrize(("save", "load"), _FORMATS, ids=["weights", "checkpoint", "keras_file"])
@for_every_keras()
def test_run_resumes_exactly_wherever_it_stopped(
    keras: ModuleType, save: _Save, load: _Load, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model, resumed = _model(keras), _model(keras)
    after = []
    for step in range(_STEPS):
        save(model, str(tmp_path / f"model-{step}"))
        after.append(_step(model, step))
    assert state(model.optimizer, "applied_steps", "skipped_steps", "last_step_applied") == [4, 4, False]
    # The loop runs backwards, so that the model that is loaded into has always trained further than the saved one. It
    # leaves out step 0, because Keras 2 has no metrics to save before the first step.
    for stop in reversed(range(1, _STEPS)):
        resumed = load(keras, resumed, str(tmp_path / f"model-{stop}"))
        assert type(resumed.optimizer) is type(model.optimizer)
        for step in range(stop, _STEPS):
            assert _step(resumed, step) == after[step], (stop, step)
    assert "Inconsistent references" not in caplog.text


def _save_legacy_file(model: Any, path: str) -> None:
    model.save(f"{path}.h5")


def _load_legacy_file(keras: ModuleType, model: Any, path: str) -> Any:
    return keras.models.load_model(f"{path}.h5")


@pytest.mark.filterwarnings("ignore:You are saving your model as an HDF5 file:UserWarning")
@for_every_keras()
def test_run_resumes_exactly_inside_a_window(
    keras: ModuleType, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    is_keras_3 = keras.__version__.startswith("3.")
    formats = _FORMATS if is_keras_3 else [*_FORMATS, (_save_legacy_file, _load_legacy_file)]
    model = _accumulating_model(keras)
    after = []
    for step in range(6):
        # Save in the middle of the first window: after two micro-batches, one of which overflowed.
        if step == 2:
            for index, (save, _) in enumerate(formats):
                save(model, str(tmp_path / f"model-{index}"))
        after.append(_step(model, step))
    # The epoch has five micro-batches and its last window two of them; the sixth starts the next epoch.
    counts = ["applied_steps", "skipped_steps", "kept", "tried", "tried_in_epoch"]
    assert state(model.optimizer, *counts) == [2, 0, 0, 1, 1]
    for index, (_, load) in enumerate(formats):
        resumed = load(keras, _accumulating_model(keras), str(tmp_path / f"model-{index}"))
        assert state(resumed.optimizer, *counts) == [0, 0, 1, 2, 2]
        for step in range(2, 6):
            assert _step(resumed, step) == after[step], (load, step)
    assert "Inconsistent references" not in caplog.text


def _model_with_detector(keras: ModuleType) -> Any:
    detector = tfmp.SpikeDetector(window=2, max_consecutive_skips=2)
    # Of several micro-batches, so that the detector is not the only one that adds variables in `build`.
    settings = {"skip_spikes": detector, "accumulation_steps": 2}
    model = dense_model(keras, tfmp.LossScaleOptimizer(optimizer(keras, learning_rate=1e-6), **settings))
    model.optimizer.build(model.trainable_variables)
    return model


def _spiking_step(model: Any, step: int) -> list[Any]:
    x = np.random.default_rng(step // 2).random((8, 3), np.float32) * (1e3 if step in _SPIKES else 1)
    model.train_on_batch(x, np.ones([8, 1]))
    return values([*model.weights, *model.optimizer.variables])


_SPIKES = (4, 8, 11, 13, 18)


@pytest.mark.parametrize(("save", "load"), _FORMATS, ids=["weights", "checkpoint", "keras_file"])
@for_every_keras()
def test_run_with_a_spike_detector_resumes_exactly(keras: ModuleType, save: _Save, load: _Load, tmp_path: Path) -> None:
    model, resumed = _model_with_detector(keras), _model_with_detector(keras)
    after = []
    for step in range(20):
        save(model, str(tmp_path / f"model-{step}"))
        after.append(_spiking_step(model, step))
    # The third of three spikes in a row is applied.
    assert state(model.optimizer, "applied_steps", "skipped_steps", "skipped_spikes") == [6, 4, 4]
    for stop in (13, 10, 5):
        resumed = load(keras, resumed, str(tmp_path / f"model-{stop}"))
        assert resumed.optimizer.spike_detector.get_config() == model.optimizer.spike_detector.get_config()
        for step in range(stop, 20):
            assert _spiking_step(resumed, step) == after[step], (stop, step)


@for_every_keras("keras2", "tf_keras")
def test_run_resumes_exactly_from_the_checkpoint_inside_a_saved_model(keras: ModuleType, tmp_path: Path) -> None:
    model = _model(keras)
    # Save after the first of two overflows in a row, which together lower the scale.
    for step in range(5):
        _step(model, step)
    model.save(tmp_path / "saved_model")
    # Keras' load_model makes a new optimizer for this format, with or without tfmp, so the weights are loaded instead.
    resumed = _model(keras)
    resumed.load_weights(tmp_path / "saved_model" / "variables" / "variables")
    for step in range(5, _STEPS):
        assert _step(resumed, step) == _step(model, step), step
