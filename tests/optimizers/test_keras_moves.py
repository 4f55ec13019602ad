"""A run moves between an optimizer without loss scaling, Keras' own wrapper and tfmp's, in every form of saving."""

from pathlib import Path
from types import ModuleType

import pytest
import tensorflow as tf
from kerases import for_every_keras, state
from moving import (
    FORMS,
    RULE,
    WEIGHTS,
    Form,
    back_up,
    checkpoint,
    inner_of,
    load_tensorflow_weights,
    make_model,
    restore_by_manager,
    run_of,
    save_by_callback,
    scale_and_count,
    train,
    trained,
)

import tfmp

pytestmark = [
    # Keras 3 passes its variables to h5py, which requests a copy from NumPy.
    pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept a copy:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:You are saving your model as an HDF5 file:UserWarning"),
]

_BY_CALLBACK_OR_MANAGER = {
    "model_checkpoint": WEIGHTS._replace(save=save_by_callback),
    "checkpoint_manager": Form(
        lambda keras, model, path: tf.train.CheckpointManager(
            checkpoint(model, model.optimizer), str(path), max_to_keep=1
        ).save(),
        restore_by_manager,
    ),
}
_for_every_move = pytest.mark.parametrize("move", ["bare-tfmp", "tfmp-bare", "own-tfmp", "tfmp-own"])


def _check_move(keras: ModuleType, form: Form, move: str, path: Path) -> None:
    source, target = move.split("-")
    saved, loaded = trained(keras, source), make_model(keras, target)
    if form.save is back_up:
        # At its end `fit` sets the weights to their moving averages.
        saved, loaded = make_model(keras, source, use_ema=False), make_model(keras, target, use_ema=False)
    form.save(keras, saved, path)
    is_keras_3 = keras.__version__.startswith("3.")
    into = loaded.optimizer
    if is_keras_3 and target == "own":
        # Keras 3's own wrapper does not know the layout that an optimizer without a wrapper has.
        into = inner_of(loaded)
    form.load(keras, loaded, path, into)
    assert run_of(loaded) == run_of(saved)
    if target != "tfmp":
        return
    if source == "own" and (is_keras_3 or form.holds_scale_of_keras2):
        assert scale_and_count(loaded) == scale_and_count(saved)
    else:
        assert scale_and_count(loaded) == [8, 0]


@pytest.mark.parametrize("form", FORMS)
@_for_every_move
@for_every_keras()
def test_run_moves(
    keras: ModuleType,
    move: str,
    form: str,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    recwarn: pytest.WarningsRecorder,
) -> None:
    _check_move(keras, FORMS[form], move, tmp_path)
    skipped = [str(warning.message) for warning in recwarn if "variable loading" in str(warning.message)]
    if keras.__version__.startswith("3.") and move == "tfmp-own" and not form.startswith("checkpoint"):
        # Its scale starts anew, which Keras says. The optimizer inside is loaded.
        assert [message.split("'")[1].startswith("loss_scale_optimizer") for message in skipped] == [True]
    else:
        assert skipped == []
    assert "Inconsistent references" not in caplog.text
    assert "variable loading" not in caplog.text


@pytest.mark.parametrize("form", _BY_CALLBACK_OR_MANAGER)
@for_every_keras()
def test_run_moves_by_callback_or_manager(keras: ModuleType, form: str, tmp_path: Path) -> None:
    _check_move(keras, _BY_CALLBACK_OR_MANAGER[form], "bare-tfmp", tmp_path)


@_for_every_move
@for_every_keras("keras2", "tf_keras")
def test_run_moves_in_tensorflows_format(keras: ModuleType, move: str, tmp_path: Path) -> None:
    form = Form(
        lambda keras, model, path: model.save_weights(path / "weights"), load_tensorflow_weights("weights"), True
    )
    _check_move(keras, form, move, tmp_path)


@pytest.mark.parametrize("move", ["bare-tfmp", "tfmp-bare"])
@for_every_keras("keras2", "tf_keras")
def test_run_moves_by_the_checkpoint_in_a_saved_model(keras: ModuleType, move: str, tmp_path: Path) -> None:
    form = Form(
        lambda keras, model, path: model.save(path / "saved"), load_tensorflow_weights("saved/variables/variables")
    )
    _check_move(keras, form, move, tmp_path)


@pytest.mark.parametrize("form", ["weights_file", "checkpoint", "checkpoint_before_build"])
@pytest.mark.parametrize("accumulation_steps", [1, 2])
@for_every_keras()
def test_run_that_moved_to_tfmp_equals_the_one_that_did_not(
    keras: ModuleType, accumulation_steps: int, form: str, tmp_path: Path
) -> None:
    bare = train(make_model(keras, "bare"), range(3))
    moved = make_model(keras, "tfmp", "float32", accumulation_steps=accumulation_steps)
    FORMS[form].save(keras, bare, tmp_path)
    FORMS[form].load(keras, moved, tmp_path, moved.optimizer)
    for step in range(3, 6):
        train(bare, range(step, step + 1))
        for _ in range(accumulation_steps):
            # The mean of two equal micro-batches is one of them.
            train(moved, range(step, step + 1))
        assert run_of(moved) == run_of(bare)
    assert state(moved.optimizer, "applied_steps", "loss_scale") == [3, 16]


@pytest.mark.parametrize("form", ["weights_file", "checkpoint"])
@for_every_keras()
def test_run_leaves_tfmp_in_the_middle_of_a_window(keras: ModuleType, form: str, tmp_path: Path) -> None:
    saved = train(make_model(keras, "tfmp", accumulation_steps=2), range(3))
    FORMS[form].save(keras, saved, tmp_path)
    bare = make_model(keras, "bare")
    FORMS[form].load(keras, bare, tmp_path, bare.optimizer)
    assert run_of(bare) == run_of(saved)
    assert int(bare.optimizer.iterations) == 1


@for_every_keras()
def test_model_that_was_loaded_whole_is_wrapped_and_unwrapped(keras: ModuleType, tmp_path: Path) -> None:
    saved = trained(keras, "bare")
    for name in ("model.keras", "model.h5"):
        if name == "model.h5" and keras.__version__.startswith("3."):
            continue
        saved.save(tmp_path / name)
        loaded = keras.models.load_model(tmp_path / name)
        loaded.compile(tfmp.LossScaleOptimizer(loaded.optimizer, **RULE), "mse", run_eagerly=True)
        assert run_of(loaded) == run_of(saved)
        loaded.save(tmp_path / f"tfmp-{name}")
        again = keras.models.load_model(tmp_path / f"tfmp-{name}")
        again.compile(again.optimizer.inner_optimizer, "mse", run_eagerly=True)
        assert run_of(again) == run_of(saved)
        again.compile(keras.mixed_precision.LossScaleOptimizer(again.optimizer, **RULE), "mse", run_eagerly=True)
        assert run_of(train(again, range(3, 5))) == run_of(train(loaded, range(3, 5)))
        again.compile(again.optimizer.inner_optimizer, "mse", run_eagerly=True)
        saved = again
