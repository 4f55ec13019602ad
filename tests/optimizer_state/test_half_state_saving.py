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
from half_training import adam, fitted, slot_types, state
from kerases import dense_model, kernel_and_bias, wrap

import tfmp

if not keras.__version__.startswith("3."):
    pytest.skip(f"needs Keras 3, this is Keras {keras.__version__}", allow_module_level=True)

_LOADS = """
import keras, sys, tfmp
model = keras.saving.load_model(sys.argv[1])
half = model.optimizer.inner_optimizer
print(type(half).__name__, half.get_config()["slots"], half.get_config()["seed"])
print({variable.dtype for variable in half.variables[2:]}, float(half.learning_rate))
"""


def _model(optimizer: Any) -> Any:
    """Make the model without XLA, which takes long to compile a step, and of which no file holds anything."""
    return dense_model(keras, optimizer, jit_compile=False)


def _all(trained: Any) -> list[bytes]:
    return [*(weight.numpy().tobytes() for weight in trained.weights), *state(trained.optimizer)]


def _loaded_from_keras_file(trained: Any, directory: Path) -> Any:
    trained.save(directory / "half.keras")
    return keras.saving.load_model(directory / "half.keras")


def _restored_from_checkpoint(trained: Any, directory: Path) -> Any:
    path = tf.train.Checkpoint(model=trained, optimizer=trained.optimizer).save(directory / "half")
    resumed = _model(wrap(adam(keras, seed=3)))
    resumed.optimizer.build(resumed.trainable_variables)
    tf.train.Checkpoint(model=resumed, optimizer=resumed.optimizer).restore(path).assert_consumed()
    return resumed


@pytest.mark.parametrize("resumed", [_loaded_from_keras_file, _restored_from_checkpoint])
def test_model_trains_on_as_if_it_had_not_been_saved(resumed: Any, tmp_path: Path) -> None:
    trained = fitted(_model(wrap(adam(keras, seed=3))), 2)
    loaded = resumed(trained, tmp_path)
    assert _all(loaded) == _all(trained)
    assert _all(fitted(loaded, 2)) == _all(fitted(trained, 2))


def test_fresh_process_loads_it(tmp_path: Path) -> None:
    settings = {"momentum": "bfloat16", "velocity": "bfloat16"}
    trained = fitted(_model(wrap(adam(keras, rounding="stochastic", seed=3, **settings))))
    trained.save(tmp_path / "half.keras")
    command = [sys.executable, "-c", _LOADS, tmp_path / "half.keras"]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment, check=False)
    assert done.stdout.splitlines() == [f"HalfStateAdam {settings} 3", "{'bfloat16'} 0.125"], done.stderr


def test_exported_step_rounds_as_the_optimizer_does(tmp_path: Path) -> None:
    opt, weight = adam(keras), keras.Variable(np.ones([3], np.float32))
    opt.build([weight])
    exported = tf.Module()
    exported.held = [variable.value for variable in (weight, *opt.variables)]
    exported.step = tf.function(
        lambda grad: opt.apply([grad], [weight]), input_signature=[tf.TensorSpec([3])], autograph=False
    )
    tf.saved_model.save(exported, tmp_path / "step")
    loaded = tf.saved_model.load(tmp_path / "step")
    for number in range(3):
        grad = tf.random.stateless_normal([3], [0, number])
        opt.apply([grad], [weight])
        loaded.step(grad)
    assert [each.numpy().tobytes() for each in loaded.held] == [each.numpy().tobytes() for each in exported.held]


class _Mine(keras.optimizers.SGD):  # type: ignore[misc] # Keras has no types
    pass


@pytest.mark.parametrize(
    ("make", "settings"),
    [
        (
            lambda: keras.optimizers.AdamW(
                keras.optimizers.schedules.ExponentialDecay(0.1, 10, 0.5), weight_decay=0.01, name="mine"
            ),
            {"momentum": "float16", "seed": 5},
        ),
        (keras.optimizers.Adam, {}),
        (lambda: _Mine(0.5, momentum=0.9), {"momentum": "float16"}),
    ],
    ids=["named", "default", "custom_objects"],
)
def test_configuration_makes_an_equal_optimizer(make: Any, settings: dict[str, Any]) -> None:
    opt, custom = tfmp.half_state(make(), **settings), {"_Mine": _Mine}
    again = type(opt).from_config(opt.get_config(), custom_objects=custom)
    other = keras.saving.deserialize_keras_object(keras.saving.serialize_keras_object(opt), custom_objects=custom)
    for each in (opt, again, other):
        each.build(kernel_and_bias(keras))
        assert each.get_config() == opt.get_config()
        assert (each.name, each.weight_decay, type(each)) == (opt.name, opt.weight_decay, type(opt))
        assert slot_types(each) == slot_types(opt)


def test_hdf5_file_is_loaded(tmp_path: Path) -> None:
    trained = fitted(dense_model(keras, adam(keras), loss=keras.losses.MeanSquaredError(), jit_compile=False))
    trained.save(tmp_path / "half.h5")
    loaded = keras.saving.load_model(tmp_path / "half.h5")
    for one, other in zip(loaded.weights, trained.weights, strict=True):
        np.testing.assert_array_equal(one.numpy(), other.numpy())
    # Keras builds the loaded optimizer without weights, whichever it is: it has to be compiled anew to train.
    assert loaded.optimizer.get_config() == trained.optimizer.get_config()
