"""A run moves between an optimizer without loss scaling, Keras' own wrapper and tfmp's, in every form of saving."""

import logging
import math
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from kerases import dense_model, fit_linear, for_every_keras, kernel_and_bias, linear_model, optimizer, values
from moving import (
    CHECKPOINT,
    FORMS,
    RULE,
    WEIGHTS,
    Form,
    back_up,
    built,
    for_forms,
    inner_of,
    make_model,
    run_of,
    scale_and_count,
    train,
    trained,
)

import tfmp

_EVERYWHERE = ("weights_file", "weights_of_keras_file", "checkpoint", "checkpoint_before_build", "backup_and_restore")
_MOVES = {
    "bare-tfmp": (*_EVERYWHERE, "tensorflow_weights", "saved_model"),
    "tfmp-bare": (*_EVERYWHERE, "tensorflow_weights", "saved_model"),
    # In the middle of a window.
    "window-bare": ("weights_file", "checkpoint"),
    "own-tfmp": (*_EVERYWHERE, "tensorflow_weights"),
    "tfmp-own": (*_EVERYWHERE, "tensorflow_weights"),
}


def _load(form: Form, keras: ModuleType, model: Any, path: Path, opt: Any = None) -> None:
    form.load(keras, model, path, model.optimizer if opt is None else opt, False)


@for_forms("move", _MOVES)
def test_run_moves(
    keras: ModuleType,
    move: str,
    form: Form,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    recwarn: pytest.WarningsRecorder,
) -> None:
    source, target = move.split("-")
    # At its end `fit`, which backs up, sets the weights to their moving averages.
    averages = form.save is not back_up
    saved = trained(keras, source) if averages else make_model(keras, source, use_ema=False)
    loaded = make_model(keras, target, use_ema=averages)
    form.save(keras, saved, tmp_path)
    is_keras_3 = keras.__version__.startswith("3.")
    # Keras 3's own wrapper does not know the layout that an optimizer without a wrapper has.
    _load(form, keras, loaded, tmp_path, inner_of(loaded) if is_keras_3 and target == "own" else None)
    assert run_of(loaded) == run_of(saved)
    if target == "tfmp":
        takes_scale = source == "own" and (is_keras_3 or form.holds_scale_of_keras2)
        assert scale_and_count(loaded) == (scale_and_count(saved) if takes_scale else [8, 0])
    skipped = [str(warning.message) for warning in recwarn if "variable loading" in str(warning.message)]
    if is_keras_3 and move == "tfmp-own" and form.load not in {FORMS[name].load for name in _EVERYWHERE[2:4]}:
        # Its scale starts anew, which Keras says. The optimizer inside is loaded.
        assert [message.split("'")[1].startswith("loss_scale_optimizer") for message in skipped] == [True]
    else:
        assert skipped == []
    assert "Inconsistent references" not in caplog.text
    assert "variable loading" not in caplog.text


@for_forms("kind", {"whole": ("keras_file", "legacy_file")})
def test_model_that_was_loaded_whole_is_wrapped_and_unwrapped(
    keras: ModuleType, kind: str, form: Form, tmp_path: Path
) -> None:
    def saved_and_loaded(model: Any) -> Any:
        form.save(keras, model, tmp_path)
        return form.load(keras, None, tmp_path, None, False)

    saved = trained(keras, "bare")
    loaded = saved_and_loaded(saved)
    loaded.compile(tfmp.LossScaleOptimizer(loaded.optimizer, **RULE), "mse", run_eagerly=True)
    assert run_of(loaded) == run_of(saved)
    again = saved_and_loaded(loaded)
    again.compile(again.optimizer.inner_optimizer, "mse", run_eagerly=True)
    assert run_of(again) == run_of(saved)
    again.compile(keras.mixed_precision.LossScaleOptimizer(again.optimizer, **RULE), "mse", run_eagerly=True)
    assert run_of(train(again, range(3, 5))) == run_of(train(loaded, range(3, 5)))


@pytest.mark.parametrize("move", ["bare-tfmp", "tfmp-bare"])
@pytest.mark.filterwarnings("ignore:Skipping variable loading")
@for_every_keras("keras3")
def test_every_optimizer_of_a_multi_optimizer_moves_in_a_file(keras: ModuleType, move: str, tmp_path: Path) -> None:
    source, target = (make_model(keras, kind, name="MultiOptimizer", use_ema=False) for kind in move.split("-"))
    WEIGHTS.save(keras, train(source, range(3)), tmp_path)
    _load(WEIGHTS, keras, target, tmp_path)
    assert run_of(target) == run_of(source)


@for_every_keras()
def test_keys_of_a_checkpoint_are_those_without_a_wrapper_and_more(keras: ModuleType, tmp_path: Path) -> None:
    keys = {}
    for kind in ("bare", "tfmp"):
        path = tf.train.Checkpoint(optimizer=trained(keras, kind).optimizer).write(str(tmp_path / kind))
        keys[kind] = {key for key, _ in tf.train.list_variables(path)}
    assert keys["bare"] < keys["tfmp"]
    # With Keras 3 the state of the manager is there under its own names, too, as in checkpoints of earlier versions.
    manager = "optimizer/_loss_scale_manager/state/values/{}/.ATTRIBUTES/VARIABLE_VALUE"
    of_manager = {manager.format(name) for name in ("loss_scale", "good_steps", "bad_steps")}
    more = {key for key in keys["tfmp"] - keys["bare"] if not key.startswith("optimizer/_variables/state_")}
    assert more == (of_manager if keras.__version__.startswith("3.") else set())


@for_every_keras()
def test_layouts_of_checkpoints_are_told_apart_in_each_restore(keras: ModuleType, tmp_path: Path) -> None:
    model = make_model(keras, "tfmp")
    for restore, kind in enumerate(["own", "bare", "own", "tfmp", "bare"]):
        source = train(make_model(keras, kind), range(restore, 2 * restore + 1))
        CHECKPOINT.save(keras, source, tmp_path / str(restore))
        _load(CHECKPOINT, keras, model, tmp_path / str(restore))
        assert run_of(model) == run_of(source)
        if kind != "bare":
            assert scale_and_count(model) == scale_and_count(source)


@for_every_keras()
def test_weights_file_loads_with_another_number_of_micro_batches(
    keras: ModuleType, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    one, two = make_model(keras, "tfmp"), train(make_model(keras, "tfmp", accumulation_steps=2), range(5))
    WEIGHTS.save(keras, two, tmp_path)
    with caplog.at_level(logging.WARNING, "tfmp"):
        _load(WEIGHTS, keras, one, tmp_path)
    assert "the sums of the 1 micro-batches in the unfinished window of the file are not loaded" in caplog.text
    assert (run_of(one), scale_and_count(one)) == (run_of(two), [16, 0])
    WEIGHTS.save(keras, train(one, range(1)), tmp_path)
    _load(WEIGHTS, keras, two, tmp_path)
    assert (run_of(one), scale_and_count(two)) == (run_of(two), [16, 1])


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
    _load(WEIGHTS, keras, loaded, tmp_path)
    assert run_of(loaded) == run_of(saved)
    # A walk over the attributes, as Keras' is, finds the optimizer inside again.
    assert "inner_optimizer" in dir(loaded.optimizer)


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


@for_every_keras()
def test_values_of_an_optimizer_without_a_wrapper_can_be_set(keras: ModuleType) -> None:
    bare, ours = trained(keras, "bare"), built(make_model(keras, "tfmp"))
    ours.optimizer.set_weights([variable.numpy() for variable in bare.optimizer.variables])
    assert run_of(ours)[1:] == run_of(bare)[1:]


def _of_schedule(keras: ModuleType) -> Any:
    schedule = keras.optimizers.schedules.PolynomialDecay(0.125, 30)
    inner = optimizer(keras, "Adam", learning_rate=schedule)
    return dense_model(keras, keras.mixed_precision.LossScaleOptimizer(inner, **RULE), run_eagerly=True)


@for_forms("source", {"own": ("keras_file", "weights_file", "checkpoint"), "own, not saved": ("weights_file",)})
def test_run_that_tfmp_takes_over_equals_that_of_keras_own_wrapper_step_for_step(
    keras: ModuleType, source: str, form: Form, tmp_path: Path
) -> None:
    """Also where `iterations` counts skipped steps, as Keras 2's does, for the schedule of the learning rate."""
    overflows = {2, 3, 8, 9, 14, 17}
    runs = []
    for taken_over in (False, True):
        model = train(_of_schedule(keras), range(6), overflows)
        before = scale_and_count(model)
        if source == "own":
            form.save(keras, model, tmp_path)
            loaded = _of_schedule(keras)
            found = form.load(keras, loaded, tmp_path, loaded.optimizer, form is CHECKPOINT)
            model = found if isinstance(found, keras.Model) else loaded
        if source != "own" or form is CHECKPOINT or keras.__version__.startswith("3."):
            # Keras 2's own wrapper does not write the scale to its files.
            assert scale_and_count(model) == before
        if taken_over:
            model.compile(tfmp.LossScaleOptimizer.from_keras(model.optimizer), "mse", run_eagerly=True)
        seen = [[run_of(train(model, [step], overflows)), scale_and_count(model)] for step in range(6, 20)]
        runs.append(seen)
    assert runs[0] == runs[1]
    assert len({scale for _, (scale, _) in runs[0]}) > 2
    assert int(model.optimizer.skipped_steps) == 4
    if keras.__version__.startswith("2."):
        model.save(tmp_path / "again.keras")
        again = train(keras.saving.load_model(tmp_path / "again.keras"), range(5), {1}).optimizer
        assert (int(again.iterations), int(again.skipped_steps)) == (25, 5)


@pytest.mark.parametrize("built", [False, True])
@pytest.mark.parametrize(("scale", "allowed"), [(0.0, 1.0), (0.5, 1.0), (math.inf, float(np.finfo(np.float32).max))])
@for_every_keras()
def test_scale_out_of_bounds_becomes_the_nearest_allowed(
    keras: ModuleType, scale: float, allowed: float, built: bool
) -> None:
    stock = keras.mixed_precision.LossScaleOptimizer(optimizer(keras), initial_scale=scale)
    if built:
        stock.build(kernel_and_bias(keras))
    assert float(tfmp.LossScaleOptimizer.from_keras(stock).loss_scale) == allowed


@for_every_keras("keras2", "tf_keras")
def test_fixed_scale_that_is_taken_over_stays_fixed_and_overflows_are_skipped(keras: ModuleType) -> None:
    stock = keras.mixed_precision.LossScaleOptimizer(optimizer(keras), dynamic=False, initial_scale=256)
    opt = tfmp.LossScaleOptimizer.from_keras(stock)
    model = linear_model(keras, opt)
    fit_linear(model, [1, math.inf, 1])
    assert values(model.weights) == [[[-1]]]
    assert (float(opt.loss_scale), int(opt.skipped_steps), int(opt.iterations)) == (256, 1, 3)
    assert isinstance(opt.manager, tfmp.FixedLossScaleManager)
