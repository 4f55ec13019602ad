"""Models of keras-hub go on from files in every bit, train on two replicas, and take all callbacks at once."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import pytest
import tensorflow as tf
from keras_hub_models import MARKS, MODELS, adam, compiled, prepare, scaled, train

pytestmark = MARKS

_all_models = pytest.mark.parametrize("model", MODELS)


def _compiled(model: str, seed: int) -> Any:
    # No file holds the state of Dropout's random numbers, with tfmp or without.
    return compiled(model, scaled(adam(model)), seed=seed)


def _from_keras_file(model: str, directory: Path) -> Any:
    # A task's file does not say what it was compiled with, and a backbone's has one policy for all layers.
    loaded = keras.saving.load_model(directory / "model.keras", compile=False)
    prepare(loaded, model, scaled(adam(model)))
    loaded.load_weights(directory / "model.keras")
    return loaded


def _from_weights_file(model: str, directory: Path) -> Any:
    new = _compiled(model, seed=9)
    new.load_weights(directory / "model.weights.h5")
    return new


def _from_checkpoint(model: str, directory: Path) -> Any:
    new = _compiled(model, seed=9)
    path = tf.train.latest_checkpoint(directory)
    tf.train.Checkpoint(model=new, optimizer=new.optimizer).restore(path).assert_consumed()
    return new


_WAYS: dict[str, Callable[[str, Path], Any]] = {
    "keras": _from_keras_file,
    "weights": _from_weights_file,
    "checkpoint": _from_checkpoint,
}


@_all_models
@pytest.mark.feature("resume")
# Keras, of the optimizer that a task makes for itself before it is compiled.
@pytest.mark.filterwarnings("ignore:Skipping variable loading for optimizer:UserWarning")
# TensorFlow and Keras, where T5's masks are made in float16, until its level is set again.
@pytest.mark.filterwarnings("ignore:overflow encountered in cast:RuntimeWarning")
@pytest.mark.filterwarnings("ignore:Layer .* looks like it has unbuilt state:UserWarning")
# Keras, of a layer in a model that a layer within another model in it is, too.
@pytest.mark.filterwarnings("ignore:Skipping nested container at '_operations_by_depth:UserWarning")
def test_training_goes_on_from_files_in_every_bit(model: str, tmp_path: Path) -> None:
    trained = _compiled(model, seed=2)
    train(trained, model, 3)
    trained.save(tmp_path / "model.keras")
    trained.save_weights(tmp_path / "model.weights.h5")
    tf.train.Checkpoint(model=trained, optimizer=trained.optimizer).save(tmp_path / "checkpoint")
    expected = train(trained, model, 3, first=3), _values(trained)
    for way, load in _WAYS.items():
        loaded = load(model, tmp_path)
        assert (train(loaded, model, 3, first=3), _values(loaded)) == expected, way


def _values(trained: Any) -> list[bytes]:
    return [variable.numpy().tobytes() for variable in [*trained.variables, *trained.optimizer.variables]]
