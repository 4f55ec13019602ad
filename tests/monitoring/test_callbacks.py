"""The callback in the `fit` of every Keras there is: Keras 3, Keras 2 and tf_keras."""

import csv
import importlib
import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from kerases import skip_before

import tfmp

pytestmark = pytest.mark.essential

_KERASES = [name for name in ("keras", "tf_keras") if importlib.util.find_spec(name)]
# Multiplied by a scale of 256 to 1024 it overflows float32.
_OVERFLOW = 2.0**120


@pytest.fixture(params=_KERASES)
def keras(request: pytest.FixtureRequest) -> ModuleType:
    return importlib.import_module(request.param)


@pytest.fixture
def keras2(keras: ModuleType) -> ModuleType:
    if keras.__version__.startswith("3."):
        pytest.skip("is about Keras 2")
    return keras


def _model(keras: ModuleType, model_class: Any = None, **settings: Any) -> Any:
    """Return a model of one weight. The gradient of the weight is the target.

    By default its steps are not compiled by XLA, which takes long and of which no callback sees anything.
    """
    layer = keras.layers.Dense(1, use_bias=False, kernel_initializer="ones")
    model = (model_class or keras.Sequential)([layer])
    manager = tfmp.ExponentialUpdateLossScaleManager(1024, 1000, decr_every_n_nan_or_inf=1, decr_ratio=0.5)
    opt = tfmp.LossScaleOptimizer(keras.optimizers.SGD(0.5), manager)
    model.compile(
        opt, loss=lambda target, output: target * output, metrics=["mae"], **{"jit_compile": False} | settings
    )
    return model


def _fit(model: Any, targets: Any, *callbacks: Any, **settings: Any) -> dict[str, list[float]]:
    """Fit a model, to one target a step unless told otherwise, and return the history."""
    y = np.float32(targets).reshape(-1, 1)
    settings = {"batch_size": 1, "shuffle": False, "verbose": 0} | settings
    return model.fit(np.ones_like(y), y, callbacks=list(callbacks), **settings).history


def _batch_recorder(keras: ModuleType, seen: list[Any]) -> Any:
    def record(batch: int, logs: dict[str, Any]) -> None:
        seen.append((logs["loss_scale"], logs["skipped_steps"]))

    return keras.callbacks.LambdaCallback(on_train_batch_end=record)


def test_history_holds_both_for_every_epoch(keras: ModuleType) -> None:
    # As users compile it: Keras 3 compiles the steps by XLA.
    model = _model(keras, jit_compile="auto" if keras.__version__.startswith("3.") else None)
    history = _fit(model, [1, _OVERFLOW, 1], tfmp.LossScaleCallback(), epochs=2)
    assert (history["loss_scale"], history["skipped_steps"]) == ([512, 256], [1, 2])
    history = _fit(model, [_OVERFLOW], tfmp.LossScaleCallback())
    assert (history["loss_scale"], history["skipped_steps"]) == ([128], [3])


@pytest.mark.parametrize("verbose", [0, 1, 2])
def test_callbacks_behind_it_see_the_values_after_each_batch(keras: ModuleType, verbose: int) -> None:
    seen: list[Any] = []
    targets = [1, _OVERFLOW, 1, _OVERFLOW]
    _fit(_model(keras), targets, tfmp.LossScaleCallback(), _batch_recorder(keras, seen), verbose=verbose)
    assert seen == [(1024, 0), (512, 1), (512, 1), (256, 2)]


# In Keras 2 TerminateOnNaN reads tensors from the dictionary of logs that `fit` itself uses.
@pytest.mark.parametrize(
    ("replicas", "verbose_and_nan_check"),
    [(1, [(0, True), (1, False), (2, False)]), (2, [(1, True)])],
)
def test_metrics_stay_as_they_are_without_it(
    keras: ModuleType,
    two_replicas: tf.distribute.MirroredStrategy,
    replicas: int,
    verbose_and_nan_check: list[tuple[int, bool]],
) -> None:
    skip_before((3, 6), keras, "it shows a step's logs for the epoch if a callback adds to them")

    class OtherLogs(keras.Sequential):  # type: ignore[name-defined]
        """Returns values from a step that differ from the metrics. Keras shows the metrics for the epoch."""

        def train_step(self, *args: Any) -> dict[str, Any]:
            return {name: value + 1.0 for name, value in super().train_step(*args).items()}

    strategy = two_replicas if replicas == 2 else tf.distribute.get_strategy()
    targets = np.random.default_rng(0).random(6)
    validation_data = (np.ones([2, 1], np.float32), np.ones([2, 1], np.float32))
    settings = {"batch_size": 2, "epochs": 2, "validation_data": validation_data}
    with strategy.scope():
        model = _model(keras, OtherLogs)
    expected = _fit(model, targets, **settings)
    assert set(expected) == {"loss", "mae", "val_loss", "val_mae"}
    # One model serves for all settings, because its compiled steps do not depend on what `fit` shows.
    for verbose, with_nan_check in verbose_and_nan_check:
        model.set_weights([np.ones([1, 1], np.float32)])
        others = [keras.callbacks.TerminateOnNaN()] if with_nan_check else []
        history = _fit(model, targets, tfmp.LossScaleCallback(), *others, verbose=verbose, **settings)
        assert (history.pop("loss_scale"), history.pop("skipped_steps")) == ([1024, 1024], [0, 0])
        # The gradient of the weight is the mean of the targets, and so is its norm.
        assert history.pop("gradient_norm") == pytest.approx([targets[-2:].mean()] * 2)
        assert history == expected, (verbose, with_nan_check)


def test_overflow_on_one_replica_shows(keras: ModuleType, two_replicas: tf.distribute.MirroredStrategy) -> None:
    with two_replicas.scope():
        model = _model(keras)
    seen: list[Any] = []
    targets = [1, 1, 1, _OVERFLOW, _OVERFLOW, 1]
    history = _fit(model, targets, tfmp.LossScaleCallback(), _batch_recorder(keras, seen), batch_size=2)
    assert seen == [(1024, 0), (512, 1), (256, 2)]
    assert (history["loss_scale"], history["skipped_steps"]) == ([256], [2])


def test_evaluate_and_predict_are_left_as_they_are(keras: ModuleType) -> None:
    model, x = _model(keras), np.ones([2, 1], np.float32)
    callbacks = [tfmp.LossScaleCallback()]
    assert set(model.evaluate(x, x, verbose=0, callbacks=callbacks, return_dict=True)) == {"loss", "mae"}
    assert model.predict(x, verbose=0, callbacks=callbacks).tolist() == [[1], [1]]


def _last_shown(output: str) -> tuple[float, float]:
    found = re.findall(r"loss_scale: (\S+) - skipped_steps: ([0-9.e+]+)", output)
    return float(found[-1][0]), float(found[-1][1])


@pytest.mark.parametrize("verbose", [1, 2])
def test_progress_bar_shows_both(keras: ModuleType, verbose: int, capsys: pytest.CaptureFixture[str]) -> None:
    callbacks = [tfmp.LossScaleCallback()]
    if verbose == 1:
        skip_before((3, 11), keras, "the bar shows the mean over the epoch")
    if keras.__version__.startswith("2.") and verbose == 1:
        stateful = ["loss_scale", "skipped_steps"]
        callbacks.append(keras.callbacks.ProgbarLogger("steps", stateful_metrics=stateful))
    _fit(_model(keras), [1, _OVERFLOW, 1, _OVERFLOW], *callbacks, verbose=verbose)
    assert _last_shown(capsys.readouterr().out) == (256, 2)


def test_progress_bar_of_keras2_shows_the_mean_by_itself(
    keras2: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    _fit(_model(keras2), [1, _OVERFLOW, 1, _OVERFLOW], tfmp.LossScaleCallback(), verbose=1)
    # The bar counts the logs of the epoch as one more batch.
    assert _last_shown(capsys.readouterr().out) == ((1024 + 512 + 512 + 256 + 256) / 5, (0 + 1 + 1 + 2 + 2) / 5)


@pytest.mark.parametrize("is_first", [True, False])
def test_csv_logger_writes_both_wherever_it_stands(keras: ModuleType, is_first: bool, tmp_path: Path) -> None:
    path = tmp_path / "log.csv"
    called: list[str] = []
    seen = keras.callbacks.LambdaCallback(on_train_begin=lambda logs: called.append("train"))
    callbacks = [keras.callbacks.CSVLogger(str(path)), seen, tfmp.LossScaleCallback()]
    _fit(_model(keras), [_OVERFLOW], *(callbacks if is_first else reversed(callbacks)), epochs=2)
    assert called == ["train"]
    with path.open(newline="") as file:
        rows = [(row["epoch"], row["loss_scale"], row["skipped_steps"]) for row in csv.DictReader(file)]
    assert rows == [("0", "512.0", "1"), ("1", "256.0", "2")]


@pytest.mark.skipif(importlib.util.find_spec("tensorboard") is None, reason="needs tensorboard")
# Keras 3 itself warns about the learning rate of any optimizer under NumPy 2.
@pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept a copy keyword:DeprecationWarning")
def test_tensorboard_shows_both(keras: ModuleType, tmp_path: Path) -> None:
    board = keras.callbacks.TensorBoard(str(tmp_path), write_graph=False)
    _fit(_model(keras), [_OVERFLOW], tfmp.LossScaleCallback(), board, epochs=2)
    seen: dict[str, list[tuple[int, float]]] = {}
    for path in (tmp_path / "train").iterdir():
        for record in tf.data.TFRecordDataset(str(path)):
            event = tf.compat.v1.Event.FromString(record.numpy())
            for value in event.summary.value:
                seen.setdefault(value.tag, []).append((event.step, float(tf.make_ndarray(value.tensor))))
    assert seen["epoch_loss_scale"] == [(0, 512), (1, 256)]
    assert seen["epoch_skipped_steps"] == [(0, 1), (1, 2)]


@pytest.mark.parametrize(("verbose", "are_read"), [(0, False), (1, True), (2, False)])
def test_keras2_is_made_to_read_no_batch(keras2: ModuleType, verbose: int, are_read: bool) -> None:
    seen: list[bool] = []

    class Counting(tfmp.LossScaleCallback):
        def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
            # A value that is still a tensor has not been fetched from the device.
            seen.append(not tf.is_tensor((logs or {})["loss"]))
            super().on_train_batch_end(batch, logs)

    _fit(_model(keras2), [1, 1, 1], Counting(), verbose=verbose)
    assert seen == [are_read] * 3


def test_loop_of_the_users_own_may_call_it(keras: ModuleType) -> None:
    model = _model(keras)
    seen = []
    record = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: seen.append(dict(logs)))
    callbacks = keras.callbacks.CallbackList([tfmp.LossScaleCallback(), record], model=model)
    callbacks.on_train_begin()
    callbacks.on_train_batch_begin(0)
    callbacks.on_train_batch_end(0, {"loss": model.train_on_batch(np.ones([1, 1]), np.ones([1, 1]))[0]})
    callbacks.on_epoch_end(0)
    callbacks.on_train_end()
    assert [(logs["loss_scale"], logs["skipped_steps"]) for logs in seen] == [(1024, 0)]


@pytest.mark.parametrize("policy", ["float32", "mixed_bfloat16"])
def test_model_that_needs_no_scaling_is_warned_of_once_and_trains(
    keras: ModuleType, policy: str, caplog: pytest.LogCaptureFixture
) -> None:
    model = keras.Sequential([keras.layers.Dense(1, dtype=policy)])
    model.compile("sgd", "mse", jit_compile=False)
    callback = tfmp.LossScaleCallback(every_n_steps=1)
    histories = [_fit(model, [1, 1], callback) for _ in range(2)]
    assert [set(history) for history in histories] == [{"loss"}, {"loss"}]
    (warning,) = [record.getMessage() for record in caplog.records if record.name == "tfmp"]
    assert warning.startswith("the model that test_callbacks.py:")
    assert (
        "was compiled with SGD alone, which is enough for float32 and bfloat16. To train it in float16, write"
        in warning
    )


def test_callback_is_one_of_the_keras_that_is_loaded() -> None:
    bases = [importlib.import_module(name).callbacks.Callback for name in _KERASES]
    assert isinstance(tfmp.LossScaleCallback(), tuple(bases))


def _python(code: str, **environment: str) -> str:
    root = str(Path(tfmp.__file__).parent.parent)
    environment = os.environ | {"PYTHONPATH": root, "CUDA_VISIBLE_DEVICES": "-1"} | environment
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.skipif(len(_KERASES) < 2, reason="there is one Keras only")
@pytest.mark.parametrize(("first", "second"), [("keras", "tf_keras"), ("tf_keras", "keras")])
@pytest.mark.essential(None)
@pytest.mark.home("tf221")
def test_callback_made_before_the_other_keras_is_loaded_serves_both(first: str, second: str) -> None:
    # TensorFlow loads the Keras that is its own, and so do users of tf_keras who write `tf.keras`.
    own = {"TF_USE_LEGACY_KERAS": "1"} if first == "tf_keras" else {}
    output = _python(
        f"""
import sys, numpy, tensorflow, tfmp
callback = tfmp.LossScaleCallback()
print({second!r} in sys.modules)
import {first}, {second}
for package in ({first}, {second}):
    model = package.Sequential([package.layers.Dense(1)])
    opt = tfmp.LossScaleOptimizer(package.optimizers.SGD(), tfmp.FixedLossScaleManager(8))
    model.compile(opt, "mse", run_eagerly=True)
    x = numpy.ones([2, 1])
    for verbose in (0, 2):
        history = model.fit(x, x, verbose=verbose, validation_data=(x, x), callbacks=[callback])
    print(history.history["loss_scale"], isinstance(callback, {first}.callbacks.Callback))
""",
        **own,
    )
    assert output.startswith("False\n")
    assert output.count("[8.0] True") == 2
