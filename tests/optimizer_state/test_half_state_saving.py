"""Optimizers with half-precision state in files: the types, the random numbers and the settings come back."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from half_training import adam, classification, model, state
from kerases import wrap

import tfmp

if not keras.__version__.startswith("3."):
    pytest.skip(f"needs Keras 3, this is Keras {keras.__version__}", allow_module_level=True)

# Keras, where it saves weights, with NumPy 2.
pytestmark = [
    pytest.mark.essential,
    pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept a copy keyword:DeprecationWarning"),
]

_LOADS = """
import keras, sys, tfmp
model = keras.saving.load_model(sys.argv[1])
half = model.optimizer.inner_optimizer
print(type(half).__name__, half.get_config()["slots"], half.get_config()["seed"])
print({variable.dtype for variable in half.variables[2:]}, float(half.learning_rate))
"""


def _model(optimizer: Any) -> Any:
    """Make the model without XLA, which takes long to compile a step, and of which no file holds anything."""
    return model(keras, optimizer, jit_compile=False)


def _fit(trained: Any, epochs: int) -> None:
    points, sides = classification()
    trained.fit(points, sides, batch_size=64, epochs=epochs, shuffle=False, verbose=0)


def _all(trained: Any) -> list[bytes]:
    return [*(weight.numpy().tobytes() for weight in trained.weights), *state(trained.optimizer)]


def test_loaded_model_trains_on_as_if_it_had_not_been_saved(tmp_path: Path) -> None:
    trained = model(keras, wrap(adam(keras, seed=3)))
    _fit(trained, 2)
    trained.save(tmp_path / "half.keras")
    loaded = keras.saving.load_model(tmp_path / "half.keras")
    assert _all(loaded) == _all(trained)
    for each in (trained, loaded):
        _fit(each, 2)
    assert _all(loaded) == _all(trained)


def test_fresh_process_loads_it(tmp_path: Path) -> None:
    trained = _model(wrap(adam(keras, seed=3)))
    _fit(trained, 1)
    trained.save(tmp_path / "half.keras")
    done = subprocess.run(
        [sys.executable, "-c", _LOADS, tmp_path / "half.keras"],
        capture_output=True,
        text=True,
        timeout=120,
        env={name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"},
        check=False,
    )
    assert done.stdout.splitlines() == [
        "HalfStateAdam {'momentum': 'bfloat16', 'velocity': 'bfloat16'} 3",
        "{'bfloat16'} 0.125",
    ], done.stderr


def test_checkpoint_keeps_the_types(tmp_path: Path) -> None:
    trained = _model(wrap(adam(keras)))
    _fit(trained, 2)
    path = tf.train.Checkpoint(model=trained, optimizer=trained.optimizer).save(tmp_path / "half")
    resumed = _model(wrap(adam(keras)))
    resumed.optimizer.build(resumed.trainable_variables)
    tf.train.Checkpoint(model=resumed, optimizer=resumed.optimizer).restore(path).assert_consumed()
    assert _all(resumed) == _all(trained)


def test_exported_step_rounds_as_the_optimizer_does(tmp_path: Path) -> None:
    opt, weight = adam(keras), keras.Variable(np.ones([3], np.float32))
    opt.build([weight])
    exported = tf.Module()
    exported.variables_of_all = [variable.value for variable in (weight, *opt.variables)]
    exported.step = tf.function(
        lambda grad: opt.apply([grad], [weight]), input_signature=[tf.TensorSpec([3])], autograph=False
    )
    tf.saved_model.save(exported, tmp_path / "step")
    loaded = tf.saved_model.load(tmp_path / "step")
    for number in range(3):
        grad = tf.random.stateless_normal([3], [0, number])
        opt.apply([grad], [weight])
        loaded.step(grad)
    for one, other in zip(loaded.variables_of_all, exported.variables_of_all, strict=True):
        assert one.numpy().tobytes() == other.numpy().tobytes()


def test_weights_of_float32_state_are_taken_over(tmp_path: Path) -> None:
    plain = _model(wrap(keras.optimizers.Adam(0.125)))
    _fit(plain, 2)
    plain.save(tmp_path / "plain.keras")
    saved = keras.saving.load_model(tmp_path / "plain.keras")
    half = _model(wrap(adam(keras)))
    half.optimizer.build(half.trainable_variables)
    half.optimizer.set_weights([variable.numpy() for variable in saved.optimizer.variables])
    for one, other in zip(half.optimizer.variables, saved.optimizer.variables, strict=True):
        np.testing.assert_allclose(np.float64(one.numpy()), np.float64(other.numpy()), rtol=2.0**-8)


def test_configuration_makes_an_equal_optimizer() -> None:
    schedule = keras.optimizers.schedules.ExponentialDecay(0.1, 10, 0.5)
    opt = tfmp.half_state(keras.optimizers.AdamW(schedule, weight_decay=0.01, name="mine"), momentum="float16", seed=5)
    again = type(opt).from_config(opt.get_config())
    assert again.get_config() == opt.get_config()
    assert (again.name, again.weight_decay, type(again)) == ("mine", 0.01, type(opt))
    other = keras.optimizers.deserialize(keras.optimizers.serialize(opt))
    assert other.get_config() == opt.get_config()


def test_class_of_the_users_is_found_by_custom_objects() -> None:
    class Mine(keras.optimizers.SGD):
        pass

    config = keras.saving.serialize_keras_object(tfmp.half_state(Mine(0.5, momentum=0.9), momentum="float16"))
    found = keras.saving.deserialize_keras_object(config, custom_objects={"Mine": Mine})
    assert isinstance(found, Mine)
    assert found.get_config()["slots"] == {"momentum": "float16"}


def test_legacy_file_is_loaded(tmp_path: Path) -> None:
    trained = _model(adam(keras))
    trained.compile(adam(keras), keras.losses.MeanSquaredError(), jit_compile=False)
    _fit(trained, 1)
    trained.save(tmp_path / "half.h5")
    loaded = keras.saving.load_model(tmp_path / "half.h5")
    for one, other in zip(loaded.weights, trained.weights, strict=True):
        np.testing.assert_array_equal(one.numpy(), other.numpy())
    # Keras builds the loaded optimizer without weights, whichever it is: it has to be compiled anew to train.
    assert loaded.optimizer.get_config() == trained.optimizer.get_config()
