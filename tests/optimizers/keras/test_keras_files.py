"""Keras' files hold a wrapped optimizer as without a wrapper, and load into the wrapper whoever saved them."""

import logging
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from kerases import dense_model, for_every_keras, optimizer, state, values
from moving import RULE, WEIGHTS, built, inner_of, make_model, run_of, scale_and_count, train, trained

import tfmp

# Keras 3 passes its variables to h5py, which requests a copy from NumPy.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept a copy:DeprecationWarning")


@for_every_keras()
def test_weights_file_loads_with_another_number_of_micro_batches(
    keras: ModuleType, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    one, two = make_model(keras, "tfmp"), train(make_model(keras, "tfmp", accumulation_steps=2), range(5))
    WEIGHTS.save(keras, two, tmp_path)
    with caplog.at_level(logging.WARNING, "tfmp"):
        WEIGHTS.load(keras, one, tmp_path, one.optimizer)
    assert "the sums of the 1 micro-batches in the unfinished window of the file are not loaded" in caplog.text
    assert (run_of(one), scale_and_count(one)) == (run_of(two), [16, 0])
    WEIGHTS.save(keras, train(one, range(1)), tmp_path)
    WEIGHTS.load(keras, two, tmp_path, two.optimizer)
    assert (run_of(one), scale_and_count(two)) == (run_of(two), [16, 1])


@for_every_keras()
def test_weights_file_of_another_manager_continues_from_its_scale(keras: ModuleType, tmp_path: Path) -> None:
    inner = optimizer(keras, "Adam", use_ema=True)
    ours = dense_model(keras, tfmp.LossScaleOptimizer(inner, tfmp.LogMaxLossScaleManager(init_loss_scale=2)))
    WEIGHTS.save(keras, trained(keras, "tfmp"), tmp_path)
    WEIGHTS.load(keras, ours, tmp_path, ours.optimizer)
    assert state(ours.optimizer, "loss_scale", "applied_steps", "log_mean") == [16, 3, 0]


@pytest.mark.parametrize("source", ["bare", "tfmp"])
@for_every_keras()
@pytest.mark.filterwarnings("ignore:Skipping variable loading")
def test_weights_that_are_loaded_before_build_say_what_to_do(
    keras: ModuleType, source: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    saved, loaded = trained(keras, source), make_model(keras, "tfmp")
    WEIGHTS.save(keras, saved, tmp_path)
    with caplog.at_level(logging.WARNING, "tfmp"):
        loaded.load_weights(str(tmp_path / "model.weights.h5"))
    assert "build the optimizer, model.optimizer.build(model.trainable_variables), with the settings" in caplog.text
    WEIGHTS.load(keras, loaded, tmp_path, loaded.optimizer)
    assert run_of(loaded) == run_of(saved)


@pytest.mark.parametrize("num_values", [6, 7, 9, 11])
@for_every_keras()
def test_values_are_not_mistaken_for_those_of_another_layout(
    keras: ModuleType, num_values: int, caplog: pytest.LogCaptureFixture
) -> None:
    # Before `build`, momenta may be as many as the variables that a wrapper saved, with those of its optimizer.
    opt = make_model(keras, "tfmp").optimizer
    before = values(opt.variables)
    with caplog.at_level(logging.WARNING, "tfmp"):
        opt.load_own_variables({str(index): np.ones([2], np.float32) for index in range(num_values)})
    assert f"{num_values} values that the file holds for the optimizer do not fit" in caplog.text
    assert values(opt.variables) == before


@pytest.mark.parametrize("move", ["bare-tfmp", "tfmp-bare"])
@pytest.mark.filterwarnings("ignore:Skipping variable loading")
@for_every_keras("keras3")
def test_every_optimizer_of_a_multi_optimizer_moves(keras: ModuleType, move: str, tmp_path: Path) -> None:
    source, target = (make_model(keras, kind, name="MultiOptimizer", use_ema=False) for kind in move.split("-"))
    WEIGHTS.save(keras, train(source, range(3)), tmp_path)
    WEIGHTS.load(keras, target, tmp_path, target.optimizer)
    assert run_of(target) == run_of(source)


@for_every_keras("keras3")
def test_half_precision_state_moves_from_float32_and_back(keras: ModuleType, tmp_path: Path) -> None:
    inner = tfmp.half_state(optimizer(keras, "Adam", use_ema=True), momentum="bfloat16")
    ours, bare = dense_model(keras, tfmp.LossScaleOptimizer(inner, **RULE)), make_model(keras, "bare")
    WEIGHTS.save(keras, trained(keras, "bare"), tmp_path)
    WEIGHTS.load(keras, ours, tmp_path, ours.optimizer)
    expected = inner_of(trained(keras, "bare")).variables
    for found, float32 in zip(inner.variables, expected, strict=True):
        rounded = tf.cast(tf.cast(float32.value, found.dtype), float32.dtype).numpy()
        np.testing.assert_array_equal(np.float32(found.numpy()), rounded)
    WEIGHTS.save(keras, ours, tmp_path)
    WEIGHTS.load(keras, bare, tmp_path, bare.optimizer)
    assert [np.float32(each.numpy()).tolist() for each in inner.variables] == values(bare.optimizer.variables)


@for_every_keras()
def test_values_of_an_optimizer_without_a_wrapper_can_be_set(keras: ModuleType) -> None:
    bare, ours = trained(keras, "bare"), built(make_model(keras, "tfmp"))
    ours.optimizer.set_weights([variable.numpy() for variable in bare.optimizer.variables])
    assert run_of(ours)[1:] == run_of(bare)[1:]
    store: dict[str, Any] = {}
    again = built(make_model(keras, "bare"))
    ours.optimizer.save_own_variables(store)
    again.optimizer.load_own_variables(store)
    assert run_of(again)[1:] == run_of(bare)[1:]


@for_every_keras()
def test_attributes_are_listed_again_after_loading(keras: ModuleType, tmp_path: Path) -> None:
    WEIGHTS.save(keras, built(make_model(keras, "bare")), tmp_path)
    ours = make_model(keras, "tfmp")
    WEIGHTS.load(keras, ours, tmp_path, ours.optimizer)
    assert "inner_optimizer" in dir(ours.optimizer)
