"""What only the callback has: its place among the callbacks of every Keras, and the logs, bars and files of Keras."""

import contextlib
import csv
import importlib.util
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


@EVERY_KERAS
def test_history_holds_the_last_values_of_every_epoch(keras: ModuleType) -> None:
    model = fit_model(keras, jit_compile=as_users_compile_it(keras))
    history = fit(model, [1, OVERFLOW, 2], tfmp.LossScaleCallback(), epochs=2)
    del history["loss"]
    assert history == {"loss_scale": [512, 256], "skipped_steps": [1, 2], "gradient_norm": [10, 10]}
    assert fit(model, [OVERFLOW], tfmp.LossScaleCallback())["loss_scale"] == [128]


# In Keras 2 TerminateOnNaN reads tensors from the dictionary of logs that `fit` itself uses.
@EVERY_KERAS
@pytest.mark.parametrize("replicas", [1, 2])
def test_metrics_stay_as_they_are_without_it(
    keras: ModuleType, two_replicas: tf.distribute.MirroredStrategy, replicas: int
) -> None:
    skip_before((3, 6), keras, "it shows a step's logs for the epoch if a callback adds to them")

    class OtherLogs(keras.Sequential):  # type: ignore[name-defined]
        """Returns values from a step that differ from the metrics. Keras shows the metrics for the epoch."""

        def train_step(self, *args: Any) -> dict[str, Any]:
            return {name: value + 1.0 for name, value in super().train_step(*args).items()}

    targets, ones = np.random.default_rng(0).random(6), np.ones([2, 2], np.float32)
    settings = {"batch_size": 2, "epochs": 2, "validation_data": (ones, ones[:, :1])}
    with two_replicas.scope() if replicas == 2 else contextlib.nullcontext():
        model = fit_model(keras, model_class=OtherLogs, learning_rate=0.5, metrics=["mae"])
    expected = fit(model, targets, **settings)
    assert set(expected) == {"loss", "mae", "val_loss", "val_mae"}
    # One model serves for all settings, because its compiled steps do not depend on what `fit` shows.
    for verbose, others in [(1, [keras.callbacks.TerminateOnNaN()]), (0, []), (2, [])][: 1 if replicas == 2 else 3]:
        model.set_weights([np.ones([2, 1], np.float32)])
        history = fit(model, targets, tfmp.LossScaleCallback(), *others, verbose=verbose, **settings)
        assert (history.pop("loss_scale"), history.pop("skipped_steps")) == ([1024, 1024], [0, 0])
        # The factor of the gradient is the mean of the targets.
        assert history.pop("gradient_norm") == pytest.approx([5 * targets[-2:].mean()] * 2)
        assert history == expected, verbose


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
    assert [(*each.values(),) for each in seen] == [(1024, 0, 0), (512, 1, math.inf), (256, 2, math.inf)]
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


# By itself, the bar of Keras 2 shows the mean, and counts the logs of the epoch as one more batch.
_MEANS = ((1024 + 512 + 512 + 256 + 256) / 5, (0 + 1 + 1 + 2 + 2) / 5)


@EVERY_KERAS
@pytest.mark.parametrize(("verbose", "stateful"), [(1, False), (1, True), (2, False)])
def test_progress_bar_shows_both(
    keras: ModuleType, verbose: int, stateful: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    callbacks, is_keras2 = [tfmp.LossScaleCallback()], keras.__version__.startswith("2.")
    if verbose == 1:
        skip_before((3, 11), keras, "the bar shows the mean over the epoch")
    if is_keras2 and stateful:
        callbacks.append(keras.callbacks.ProgbarLogger("steps", stateful_metrics=["loss_scale", "skipped_steps"]))
    fit(fit_model(keras), [1, OVERFLOW, 1, OVERFLOW], *callbacks, verbose=verbose)
    shown = re.findall(r"loss_scale: (\S+) - skipped_steps: ([0-9.e+]+)", capsys.readouterr().out)
    expected = _MEANS if is_keras2 and verbose == 1 and not stateful else (256, 2)
    assert tuple(map(float, shown[-1])) == expected


@EVERY_KERAS
@pytest.mark.parametrize("is_first", [True, False])
def test_loggers_of_keras_write_both_wherever_they_stand(keras: ModuleType, is_first: bool, tmp_path: Path) -> None:
    called: list[str] = []
    loggers = [keras.callbacks.CSVLogger(str(tmp_path / "log.csv"))]
    if has_board := importlib.util.find_spec("tensorboard") is not None:
        loggers.append(keras.callbacks.TensorBoard(str(tmp_path / "board"), write_graph=False))
    seen = keras.callbacks.LambdaCallback(on_train_begin=lambda logs: called.append("train"))
    callbacks = [*loggers, seen, tfmp.LossScaleCallback()]
    fit(fit_model(keras), [OVERFLOW], *(callbacks if is_first else reversed(callbacks)), epochs=2)
    assert called == ["train"]
    with (tmp_path / "log.csv").open(newline="") as file:
        rows = [(row["epoch"], row["loss_scale"], row["skipped_steps"]) for row in csv.DictReader(file)]
    assert rows == [("0", "512.0", "1"), ("1", "256.0", "2")]
    if has_board:
        shown = events(tmp_path / "board" / "train")
        assert shown["epoch_loss_scale"] == [(0, 512), (1, 256)]
        assert shown["epoch_skipped_steps"] == [(0, 1), (1, 2)]


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
    assert [(each["loss_scale"], each["skipped_steps"]) for each in seen] == [(1024, 0)]


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
@pytest.mark.parametrize("why", ["not asked for", "not asked for but by a detector", "one of several processes"])
def test_norm_is_measured_only_where_it_is_asked_for(
    keras: ModuleType, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tfmp.monitoring.callbacks.several_processes", lambda strategy: "processes" in why)
    detects = "detector" in why
    model = fit_model(keras, skip_spikes=tfmp.SpikeDetector(max_norm=50) if detects else None)
    callback = tfmp.LossScaleCallback(gradient_norm="processes" in why)
    history = fit(model, [100, 1], callback)
    assert set(history) == _ALWAYS | ({"skipped_spikes"} if detects else set())
    assert history["skipped_steps"] == [int(detects)]
    assert model.optimizer.records_gradient_norm == detects
    assert callback.norms.to_dict()["step"] == []
    if "processes" in why:
        # One process alone would trace another step than the others, unless all of them measure it.
        model = fit_model(keras)
        model.optimizer.record_gradient_norm()
        assert fit(model, [2], tfmp.LossScaleCallback())["gradient_norm"] == [10]


@EVERY_KERAS
@pytest.mark.parametrize("mode", ["dynamic", "log_max"])
def test_gradients_that_overflow_without_scaling_train_with_the_scale_that_the_warning_names(
    keras: ModuleType, mode: str
) -> None:
    def trained(manager: Any) -> tuple[bool, list[str]]:
        layer = keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros", dtype="mixed_float16")
        model = keras.Sequential([layer, keras.layers.Activation("linear", dtype="float32")])
        optimizer = tfmp.LossScaleOptimizer(keras.optimizers.SGD(2.0**-26), manager)
        model.compile(optimizer, loss=lambda targets, outputs: 2.0**24 * tf.reduce_mean((outputs - targets) ** 2))
        x = np.ones([32, 1], np.float32)
        with logged() as log:
            model.fit(x, x, batch_size=1, verbose=0, callbacks=[tfmp.LossScaleCallback(every_n_steps=8)])
        assert (int(optimizer.applied_steps) > 0) == bool(model.get_weights()[0].item() > 0.1)
        return int(optimizer.applied_steps) > 0, log.warnings

    learned, (warning,) = trained(mode)
    (cure,) = re.findall(r'pass {"min_loss_scale": 2\*\*(-\d+)} as the loss-scale manager', warning)
    assert f"or min_loss_scale=2**{cure} to the manager that you make" in warning
    assert not learned
    assert trained({"mode": mode, "min_loss_scale": 2.0 ** int(cure)}) == (True, [])


_NOT_WATCHED = "Keras' own LossScaleOptimizer, which tfmp does not watch. "


_ENOUGH = "was compiled with SGD alone, which is enough for float32 and bfloat16. To train it in"


@EVERY_KERAS
@pytest.mark.parametrize(
    ("dtype", "own", "found"),
    [
        ("float32", False, _ENOUGH),
        ("mixed_bfloat16", False, _ENOUGH),
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
        assert [set(fit(model, [1, 1], callback)) for _ in range(2)] == [{"loss"}] * 2
    (warning,) = log.warnings
    assert re.match(r"the model that reporters\.py:\d+ trains ", warning)
    assert found in warning
    assert "rite model.compile(tfmp.LossScaleOptimizer(SGD(...)), ...)." in warning
    assert callback.ranges.last is None


@EVERY_KERAS
@pytest.mark.parametrize("names", [("one", "two"), ("same", "same")])
def test_steps_of_a_scaler_are_shown(keras: ModuleType, names: tuple[str, str], tmp_path: Path) -> None:
    scaler = tfmp.GradScaler(8, skip_spikes=tfmp.SpikeDetector(max_norm=10))
    one, two = (tf.Variable(0.0, name=name) for name in names)

    class Model(keras.Model):  # type: ignore[name-defined]
        def train_step(self, batch: Any) -> dict[str, Any]:
            grad = scaler.scale(tf.reduce_mean(batch))
            scaler.step(self.optimizer, [(3 * grad, one), (4 * grad, two)])
            scaler.update()
            return {"loss": tf.constant(0.0)}

    model = Model()
    model.compile(keras.optimizers.SGD(1.0), jit_compile=False)
    settings: dict[str, Any] = {"scaler": scaler, "ranges_every_n_steps": 2, "summary_dir": str(tmp_path)}
    callback = tfmp.LossScaleCallback(every_n_steps=1, **settings)
    grads = tf.constant([1.0, math.inf, 100.0, 2.0])
    with logged() as log:
        history = model.fit(grads, batch_size=1, shuffle=False, verbose=0, callbacks=[callback]).history
    assert (history["gradient_norm"], history["skipped_steps"], history["skipped_spikes"]) == ([10], [2], [1])
    assert (history["loss_scale"], float(one), float(two)) == ([4], -9, -12)
    first, second = names
    assert f"overflow in {first}:0: 1 inf; {second}:0: 1 inf" in log.info
    assert any(tmp_path.iterdir())
    assert [line for line in log.info if line.startswith("spike")] == [
        f"spike: gradient norm 500 above the bound 10, from {second}:0 (64 %), {first}:0 (36 %); 1 skipped so far"
    ]
    found = callback.ranges.to_dict()
    assert (found["step"], found["loss_scale"], found["gradients_nonfinite"]) == ([2, 4], [8, 4], [1, 0])
    gradients = {name: each.to_dict() for name, each in callback.ranges.last.histograms["gradients"].items()}
    # Variables of one name are counted together.
    assert gradients == ({"one": {"2": 1}, "two": {"3": 1}} if first != second else {"same": {"2": 1, "3": 1}})


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
    environment = os.environ | {"PYTHONPATH": str(Path(tfmp.__file__).parents[1]), "CUDA_VISIBLE_DEVICES": "-1"} | own
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert done.stdout.splitlines()[0] == "False", done.stderr
    assert done.stdout.count("[8.0] True") == 2, done.stderr
