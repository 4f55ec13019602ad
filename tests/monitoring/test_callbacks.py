"""What only the callback has: its place among the callbacks of every Keras, and the logs, bars and files of Keras."""

import csv
import importlib
import importlib.util
import inspect
import math
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
from kerases import for_every_keras, installed, skip_before
from reporters import EVERY_KERAS, OVERFLOW, as_users_compile_it, events, fit, fit_model, logged, recorder

import tfmp

_ALWAYS = {"loss", "loss_scale", "skipped_steps"}
_SPIKES = {"max_norm": 50}


def _columns(seen: list[dict[str, float]], *names: str) -> list[tuple[float, ...]]:
    return [tuple(each[name] for name in names) for each in seen]


@EVERY_KERAS
def test_history_holds_the_last_values_of_every_epoch(keras: ModuleType) -> None:
    model = fit_model(keras, jit_compile=as_users_compile_it(keras))
    history = fit(model, [1, OVERFLOW, 2], tfmp.LossScaleCallback(), epochs=2)
    del history["loss"]
    assert history == {"loss_scale": [512, 256], "skipped_steps": [1, 2], "gradient_norm": [10, 10]}
    assert fit(model, [OVERFLOW], tfmp.LossScaleCallback())["loss_scale"] == [128]


# In Keras 2 TerminateOnNaN reads tensors from the dictionary of logs that `fit` itself uses.
@EVERY_KERAS
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
    targets, held_out = np.random.default_rng(0).random(6), (np.ones([2, 2], np.float32), np.ones([2, 1], np.float32))
    settings = {"batch_size": 2, "epochs": 2, "validation_data": held_out}
    with strategy.scope():
        model = fit_model(keras, model_class=OtherLogs, learning_rate=0.5, metrics=["mae"])
    expected = fit(model, targets, **settings)
    assert set(expected) == {"loss", "mae", "val_loss", "val_mae"}
    # One model serves for all settings, because its compiled steps do not depend on what `fit` shows.
    for verbose, with_nan_check in verbose_and_nan_check:
        model.set_weights([np.ones([2, 1], np.float32)])
        others = [keras.callbacks.TerminateOnNaN()] if with_nan_check else []
        history = fit(model, targets, tfmp.LossScaleCallback(), *others, verbose=verbose, **settings)
        assert (history.pop("loss_scale"), history.pop("skipped_steps")) == ([1024, 1024], [0, 0])
        # The factor of the gradient is the mean of the targets.
        assert history.pop("gradient_norm") == pytest.approx([5 * targets[-2:].mean()] * 2)
        assert history == expected, (verbose, with_nan_check)


@EVERY_KERAS
def test_values_are_those_of_all_replicas(
    keras: ModuleType, two_replicas: tf.distribute.MirroredStrategy, tmp_path: Path
) -> None:
    with two_replicas.scope():
        model = fit_model(keras, learning_rate=1.0)
    seen: list[dict[str, float]] = []
    targets = [2, -2, 1, OVERFLOW, OVERFLOW, 1]
    fit(model, targets, tfmp.LossScaleCallback(summary_dir=str(tmp_path)), recorder(keras, seen), batch_size=2)
    # The norm is that of the sum.
    assert _columns(seen, "loss_scale", "skipped_steps", "gradient_norm") == [
        (1024, 0, 0),
        (512, 1, math.inf),
        (256, 2, math.inf),
    ]
    # The number of steps is a variable with copies.
    assert events(tmp_path)["attempted_steps"] == [(1, 3)]
    (before,) = model.get_weights()
    history = fit(model, [1, 3], tfmp.LossScaleCallback(), batch_size=2)
    # Keras 3 before 3.8 does not divide the loss by the number of replicas.
    assert history["gradient_norm"] == [np.linalg.norm(before - model.get_weights()[0])]


@EVERY_KERAS
def test_evaluate_and_predict_are_left_as_they_are(keras: ModuleType) -> None:
    model, x, y = fit_model(keras, metrics=["mae"]), np.ones([2, 2], np.float32), np.ones([2, 1], np.float32)
    callbacks = [tfmp.LossScaleCallback()]
    assert set(model.evaluate(x, y, verbose=0, callbacks=callbacks, return_dict=True)) == {"loss", "mae"}
    assert model.predict(x, verbose=0, callbacks=callbacks).tolist() == [[2], [2]]


def _last_shown(output: str) -> tuple[float, float]:
    found = re.findall(r"loss_scale: (\S+) - skipped_steps: ([0-9.e+]+)", output)
    return float(found[-1][0]), float(found[-1][1])


@EVERY_KERAS
@pytest.mark.parametrize("verbose", [1, 2])
def test_progress_bar_shows_both(keras: ModuleType, verbose: int, capsys: pytest.CaptureFixture[str]) -> None:
    callbacks = [tfmp.LossScaleCallback()]
    if verbose == 1:
        skip_before((3, 11), keras, "the bar shows the mean over the epoch")
    if keras.__version__.startswith("2.") and verbose == 1:
        stateful = ["loss_scale", "skipped_steps"]
        callbacks.append(keras.callbacks.ProgbarLogger("steps", stateful_metrics=stateful))
    fit(fit_model(keras), [1, OVERFLOW, 1, OVERFLOW], *callbacks, verbose=verbose)
    assert _last_shown(capsys.readouterr().out) == (256, 2)


@for_every_keras("keras2", "tf_keras")
def test_progress_bar_of_keras2_shows_the_mean_by_itself(keras: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    fit(fit_model(keras), [1, OVERFLOW, 1, OVERFLOW], tfmp.LossScaleCallback(), verbose=1)
    # The bar counts the logs of the epoch as one more batch.
    assert _last_shown(capsys.readouterr().out) == ((1024 + 512 + 512 + 256 + 256) / 5, (0 + 1 + 1 + 2 + 2) / 5)


@EVERY_KERAS
@pytest.mark.parametrize("is_first", [True, False])
def test_csv_logger_writes_both_wherever_it_stands(keras: ModuleType, is_first: bool, tmp_path: Path) -> None:
    path = tmp_path / "log.csv"
    called: list[str] = []
    seen = keras.callbacks.LambdaCallback(on_train_begin=lambda logs: called.append("train"))
    callbacks = [keras.callbacks.CSVLogger(str(path)), seen, tfmp.LossScaleCallback()]
    fit(fit_model(keras), [OVERFLOW], *(callbacks if is_first else reversed(callbacks)), epochs=2)
    assert called == ["train"]
    with path.open(newline="") as file:
        rows = [(row["epoch"], row["loss_scale"], row["skipped_steps"]) for row in csv.DictReader(file)]
    assert rows == [("0", "512.0", "1"), ("1", "256.0", "2")]


@EVERY_KERAS
@pytest.mark.skipif(importlib.util.find_spec("tensorboard") is None, reason="needs tensorboard")
# Keras 3 itself warns about the learning rate of any optimizer under NumPy 2.
@pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept a copy keyword:DeprecationWarning")
def test_tensorboard_shows_both(keras: ModuleType, tmp_path: Path) -> None:
    board = keras.callbacks.TensorBoard(str(tmp_path), write_graph=False)
    fit(fit_model(keras), [OVERFLOW], tfmp.LossScaleCallback(), board, epochs=2)
    seen = events(tmp_path / "train")
    assert seen["epoch_loss_scale"] == [(0, 512), (1, 256)]
    assert seen["epoch_skipped_steps"] == [(0, 1), (1, 2)]


@for_every_keras("keras2", "tf_keras")
@pytest.mark.parametrize(("verbose", "are_read"), [(0, False), (1, True), (2, False)])
def test_keras2_is_made_to_read_no_batch(keras: ModuleType, verbose: int, are_read: bool) -> None:
    seen: list[bool] = []

    class Counting(tfmp.LossScaleCallback):
        def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
            # A value that is still a tensor has not been fetched from the device.
            seen.append(not tf.is_tensor((logs or {})["loss"]))
            super().on_train_batch_end(batch, logs)

    fit(fit_model(keras), [1, 1, 1], Counting(), verbose=verbose)
    assert seen == [are_read] * 3


@EVERY_KERAS
def test_loop_of_the_users_own_may_call_it(keras: ModuleType) -> None:
    model, seen = fit_model(keras, metrics=["mae"]), list[dict[str, float]]()
    callbacks = keras.callbacks.CallbackList([tfmp.LossScaleCallback(), recorder(keras, seen)], model=model)
    callbacks.on_train_begin()
    callbacks.on_train_batch_begin(0)
    callbacks.on_train_batch_end(0, {"loss": model.train_on_batch(np.ones([1, 2]), np.ones([1, 1]))[0]})
    callbacks.on_epoch_end(0)
    callbacks.on_train_end()
    assert _columns(seen, "loss_scale", "skipped_steps") == [(1024, 0)]


@EVERY_KERAS
def test_reports_come_every_n_batches_and_at_the_end_of_each_epoch(keras: ModuleType, tmp_path: Path) -> None:
    callback = tfmp.LossScaleCallback(every_n_steps=2, summary_dir=str(tmp_path))
    fit(fit_model(keras), [OVERFLOW, 1, 1, 1, 1], callback)
    # The step of a summary is that of applied steps.
    assert events(tmp_path)["attempted_steps"] == [(1, 2), (3, 4), (4, 5)]


@EVERY_KERAS
@pytest.mark.parametrize("asked", ["by-the-callback", "too-late"])
def test_model_that_was_fitted_before_without_norms_is_traced_again(keras: ModuleType, asked: str) -> None:
    model, callback = fit_model(keras), tfmp.LossScaleCallback()
    assert set(fit(model, [1, 1])) == {"loss"}
    if asked == "too-late":
        model.optimizer.record_gradient_norm()
    assert fit(model, [1, 2], callback)["gradient_norm"] == [10]
    # The history goes on where it ended, whatever is shown in between.
    assert set(fit(model, [1], tfmp.LossScaleCallback(gradient_norm=False))) == _ALWAYS
    fit(model, [4], callback)
    assert callback.norms.to_dict()["step"][-2:] == [4, 6]


@EVERY_KERAS
@pytest.mark.parametrize("detector", [None, _SPIKES])
def test_norm_that_is_not_asked_for_is_not_measured(keras: ModuleType, detector: Any) -> None:
    model = fit_model(keras, skip_spikes=None if detector is None else tfmp.SpikeDetector(**detector))
    callback = tfmp.LossScaleCallback(gradient_norm=False)
    history = fit(model, [100, 1], callback)
    assert set(history) == _ALWAYS | ({"skipped_spikes"} if detector else set())
    assert history["skipped_steps"] == [1 if detector else 0]
    # A detector needs it.
    assert model.optimizer.records_gradient_norm == bool(detector)
    assert callback.norms.to_dict()["step"] == []


@EVERY_KERAS
def test_one_of_several_processes_does_not_begin_to_measure(keras: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tfmp.monitoring.callbacks.several_processes", lambda strategy: True)
    model = fit_model(keras)
    assert set(fit(model, [1], tfmp.LossScaleCallback())) == _ALWAYS
    model = fit_model(keras)
    model.optimizer.record_gradient_norm()
    assert fit(model, [2], tfmp.LossScaleCallback())["gradient_norm"] == [10]


@EVERY_KERAS
def test_gradients_that_overflow_without_scaling_train_with_the_scale_that_the_warning_names(keras: ModuleType) -> None:
    def applied_steps(manager: Any) -> tuple[int, list[str]]:
        layer = keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros", dtype="mixed_float16")
        model = keras.Sequential([layer, keras.layers.Activation("linear", dtype="float32")])
        optimizer = tfmp.LossScaleOptimizer(keras.optimizers.SGD(2.0**-26), manager)
        model.compile(optimizer, loss=lambda targets, outputs: 2.0**24 * tf.reduce_mean((outputs - targets) ** 2))
        x = np.ones([32, 1], np.float32)
        with logged() as log:
            model.fit(x, x, batch_size=1, verbose=0, callbacks=[tfmp.LossScaleCallback(every_n_steps=8)])
        assert (int(optimizer.applied_steps) > 0) == bool(model.get_weights()[0].item() > 0.1)
        return int(optimizer.applied_steps), log.warnings

    for mode in ("dynamic", "log_max"):
        steps, (warning,) = applied_steps(mode)
        assert steps == 0
        (cure,) = re.findall(r'pass {"min_loss_scale": 2\*\*(-\d+)} as the loss-scale manager', warning)
        assert f"or min_loss_scale=2**{cure} to the manager that you make" in warning
        steps, warnings = applied_steps({"mode": mode, "min_loss_scale": 2.0 ** int(cure)})
        assert (steps > 0, warnings) == (True, [])


_NOT_WATCHED = "Keras' own LossScaleOptimizer, which tfmp does not watch. "


@EVERY_KERAS
@pytest.mark.parametrize(
    ("dtype", "own", "found"),
    [
        ("float32", False, "was compiled with SGD alone, which is enough for float32 and bfloat16. To train it in"),
        ("mixed_bfloat16", False, "was compiled with SGD alone, which is enough for float32 and bfloat16. To train it"),
        ("mixed_float16", False, "computes in float16 with SGD alone: small gradients become zero. Write"),
        ("mixed_float16", True, f"computes in float16 with {_NOT_WATCHED}Write"),
        ("float32", True, f"was compiled with {_NOT_WATCHED}To train it in float16, write"),
    ],
)
def test_model_that_tfmp_does_not_scale_is_warned_of_once_and_trains(
    keras: ModuleType, dtype: str, own: bool, found: str
) -> None:
    # Keras wraps the optimizer only if the policy of the model itself is mixed_float16, not that of one layer.
    inner, layer = keras.optimizers.SGD(0.0), keras.Sequential([keras.layers.Dense(1, dtype=dtype)])
    model = keras.Sequential([keras.Input([2]), layer])
    model.compile(keras.mixed_precision.LossScaleOptimizer(inner) if own else inner, "mse", jit_compile=False)
    callback = tfmp.LossScaleCallback(every_n_steps=1, ranges_every_n_steps=1)
    with logged() as log:
        for _ in range(2):
            assert set(fit(model, [1, 1], callback)) == {"loss"}
    (warning,) = log.warnings
    lines, first = inspect.getsourcelines(fit)
    line = next(number for number, text in enumerate(lines, first) if "model.fit(" in text)
    assert warning.startswith(f"the model that reporters.py:{line} trains ")
    assert found in warning
    assert "rite model.compile(tfmp.LossScaleOptimizer(SGD(...)), ...)." in warning
    assert callback.ranges.last is None


@EVERY_KERAS
@pytest.mark.parametrize("names", [("one", "two"), ("same", "same")])
def test_steps_of_a_scaler_are_shown(keras: ModuleType, names: tuple[str, str]) -> None:
    scaler = tfmp.GradScaler(8, skip_spikes=tfmp.SpikeDetector(max_norm=10))

    class Model(keras.Model):  # type: ignore[name-defined]
        def __init__(self) -> None:
            super().__init__()
            # In a tuple, because Keras would track the scaler as an attribute.
            self._train = (scaler, [tf.Variable(0.0, name=name) for name in names])

        def train_step(self, batch: Any) -> dict[str, Any]:
            scaler, (first, second) = self._train
            grad = scaler.scale(tf.reduce_mean(batch))
            scaler.step(self.optimizer, [(3 * grad, first), (4 * grad, second)])
            scaler.update()
            return {"loss": tf.constant(0.0)}

    model = Model()
    model.compile(keras.optimizers.SGD(0.0), jit_compile=False)
    callback = tfmp.LossScaleCallback(every_n_steps=1, scaler=scaler, ranges_every_n_steps=2)
    grads = tf.constant([1.0, math.inf, 100.0, 2.0])
    with logged() as log:
        history = model.fit(grads, batch_size=1, shuffle=False, verbose=0, callbacks=[callback]).history
    assert (history["gradient_norm"], history["skipped_steps"], history["skipped_spikes"]) == ([10], [2], [1])
    first, second = names
    assert [line for line in log.info if line.startswith("spike")] == [
        f"spike: gradient norm 500 above the bound 10, from {second}:0 (64 %), {first}:0 (36 %); 1 skipped so far"
    ]
    found = callback.ranges.to_dict()
    assert (found["step"], found["loss_scale"], found["gradients_nonfinite"]) == ([2, 4], [8, 4], [1, 0])
    gradients = {name: each.to_dict() for name, each in callback.ranges.last.histograms["gradients"].items()}
    # Variables of one name are counted together.
    assert gradients == ({"one": {"2": 1}, "two": {"3": 1}} if first != second else {"same": {"2": 1, "3": 1}})


def test_callback_is_one_of_the_keras_that_is_loaded() -> None:
    bases = [keras.callbacks.Callback for keras in installed().values()]
    assert isinstance(tfmp.LossScaleCallback(), tuple(bases))


@pytest.mark.skipif(len(installed()) < 2, reason="there is one Keras only")
@pytest.mark.parametrize(("first", "second"), [("keras", "tf_keras"), ("tf_keras", "keras")])
def test_callback_made_before_the_other_keras_is_loaded_serves_both(first: str, second: str) -> None:
    code = f"""
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
"""
    # TensorFlow loads the Keras that is its own, and so do users of tf_keras who write `tf.keras`.
    own = {"TF_USE_LEGACY_KERAS": "1"} if first == "tf_keras" else {}
    root = {"PYTHONPATH": str(Path(tfmp.__file__).parent.parent), "CUDA_VISIBLE_DEVICES": "-1"}
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | root | own,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("False\n")
    assert done.stdout.count("[8.0] True") == 2
