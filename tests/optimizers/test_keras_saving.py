"""Saving and resuming models with the wrapper, in every format of every Keras."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, TypeAlias

import numpy as np
import pytest
import tensorflow as tf
from kerases import dense_model, for_every_keras, installed, optimizer, skip_before, state, values, wrap

import tfmp

pytestmark = [
    pytest.mark.essential,
    # Keras 3 passes its variables to h5py, which requests a copy from NumPy.
    pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept a copy:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:You are saving your model as an HDF5 file:UserWarning"),
]

# `_Restore` saves a model and returns a model that was loaded from the file. `_Make` makes a model to load into.
_Make: TypeAlias = Callable[[], Any]
_Restore: TypeAlias = Callable[[ModuleType, Any, Path, _Make], Any]

_OVERFLOWS = (1, 2, 7)
# The step after which to save, with the counts of good and bad steps there. One more such step changes the scale.
_SAVED_AT = {"in_a_bad_streak": (2, [0, 1]), "in_a_good_streak": (6, [3, 0])}


def _model(keras: ModuleType) -> Any:
    schedule = keras.optimizers.schedules.PolynomialDecay(0.125, 10)
    inner = optimizer(keras, "Adam", learning_rate=schedule, use_ema=True)
    opt = wrap(inner, incr_every_n_steps=4, decr_every_n_nan_or_inf=2)
    return dense_model(keras, opt, run_eagerly=True)


def _train(model: Any, steps: range) -> list[Any]:
    """Take the steps, some of which overflow; return all values of weights and optimizer after each."""
    seen = []
    for step in steps:
        x = np.random.default_rng(step).random((8, 3), np.float32)
        x[0, 0] = np.inf if step in _OVERFLOWS else x[0, 0]
        model.train_on_batch(x, np.ones([8, 1]))
        seen.append(values([*model.weights, *model.optimizer.variables]))
    return seen


def _keras_file(keras: ModuleType, model: Any, path: Path, make: _Make) -> Any:
    model.save(path / "model.keras")
    return keras.saving.load_model(path / "model.keras")


def _weights_file(keras: ModuleType, model: Any, path: Path, make: _Make) -> Any:
    model.save_weights(path / "model.weights.h5")
    restored = make()
    restored.optimizer.build(restored.trainable_variables)
    restored.load_weights(path / "model.weights.h5")
    return restored


def _checkpoint(keras: ModuleType, model: Any, path: Path, make: _Make) -> Any:
    saved = tf.train.Checkpoint(model=model, optimizer=model.optimizer).save(path / "checkpoint")
    restored = make()
    restored.optimizer.build(restored.trainable_variables)
    tf.train.Checkpoint(model=restored, optimizer=restored.optimizer).restore(saved).assert_consumed()
    return restored


def _checkpoint_before_build(keras: ModuleType, model: Any, path: Path, make: _Make) -> Any:
    saved = tf.train.Checkpoint(model=model, optimizer=model.optimizer).save(path / "checkpoint")
    restored = make()
    status = tf.train.Checkpoint(model=restored, optimizer=restored.optimizer).restore(saved)
    restored.optimizer.build(restored.trainable_variables)
    status.assert_consumed()
    return restored


def _legacy_file(keras: ModuleType, model: Any, path: Path, make: _Make) -> Any:
    model.save(path / "model.h5")
    return keras.models.load_model(path / "model.h5")


def _tensorflow_weights(keras: ModuleType, model: Any, path: Path, make: _Make) -> Any:
    model.save_weights(path / "weights")
    restored = make()
    restored.load_weights(path / "weights")
    restored.optimizer.build(restored.trainable_variables)
    return restored


def _check_resuming(keras: ModuleType, restore: _Restore, path: Path, saved_at: str) -> None:
    at, counts = _SAVED_AT[saved_at]
    model = _model(keras)
    _train(model, range(at))
    assert state(model.optimizer, "good_steps", "bad_steps") == counts
    resumed = restore(keras, model, path, lambda: _model(keras))
    assert type(resumed.optimizer) is type(model.optimizer)
    assert values(resumed.optimizer.variables) == values(model.optimizer.variables)
    steps = range(at, at + 3)
    assert _train(resumed, steps) == _train(model, steps)


@pytest.mark.parametrize("saved_at", _SAVED_AT)
@for_every_keras()
def test_resumed_run_equals_the_uninterrupted_one_if_it_is_restored_before_build(
    keras: ModuleType, saved_at: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    _check_resuming(keras, _checkpoint_before_build, tmp_path, saved_at)
    assert "Inconsistent references" not in caplog.text


@pytest.mark.parametrize("saved_at", _SAVED_AT)
@pytest.mark.parametrize("restore", [_legacy_file, _tensorflow_weights])
@for_every_keras("keras2", "tf_keras")
def test_resumed_run_equals_the_uninterrupted_one_in_legacy_formats(
    keras: ModuleType, restore: _Restore, saved_at: str, tmp_path: Path
) -> None:
    _check_resuming(keras, restore, tmp_path, saved_at)


@pytest.mark.parametrize("restore", [_keras_file, _weights_file])
@for_every_keras("keras3")
def test_every_optimizer_of_a_multi_optimizer_is_resumed(keras: ModuleType, restore: _Restore, tmp_path: Path) -> None:
    def make() -> Any:
        return dense_model(keras, wrap(optimizer(keras, "MultiOptimizer")), run_eagerly=True)

    model = make()
    _train(model, range(3))
    resumed = restore(keras, model, tmp_path, make)
    assert _train(resumed, range(3, 6)) == _train(model, range(3, 6))


@for_every_keras()
def test_config_makes_the_same_optimizer_again(keras: ModuleType) -> None:
    manager = tfmp.ExponentialUpdateLossScaleManager(1024, 4, 3, 4, 0.25, min_loss_scale=2, tolerance=0.5)
    opt = tfmp.LossScaleOptimizer(optimizer(keras, "Adam", learning_rate=0.125), manager, name="mine")
    config = json.loads(json.dumps(keras.saving.serialize_keras_object(opt)))
    for again in (
        type(opt).from_config(opt.get_config()),
        keras.saving.deserialize_keras_object(config),
        keras.optimizers.deserialize(keras.optimizers.serialize(opt)),
    ):
        assert type(again) is type(opt)
        assert again.get_config() == opt.get_config()
        assert (again.name, float(again.inner_optimizer.learning_rate.numpy())) == ("mine", 0.125)
        assert again.get_config()["loss_scale_manager"]["config"] == manager.get_config()


@pytest.mark.parametrize(
    ("setting", "value"), [("iterations_include_skipped_steps", True), ("aggregation_dtype", "float16")]
)
@for_every_keras("keras2", "tf_keras")
def test_config_holds_the_settings_of_keras_2(keras: ModuleType, setting: str, value: Any) -> None:
    opt = tfmp.LossScaleOptimizer(optimizer(keras), tfmp.FixedLossScaleManager(8), True, **{setting: value})
    config = json.loads(json.dumps(opt.get_config()))
    assert config[setting] == value
    assert type(opt).from_config(config).get_config() == opt.get_config()


@for_every_keras()
def test_fixed_manager_is_saved_too(keras: ModuleType, tmp_path: Path) -> None:
    opt = tfmp.LossScaleOptimizer(optimizer(keras), tfmp.FixedLossScaleManager(256))
    model = dense_model(keras, opt)
    _train(model, range(3))
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras").optimizer
    assert (float(loaded.loss_scale), int(loaded.applied_steps), int(loaded.skipped_steps)) == (256, 1, 2)


class _Custom(tfmp.LossScaleManager):
    """A custom manager, as scripts for tf.contrib define it."""

    def __init__(self, start: float) -> None:
        super().__init__()
        self._start = start
        self._scale = tf.Variable(start, trainable=False)

    def get_config(self) -> dict[str, Any]:
        return {"start": self._start}

    def get_loss_scale(self) -> tf.Tensor:
        return self._scale.read_value()

    def update_loss_scale(self, finite_grads: tf.Tensor) -> Any:
        return self._scale.assign(self._scale / tf.where(finite_grads, 1.0, 4.0))


# For each manager with additional state: a function that makes it, and further arguments of its update.
_MANAGERS: dict[str, tuple[Callable[[], tfmp.LossScaleManager], list[float]]] = {
    "tolerant": (lambda: tfmp.ExponentialUpdateLossScaleManager(8, 4, tolerance=0.5, hysteresis=2), []),
    "log_max": (lambda: tfmp.LogMaxLossScaleManager(init_loss_scale=8), [0.75]),
}


def _check_manager(keras: ModuleType, restore: _Restore, path: Path, name: str) -> None:
    make_manager, observed = _MANAGERS[name]
    manager = make_manager()
    model = dense_model(keras, tfmp.LossScaleOptimizer(optimizer(keras), manager))
    model.optimizer.build(model.trainable_variables)
    manager.update_loss_scale(tf.constant(True), *map(tf.constant, observed))
    restored = restore(keras, model, path, lambda: model).optimizer
    fields = manager.state.read()._asdict()
    assert state(restored, *fields) == [value.numpy() for value in fields.values()]
    assert restored.get_config()["loss_scale_manager"] == model.optimizer.get_config()["loss_scale_manager"]


@pytest.mark.parametrize("name", _MANAGERS)
@for_every_keras()
def test_every_manager_is_saved_with_its_state(keras: ModuleType, name: str, tmp_path: Path) -> None:
    _check_manager(keras, _keras_file, tmp_path, name)


@pytest.mark.parametrize("name", _MANAGERS)
@for_every_keras("keras2", "tf_keras")
def test_every_manager_is_saved_with_its_state_in_the_legacy_format(
    keras: ModuleType, name: str, tmp_path: Path
) -> None:
    _check_manager(keras, _legacy_file, tmp_path, name)


@for_every_keras()
def test_custom_manager_is_saved_and_loaded_with_custom_objects(keras: ModuleType, tmp_path: Path) -> None:
    model = dense_model(keras, tfmp.LossScaleOptimizer(optimizer(keras), _Custom(64.0)))
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras", custom_objects={"_Custom": _Custom})
    assert float(loaded.optimizer.loss_scale) == 64


@for_every_keras()
def test_checkpoint_holds_the_variables_of_a_custom_manager(keras: ModuleType, tmp_path: Path) -> None:
    def make() -> Any:
        return dense_model(keras, tfmp.LossScaleOptimizer(optimizer(keras), _Custom(64.0)))

    model = make()
    model.train_on_batch(np.full([1, 3], np.inf), np.ones([1, 1]))
    restored = _checkpoint(keras, model, tmp_path, make)
    assert (float(restored.optimizer.loss_scale), int(restored.optimizer.skipped_steps)) == (16, 1)


def _load_scale_of_keras_own_wrapper(keras: ModuleType, manager: tfmp.LossScaleManager, path: Path) -> Any:
    """Save a model's weights with Keras' own wrapper, whose scale is 512; load them with tfmp's wrapper."""
    wrapper = keras.optimizers.LossScaleOptimizer(optimizer(keras), initial_scale=512)
    model = dense_model(keras, wrapper)
    model.optimizer.build(model.trainable_variables)
    ours = dense_model(keras, tfmp.LossScaleOptimizer(optimizer(keras), manager))
    return _weights_file(keras, model, path, lambda: ours).optimizer


class _Continuing(_Custom):
    """A custom manager that can continue from a given scale."""

    def continue_from(self, loss_scale: float, good_steps: int) -> None:
        self._scale.assign(loss_scale + good_steps)


@pytest.mark.parametrize("make", [tfmp.LogMaxLossScaleManager, lambda: _Continuing(64.0)])
@for_every_keras("keras3")
def test_manager_with_continue_from_continues_from_the_scale_of_keras_own_wrapper(
    keras: ModuleType, make: Callable[[], tfmp.LossScaleManager], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert float(_load_scale_of_keras_own_wrapper(keras, make(), tmp_path).loss_scale) == 512
    assert "not taken over" not in caplog.text


@pytest.mark.parametrize("make", [lambda: tfmp.FixedLossScaleManager(64), lambda: _Custom(64.0)])
@for_every_keras("keras3")
def test_manager_without_continue_from_gives_a_warning_about_the_scale_of_keras_own_wrapper(
    keras: ModuleType, make: Callable[[], tfmp.LossScaleManager], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    manager = make()
    assert float(_load_scale_of_keras_own_wrapper(keras, manager, tmp_path).loss_scale) == 64
    assert [record.getMessage() for record in caplog.records if record.name == "tfmp"] == [
        "the loss scale 512 of Keras' own LossScaleOptimizer is not taken over: "
        f"{type(manager).__name__} has no method continue_from."
    ]


_LOAD = """
import importlib, json, sys
import numpy as np
{imports}

for name, path in zip(sys.argv[1::2], sys.argv[2::2]):
    keras = importlib.import_module(name)
    model = keras.saving.load_model(path)
    model.train_on_batch(np.ones({shape}), np.ones([{shape}[0], 1]))
    print(json.dumps([variable.numpy().tolist() for variable in [*model.weights, *model.optimizer.variables]]))
"""


def _load_and_train(saved: list[tuple[ModuleType, Path]], imports: str, shape: list[int]) -> list[Any]:
    """Load models in one fresh process, train each on one batch of ones, and return all values of each."""
    paths = [text for keras, path in saved for text in (keras.__name__, str(path))]
    done = subprocess.run(
        [sys.executable, "-c", _LOAD.format(imports=imports, shape=shape), *paths],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(Path(tfmp.__file__).parent.parent), *sys.path])},
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_fresh_process_loads_the_models_after_importing_tfmp(tmp_path: Path) -> None:
    models = {}
    for id_, keras in installed().items():
        models[keras, tmp_path / f"{id_}.keras"] = model = _model(keras)
        _train(model, range(3))
        model.save(tmp_path / f"{id_}.keras")
    loaded = _load_and_train(list(models), "import tfmp", [8, 3])
    for of_loaded, model in zip(loaded, models.values(), strict=True):
        model.train_on_batch(np.ones([8, 3]), np.ones([8, 1]))
        assert of_loaded == values([*model.weights, *model.optimizer.variables])


@for_every_keras()
@pytest.mark.essential(None)
def test_process_that_imported_keras_first_loads_what_an_earlier_tfmp_saved(keras: ModuleType) -> None:
    skip_before((3, 15), keras, "the file holds layers of Keras 3.15")
    recorded = Path(__file__).parent.parent / "recordings" / "scales"
    path = recorded / f"keras{keras.__version__[0]}_own" / "model.keras"
    [loaded] = _load_and_train([(keras, path)], f"import {keras.__name__}\nimport tfmp", [4, 1])
    # This process imported the front-end before it loads the file.
    model = keras.saving.load_model(path)
    model.train_on_batch(np.ones([4, 1]), np.ones([4, 1]))
    assert loaded == values([*model.weights, *model.optimizer.variables])


@for_every_keras()
def test_public_class_is_a_custom_object_named_as_keras_own_wrapper(keras: ModuleType) -> None:
    opt = wrap(optimizer(keras))
    config = {"module": None, "class_name": "LossScaleOptimizer", "config": opt.get_config()}
    custom = {"LossScaleOptimizer": tfmp.LossScaleOptimizer}
    registered = config | {"registered_name": "LossScaleOptimizer"}
    again = keras.saving.deserialize_keras_object(registered, custom_objects=custom)
    assert type(again) is type(opt)
    assert again.get_config() == opt.get_config()
