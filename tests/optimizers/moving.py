"""Models of every Keras that move between no wrapper, Keras' own and tfmp's, and the forms of saving to move by."""

import functools
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import pytest
import tensorflow as tf
from kerases import dense_model, installed, optimizer, state, values

import tfmp

#: The scale at the start, which is doubled after so many steps.
RULE = {"initial_scale": 8, "dynamic_growth_steps": 2}


def _wrapped(keras: ModuleType, kind: str, inner: Any, **settings: Any) -> Any:
    match kind:
        case "bare":
            return inner
        case "own":
            return keras.mixed_precision.LossScaleOptimizer(inner, **RULE)
        case "window":
            return tfmp.LossScaleOptimizer(inner, **RULE, accumulation_steps=2)
        case _:
            return tfmp.LossScaleOptimizer(inner, **RULE, **settings)


def make_model(keras: ModuleType, kind: str, name: str = "Adam", *, use_ema: bool = True, **settings: Any) -> Any:
    """Make a model: in float32 without a wrapper, and in mixed precision with one."""
    ema = {"use_ema": True, "ema_momentum": 0.5} if use_ema else {}
    opt = _wrapped(keras, kind, optimizer(keras, name, learning_rate=0.125, **ema), **settings)
    return dense_model(keras, opt, "float32" if kind == "bare" else "mixed_float16", run_eagerly=True)


def built(model: Any) -> Any:
    """Build the optimizer of a model, and return the model."""
    model.optimizer.build(model.trainable_variables)
    return model


def train(model: Any, steps: Iterable[int], overflows: Collection[int] = ()) -> Any:
    """Take the steps, some of which overflow, and return the model."""
    for step in steps:
        x = np.random.default_rng(step).random((8, 3), np.float32)
        x[0, 0] = np.inf if step in overflows else x[0, 0]
        model.train_on_batch(x, np.ones([8, 1]))
    return model


@functools.cache
def trained(keras: ModuleType, kind: str) -> Any:
    """Return a model after three steps, to be saved."""
    return train(make_model(keras, kind), range(3))


def inner_of(model: Any) -> Any:
    """Return the optimizer of a model, without its wrapper."""
    return getattr(model.optimizer, "inner_optimizer", model.optimizer)


def run_of(model: Any) -> list[Any]:
    """Return what a run goes on with: the weights, and the optimizer's moments and count of steps."""
    inner = inner_of(model)
    return [values(model.weights), values(inner.variables), int(inner.iterations)]


def scale_and_count(model: Any) -> list[Any]:
    """Return the loss scale of either wrapper, and its count of finite steps."""
    if isinstance(model.optimizer, tfmp.LossScaleOptimizer):
        return state(model.optimizer, "loss_scale", "good_steps")
    names = (
        ("dynamic_scale", "step_counter")
        if hasattr(model.optimizer, "step_counter")
        else ("loss_scale", "dynamic_counter")
    )
    return [getattr(model.optimizer, name).numpy() for name in names]


class Form(NamedTuple):
    """A way of saving a model in a directory, and of loading what was saved.

    `load` takes the model to load into, the directory, and the optimizer to load into: the model's, or the one inside
    that. The last argument is whether all that was saved must be found there. It returns None, or a new model.
    """

    save: Callable[[ModuleType, Any, Path], Any]
    load: Callable[[ModuleType, Any, Path, Any, bool], Any]
    #: Whether Keras 2's own wrapper saves its scale.
    holds_scale_of_keras2: bool = False
    #: Whether Keras 3 does not have it.
    is_of_keras_2: bool = False


def checkpoint(model: Any, opt: Any) -> tf.train.Checkpoint:
    """Return the checkpoint of a model with an optimizer: its own, or the one inside that."""
    return tf.train.Checkpoint(model=model, optimizer=opt)


def _restored(status: Any, exact: bool) -> None:
    (status.assert_consumed if exact else status.expect_partial)()


def _restore(keras: ModuleType, model: Any, path: Path, opt: Any, exact: bool) -> None:
    _restored(checkpoint(built(model), opt).restore(str(path / "checkpoint-1")), exact)


def _restore_before_build(keras: ModuleType, model: Any, path: Path, opt: Any, exact: bool) -> None:
    status = checkpoint(model, opt).restore(str(path / "checkpoint-1"))
    built(model)
    _restored(status, exact)


def _load_tensorflow_weights(name: str) -> Callable[..., None]:
    def load(keras: ModuleType, model: Any, path: Path, opt: Any, exact: bool) -> None:
        status = model.load_weights(path / name)
        built(model)
        status.expect_partial()

    return load


def _interrupted(keras: ModuleType, path: Path) -> list[Any]:
    class Stop(keras.callbacks.Callback):  # type: ignore[misc, name-defined]
        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            if epoch == 1:
                raise KeyboardInterrupt

    # The optimizer is built after `fit`, and Keras 2.15 restores the rest of it then, from this file.
    return [keras.callbacks.BackupAndRestore(str(path / "backup"), delete_checkpoint=False), Stop()]


def back_up(keras: ModuleType, model: Any, path: Path) -> None:
    """Train an epoch with BackupAndRestore, and stop."""
    with pytest.raises(KeyboardInterrupt):
        model.fit(np.ones([8, 3]), np.ones([8, 1]), epochs=2, verbose=0, callbacks=_interrupted(keras, path))


def _restore_backup(keras: ModuleType, model: Any, path: Path, opt: Any, exact: bool) -> None:
    # The backup is of the end of the first epoch, so `fit` restores it and trains no more.
    model.fit(np.ones([8, 3]), np.ones([8, 1]), epochs=1, verbose=0, callbacks=_interrupted(keras, path)[:1])
    built(model)


WEIGHTS = Form(
    lambda keras, model, path: model.save_weights(str(path / "model.weights.h5")),
    lambda keras, model, path, opt, exact: built(model).load_weights(str(path / "model.weights.h5")),
)
CHECKPOINT = Form(
    lambda keras, model, path: checkpoint(model, model.optimizer).save(str(path / "checkpoint")),
    _restore,
    holds_scale_of_keras2=True,
)
_KERAS_FILE = Form(
    lambda keras, model, path: model.save(path / "model.keras"),
    lambda keras, model, path, opt, exact: built(model).load_weights(str(path / "model.keras")),
)
#: The forms that load into a model.
FORMS = {
    "weights_file": WEIGHTS,
    "weights_of_keras_file": _KERAS_FILE,
    "checkpoint": CHECKPOINT,
    "checkpoint_before_build": CHECKPOINT._replace(load=_restore_before_build),
    "backup_and_restore": Form(back_up, _restore_backup, holds_scale_of_keras2=True),
    "tensorflow_weights": Form(
        lambda keras, model, path: model.save_weights(path / "weights"),
        _load_tensorflow_weights("weights"),
        holds_scale_of_keras2=True,
        is_of_keras_2=True,
    ),
    "saved_model": Form(
        lambda keras, model, path: model.save(path / "saved"),
        # Keras' load_model makes a new optimizer for this format, with or without tfmp.
        _load_tensorflow_weights("saved/variables/variables"),
        is_of_keras_2=True,
    ),
    # These make a model.
    "keras_file": _KERAS_FILE._replace(
        load=lambda keras, model, path, opt, exact: keras.saving.load_model(path / "model.keras")
    ),
    "legacy_file": Form(
        lambda keras, model, path: model.save(path / "model.h5"),
        lambda keras, model, path, opt, exact: keras.models.load_model(path / "model.h5"),
        is_of_keras_2=True,
    ),
}


def for_forms(name: str, cases: Mapping[str, Iterable[str]], *, only_keras_3: Collection[str] = ()) -> Any:
    """Run a test with every Keras, for each case the forms of saving that the Keras has."""
    return pytest.mark.parametrize(
        ("keras", name, "form"),
        [
            pytest.param(keras, case, FORMS[form], id=f"{id_}-{case}-{form}")
            for id_, keras in installed().items()
            for case, forms in cases.items()
            for form in forms
            if not (FORMS[form].is_of_keras_2 if id_ == "keras3" else case in only_keras_3)
        ],
    )
