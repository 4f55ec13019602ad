"""A run moves between an optimizer without loss scaling, Keras' own wrapper and tfmp's, in every form of saving."""

import functools
import logging
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import pytest
import tensorflow as tf
from kerases import dense_model, for_every_keras, optimizer, state, values

import tfmp

pytestmark = [
    # Keras 3 passes its variables to h5py, which requests a copy from NumPy.
    pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept a copy:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:You are saving your model as an HDF5 file:UserWarning"),
]

#: The scale at the start, which is doubled after so many steps.
_RULE = {"initial_scale": 8, "dynamic_growth_steps": 2}


def _wrapped(keras: ModuleType, kind: str, inner: Any, **settings: Any) -> Any:
    match kind:
        case "bare":
            return inner
        case "own":
            return keras.mixed_precision.LossScaleOptimizer(inner, **_RULE)
        case _:
            return tfmp.LossScaleOptimizer(inner, **_RULE, **settings)


def _model(
    keras: ModuleType, kind: str, policy: str | None = None, name: str = "Adam", use_ema: bool = True, **settings: Any
) -> Any:
    """Make a model: in float32 without a wrapper, and in mixed precision with one."""
    ema = {"use_ema": True, "ema_momentum": 0.5} if use_ema else {}
    opt = _wrapped(keras, kind, optimizer(keras, name, learning_rate=0.125, **ema), **settings)
    policy = policy or ("float32" if kind == "bare" else "mixed_float16")
    return dense_model(keras, opt, policy, run_eagerly=True)


def _built(model: Any) -> Any:
    model.optimizer.build(model.trainable_variables)
    return model


def _train(model: Any, steps: range) -> Any:
    for step in steps:
        model.train_on_batch(np.random.default_rng(step).random((8, 3), np.float32), np.ones([8, 1]))
    return model


@functools.cache
def _trained(keras: ModuleType, kind: str) -> Any:
    """Return a model after three steps, to be saved."""
    return _train(_model(keras, kind), range(3))


def _inner(model: Any) -> Any:
    return getattr(model.optimizer, "inner_optimizer", model.optimizer)


def _run(model: Any) -> list[Any]:
    """Return what a run goes on with: the weights, and the optimizer's moments and count of steps."""
    inner = _inner(model)
    return [values(model.weights), values(inner.variables), int(inner.iterations)]


def _scale_and_count(model: Any) -> list[Any]:
    if isinstance(model.optimizer, tfmp.LossScaleOptimizer):
        return state(model.optimizer, "loss_scale", "good_steps")
    names = (
        ("dynamic_scale", "step_counter")
        if hasattr(model.optimizer, "step_counter")
        else ("loss_scale", "dynamic_counter")
    )
    return [getattr(model.optimizer, name).numpy() for name in names]


class _Form(NamedTuple):
    """A way of saving a model, and of loading what was saved into another one.

    The last argument of `load` is the optimizer to load into: the model's, or the one inside that.
    """

    save: Callable[[ModuleType, Any, Path], Any]
    load: Callable[[ModuleType, Any, Path, Any], Any]
    #: Whether Keras 2's own wrapper saves its scale.
    holds_scale_of_keras2: bool = False


def _checkpoint(model: Any, opt: Any) -> tf.train.Checkpoint:
    return tf.train.Checkpoint(model=model, optimizer=opt)


def _restore_checkpoint(keras: ModuleType, model: Any, path: Path, opt: Any) -> None:
    status = _checkpoint(_built(model), opt).restore(str(path / "checkpoint-1"))
    status.expect_partial()


def _restore_checkpoint_before_build(keras: ModuleType, model: Any, path: Path, opt: Any) -> None:
    _checkpoint(model, opt).restore(str(path / "checkpoint-1")).expect_partial()
    _built(model)


def _restore_by_manager(keras: ModuleType, model: Any, path: Path, opt: Any) -> None:
    manager = tf.train.CheckpointManager(_checkpoint(_built(model), opt), str(path), max_to_keep=1)
    assert manager.restore_or_initialize()
    manager.checkpoint.restore(manager.latest_checkpoint).expect_partial()


def _save_by_callback(keras: ModuleType, model: Any, path: Path) -> None:
    callback = keras.callbacks.ModelCheckpoint(str(path / "model.weights.h5"), save_weights_only=True)
    callback.set_model(model)
    callback.on_epoch_end(0, {})


def _load_tensorflow_weights(name: str) -> Callable[..., None]:
    def load(keras: ModuleType, model: Any, path: Path, opt: Any) -> None:
        model.load_weights(path / name).expect_partial()
        _built(model)

    return load


def _interrupted(keras: ModuleType, path: Path) -> list[Any]:
    class Stop(keras.callbacks.Callback):  # type: ignore[misc, name-defined]
        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            if epoch == 1:
                raise KeyboardInterrupt

    return [keras.callbacks.BackupAndRestore(str(path / "backup")), Stop()]


def _back_up(keras: ModuleType, model: Any, path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        model.fit(np.ones([8, 3]), np.ones([8, 1]), epochs=2, verbose=0, callbacks=_interrupted(keras, path))


def _restore_backup(keras: ModuleType, model: Any, path: Path, opt: Any) -> None:
    # The backup is of the end of the first epoch, so `fit` restores it and trains no more.
    model.fit(np.ones([8, 3]), np.ones([8, 1]), epochs=1, verbose=0, callbacks=_interrupted(keras, path)[:1])
    _built(model)


_WEIGHTS = _Form(
    lambda keras, model, path: model.save_weights(str(path / "model.weights.h5")),
    lambda keras, model, path, opt: _built(model).load_weights(str(path / "model.weights.h5")),
)
_CHECKPOINT = _Form(
    lambda keras, model, path: _checkpoint(model, model.optimizer).save(str(path / "checkpoint")),
    _restore_checkpoint,
    holds_scale_of_keras2=True,
)
_FORMS = {
    "weights_file": _WEIGHTS,
    "keras_file": _Form(
        lambda keras, model, path: model.save(path / "model.keras"),
        lambda keras, model, path, opt: _built(model).load_weights(str(path / "model.keras")),
    ),
    "checkpoint": _CHECKPOINT,
    "checkpoint_before_build": _CHECKPOINT._replace(load=_restore_checkpoint_before_build),
    "backup_and_restore": _Form(_back_up, _restore_backup),
}
_BY_CALLBACK_OR_MANAGER = {
    "model_checkpoint": _WEIGHTS._replace(save=_save_by_callback),
    "checkpoint_manager": _Form(
        lambda keras, model, path: tf.train.CheckpointManager(
            _checkpoint(model, model.optimizer), str(path), max_to_keep=1
        ).save(),
        _restore_by_manager,
    ),
}
_for_every_move = pytest.mark.parametrize("move", ["bare-tfmp", "tfmp-bare", "own-tfmp", "tfmp-own"])


def _check_move(keras: ModuleType, form: _Form, move: str, path: Path) -> None:
    source, target = move.split("-")
    saved, loaded = _trained(keras, source), _model(keras, target)
    if form.save is _back_up:
        # At its end `fit` sets the weights to their moving averages.
        saved, loaded = _model(keras, source, use_ema=False), _model(keras, target, use_ema=False)
    form.save(keras, saved, path)
    is_keras_3 = keras.__version__.startswith("3.")
    into = loaded.optimizer
    if is_keras_3 and target == "own":
        # Keras 3's own wrapper does not know the layout that an optimizer without a wrapper has.
        into = _inner(loaded)
    form.load(keras, loaded, path, into)
    assert _run(loaded) == _run(saved)
    if target != "tfmp":
        return
    if source == "own" and (is_keras_3 or form.holds_scale_of_keras2):
        assert _scale_and_count(loaded) == _scale_and_count(saved)
    else:
        assert _scale_and_count(loaded) == [8, 0]


@pytest.mark.parametrize("form", _FORMS)
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
    _check_move(keras, _FORMS[form], move, tmp_path)
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
    form = _Form(
        lambda keras, model, path: model.save_weights(path / "weights"), _load_tensorflow_weights("weights"), True
    )
    _check_move(keras, form, move, tmp_path)


@pytest.mark.parametrize("move", ["bare-tfmp", "tfmp-bare"])
@for_every_keras("keras2", "tf_keras")
def test_run_moves_by_the_checkpoint_in_a_saved_model(keras: ModuleType, move: str, tmp_path: Path) -> None:
    form = _Form(
        lambda keras, model, path: model.save(path / "saved"), _load_tensorflow_weights("saved/variables/variables")
    )
    _check_move(keras, form, move, tmp_path)


@pytest.mark.parametrize("form", ["weights_file", "checkpoint", "checkpoint_before_build"])
@pytest.mark.parametrize("accumulation_steps", [1, 2])
@for_every_keras()
def test_run_that_moved_to_tfmp_equals_the_one_that_did_not(
    keras: ModuleType, accumulation_steps: int, form: str, tmp_path: Path
) -> None:
    bare = _train(_model(keras, "bare"), range(3))
    moved = _model(keras, "tfmp", "float32", accumulation_steps=accumulation_steps)
    _FORMS[form].save(keras, bare, tmp_path)
    _FORMS[form].load(keras, moved, tmp_path, moved.optimizer)
    for step in range(3, 6):
        _train(bare, range(step, step + 1))
        for _ in range(accumulation_steps):
            # The mean of two equal micro-batches is one of them.
            _train(moved, range(step, step + 1))
        assert _run(moved) == _run(bare)
    assert state(moved.optimizer, "applied_steps", "loss_scale") == [3, 16]


@pytest.mark.parametrize("form", ["weights_file", "checkpoint"])
@for_every_keras()
def test_run_leaves_tfmp_in_the_middle_of_a_window(keras: ModuleType, form: str, tmp_path: Path) -> None:
    saved = _train(_model(keras, "tfmp", accumulation_steps=2), range(3))
    _FORMS[form].save(keras, saved, tmp_path)
    bare = _model(keras, "bare")
    _FORMS[form].load(keras, bare, tmp_path, bare.optimizer)
    assert _run(bare) == _run(saved)
    assert int(bare.optimizer.iterations) == 1


@for_every_keras()
def test_weights_file_loads_with_another_number_of_micro_batches(
    keras: ModuleType, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    one, two = _model(keras, "tfmp"), _train(_model(keras, "tfmp", accumulation_steps=2), range(5))
    _WEIGHTS.save(keras, two, tmp_path)
    with caplog.at_level(logging.WARNING, "tfmp"):
        _WEIGHTS.load(keras, one, tmp_path, one.optimizer)
    assert "the sums of the 1 micro-batches in the unfinished window of the file are not loaded" in caplog.text
    assert (_run(one), _scale_and_count(one)) == (_run(two), [16, 0])
    _WEIGHTS.save(keras, _train(one, range(1)), tmp_path)
    _WEIGHTS.load(keras, two, tmp_path, two.optimizer)
    assert (_run(one), _scale_and_count(two)) == (_run(two), [16, 1])


@for_every_keras()
def test_weights_file_of_another_manager_continues_from_its_scale(keras: ModuleType, tmp_path: Path) -> None:
    inner = optimizer(keras, "Adam", use_ema=True)
    ours = dense_model(keras, tfmp.LossScaleOptimizer(inner, tfmp.LogMaxLossScaleManager(init_loss_scale=2)))
    _WEIGHTS.save(keras, _trained(keras, "tfmp"), tmp_path)
    _WEIGHTS.load(keras, ours, tmp_path, ours.optimizer)
    assert state(ours.optimizer, "loss_scale", "applied_steps", "log_mean") == [16, 3, 0]


@pytest.mark.parametrize("source", ["bare", "tfmp"])
@for_every_keras()
@pytest.mark.filterwarnings("ignore:Skipping variable loading")
def test_weights_that_are_loaded_before_build_say_what_to_do(
    keras: ModuleType, source: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    saved, loaded = _trained(keras, source), _model(keras, "tfmp")
    _WEIGHTS.save(keras, saved, tmp_path)
    with caplog.at_level(logging.WARNING, "tfmp"):
        loaded.load_weights(str(tmp_path / "model.weights.h5"))
    assert "build the optimizer, model.optimizer.build(model.trainable_variables), with the settings" in caplog.text
    _WEIGHTS.load(keras, loaded, tmp_path, loaded.optimizer)
    assert _run(loaded) == _run(saved)


@pytest.mark.parametrize("num_values", [6, 7, 9, 11])
@for_every_keras()
def test_values_are_not_mistaken_for_those_of_another_layout(
    keras: ModuleType, num_values: int, caplog: pytest.LogCaptureFixture
) -> None:
    # Before `build`, momenta may be as many as the variables that a wrapper saved, with those of its optimizer.
    opt = _model(keras, "tfmp").optimizer
    before = values(opt.variables)
    with caplog.at_level(logging.WARNING, "tfmp"):
        opt.load_own_variables({str(index): np.ones([2], np.float32) for index in range(num_values)})
    assert f"{num_values} values that the file holds for the optimizer do not fit" in caplog.text
    assert values(opt.variables) == before


@for_every_keras("keras3")
def test_checkpoint_of_tfmp_is_refused_by_keras_3s_own_wrapper(keras: ModuleType, tmp_path: Path) -> None:
    # As that of an optimizer without a wrapper. It is restored into the optimizer inside instead.
    _CHECKPOINT.save(keras, _trained(keras, "tfmp"), tmp_path)
    own = _model(keras, "own")
    with pytest.raises(tf.errors.InvalidArgumentError, match="expected dtype int64 does not equal"):
        _CHECKPOINT.load(keras, own, tmp_path, own.optimizer)


@pytest.mark.parametrize("move", ["bare-tfmp", "tfmp-bare"])
@pytest.mark.filterwarnings("ignore:Skipping variable loading")
@for_every_keras("keras3")
def test_every_optimizer_of_a_multi_optimizer_moves(keras: ModuleType, move: str, tmp_path: Path) -> None:
    source, target = (_model(keras, kind, name="MultiOptimizer", use_ema=False) for kind in move.split("-"))
    _WEIGHTS.save(keras, _train(source, range(3)), tmp_path)
    _WEIGHTS.load(keras, target, tmp_path, target.optimizer)
    assert _run(target) == _run(source)


@for_every_keras("keras3")
def test_half_precision_state_moves_from_float32_and_back(keras: ModuleType, tmp_path: Path) -> None:
    inner = tfmp.half_state(optimizer(keras, "Adam", use_ema=True), momentum="bfloat16")
    ours, bare = dense_model(keras, tfmp.LossScaleOptimizer(inner, **_RULE)), _model(keras, "bare")
    _WEIGHTS.save(keras, _trained(keras, "bare"), tmp_path)
    _WEIGHTS.load(keras, ours, tmp_path, ours.optimizer)
    expected = _inner(_trained(keras, "bare")).variables
    for found, float32 in zip(inner.variables, expected, strict=True):
        rounded = tf.cast(tf.cast(float32.value, found.dtype), float32.dtype).numpy()
        np.testing.assert_array_equal(np.float32(found.numpy()), rounded)
    _WEIGHTS.save(keras, ours, tmp_path)
    _WEIGHTS.load(keras, bare, tmp_path, bare.optimizer)
    assert [np.float32(each.numpy()).tolist() for each in inner.variables] == values(bare.optimizer.variables)


@for_every_keras("keras3")
def test_checkpoint_never_holds_the_optimizers_of_a_multi_optimizer(keras: ModuleType, tmp_path: Path) -> None:
    source, target = (_model(keras, "bare", name="MultiOptimizer", use_ema=False) for _ in range(2))
    _CHECKPOINT.save(keras, _train(source, range(3)), tmp_path)
    _CHECKPOINT.load(keras, target, tmp_path, target.optimizer)
    assert [int(each.iterations) for each in (target.optimizer, *target.optimizer.optimizers)] == [3, 0, 0]


@for_every_keras()
def test_values_of_an_optimizer_without_a_wrapper_can_be_set(keras: ModuleType) -> None:
    bare, ours = _trained(keras, "bare"), _built(_model(keras, "tfmp"))
    ours.optimizer.set_weights([variable.numpy() for variable in bare.optimizer.variables])
    assert _run(ours)[1:] == _run(bare)[1:]
    store: dict[str, Any] = {}
    again = _built(_model(keras, "bare"))
    ours.optimizer.save_own_variables(store)
    again.optimizer.load_own_variables(store)
    assert _run(again)[1:] == _run(bare)[1:]


@for_every_keras()
def test_model_that_was_loaded_whole_is_wrapped_and_unwrapped(keras: ModuleType, tmp_path: Path) -> None:
    saved = _trained(keras, "bare")
    for name in ("model.keras", "model.h5"):
        if name == "model.h5" and keras.__version__.startswith("3."):
            continue
        saved.save(tmp_path / name)
        loaded = keras.models.load_model(tmp_path / name)
        loaded.compile(tfmp.LossScaleOptimizer(loaded.optimizer, **_RULE), "mse", run_eagerly=True)
        assert _run(loaded) == _run(saved)
        loaded.save(tmp_path / f"tfmp-{name}")
        again = keras.models.load_model(tmp_path / f"tfmp-{name}")
        again.compile(again.optimizer.inner_optimizer, "mse", run_eagerly=True)
        assert _run(again) == _run(saved)
        assert _run(_train(again, range(3, 5))) == _run(_train(loaded, range(3, 5)))
        saved = again


@for_every_keras()
def test_attributes_are_listed_again_after_loading(keras: ModuleType, tmp_path: Path) -> None:
    _WEIGHTS.save(keras, _built(_model(keras, "bare")), tmp_path)
    ours = _model(keras, "tfmp")
    _WEIGHTS.load(keras, ours, tmp_path, ours.optimizer)
    assert "inner_optimizer" in dir(ours.optimizer)
