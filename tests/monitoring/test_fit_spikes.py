"""The norms of gradients and the spikes that the callback shows, in the `fit` of every Keras there is."""

import importlib
import importlib.util
import logging
import math
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import tfmp
from tfmp.core.managers.step_counters import LossScaleStatus

_KERASES = [name for name in ("keras", "tf_keras") if importlib.util.find_spec(name)]
# Multiplied by the scale of 1024 it overflows float32.
_OVERFLOW = 2.0**120
_ALWAYS = {"loss", "loss_scale", "skipped_steps"}


@pytest.fixture(params=_KERASES)
def keras(request: pytest.FixtureRequest) -> ModuleType:
    return importlib.import_module(request.param)


@pytest.fixture(autouse=True)
def _log_level(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="tfmp")


def _messages(caplog: pytest.LogCaptureFixture, level: int = logging.INFO) -> list[str]:
    records = [record for record in caplog.records if record.name == "tfmp"]
    return [record.getMessage() for record in records if record.levelno == level]


def _model(
    keras: ModuleType,
    detector: tfmp.SpikeDetector | None = None,
    *,
    learning_rate: float = 0.0,
    jit_compile: Any = False,
) -> Any:
    """Return a model of two weights, which stay 1 unless there is a learning rate. Their gradients are 3 and 4 targets.

    By default its steps are not compiled by XLA, which takes long.
    """
    layer = keras.layers.Dense(1, use_bias=False, kernel_initializer="ones", name="last")
    model = keras.Sequential([keras.Input([2]), layer])
    opt = tfmp.LossScaleOptimizer(
        keras.optimizers.SGD(learning_rate), tfmp.FixedLossScaleManager(1024), skip_spikes=detector
    )
    model.compile(opt, loss=lambda target, output: target * output, jit_compile=jit_compile)
    return model


def _fit(model: Any, targets: Any, *callbacks: Any, **settings: Any) -> dict[str, list[float]]:
    """Fit a model, to one target a step unless told otherwise, and return the history."""
    y = np.float32(targets).reshape(-1, 1)
    settings = {"batch_size": 1, "shuffle": False, "verbose": 0} | settings
    x = np.tile(np.float32([3, 4]), [len(y), 1])
    return model.fit(x, y, callbacks=list(callbacks), **settings).history


def _recorder(keras: ModuleType, name: str, seen: list[float]) -> Any:
    return keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: seen.append(logs[name]))


@pytest.mark.essential
def test_logs_hold_the_norm_of_each_step(keras: ModuleType) -> None:
    # As users compile it: Keras 3 compiles the steps by XLA.
    model = _model(keras, jit_compile="auto" if keras.__version__.startswith("3.") else None)
    callback, seen = tfmp.LossScaleCallback(), list[float]()
    history = _fit(model, [1, 2, _OVERFLOW, 4], callback, _recorder(keras, "gradient_norm", seen))
    assert seen == [5, 10, math.inf, 20]
    assert (set(history), history["gradient_norm"]) == (_ALWAYS | {"gradient_norm"}, [20])
    assert callback.norms.to_dict() == {
        "step": [1, 2, 3, 4],
        "gradient_norm": [5, 10, math.inf, 20],
        "skipped_spikes": [0] * 4,
    }


def test_norm_is_that_of_the_sum_over_replicas(keras: ModuleType, two_replicas: tf.distribute.MirroredStrategy) -> None:
    with two_replicas.scope():
        model = _model(keras, learning_rate=1.0)
    assert _fit(model, [2, -2], tfmp.LossScaleCallback(), batch_size=2)["gradient_norm"] == [0]
    (before,) = model.get_weights()
    history = _fit(model, [1, 3], tfmp.LossScaleCallback(), batch_size=2)
    # Keras 3 before 3.8 does not divide the loss by the number of replicas.
    assert history["gradient_norm"] == [np.linalg.norm(before - model.get_weights()[0])]


@pytest.mark.parametrize("asked", ["by-the-callback", "too-late"])
@pytest.mark.essential
def test_model_that_was_fitted_before_without_norms_is_traced_again(keras: ModuleType, asked: str) -> None:
    model, callback = _model(keras), tfmp.LossScaleCallback()
    assert set(_fit(model, [1, 1])) == {"loss"}
    if asked == "too-late":
        model.optimizer.record_gradient_norm()
    assert _fit(model, [1, 2], callback)["gradient_norm"] == [10]
    # The history goes on where it ended, whatever is shown in between.
    assert set(_fit(model, [1], tfmp.LossScaleCallback(gradient_norm=False))) == _ALWAYS
    _fit(model, [4], callback)
    assert callback.norms.to_dict()["step"][-2:] == [4, 6]


def test_norm_that_is_not_asked_for_is_not_measured(keras: ModuleType) -> None:
    model, callback = _model(keras), tfmp.LossScaleCallback(gradient_norm=False)
    assert set(_fit(model, [1], callback)) == _ALWAYS
    assert not model.optimizer.records_gradient_norm
    assert callback.norms.to_dict()["step"] == []


def test_one_of_several_processes_does_not_begin_to_measure(keras: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tfmp.monitoring.callbacks.several_processes", lambda strategy: True)
    model = _model(keras)
    assert set(_fit(model, [1], tfmp.LossScaleCallback())) == _ALWAYS
    model = _model(keras)
    model.optimizer.record_gradient_norm()
    assert _fit(model, [2], tfmp.LossScaleCallback())["gradient_norm"] == [10]


@pytest.mark.essential
def test_spikes_are_counted_and_named(keras: ModuleType, caplog: pytest.LogCaptureFixture) -> None:
    model, callback, seen = (
        _model(keras, tfmp.SpikeDetector(max_norm=10)),
        tfmp.LossScaleCallback(every_n_steps=1),
        list[float](),
    )
    history = _fit(model, [1, 100, 1], callback, _recorder(keras, "skipped_spikes", seen))
    assert seen == [0, 1, 1]
    assert (history["skipped_steps"], history["skipped_spikes"], history["loss_scale"]) == ([1], [1], [1024])
    assert callback.norms.to_dict() == {"step": [1, 2, 3], "gradient_norm": [5, 500, 5], "skipped_spikes": [0, 1, 1]}
    (weight,) = model.trainable_variables
    name = getattr(weight, "path", weight.name)
    assert _messages(caplog) == [
        f"spike: gradient norm 500 above the bound 10, from {name} (100 %); 1 skipped so far",
    ]
    # The next `fit` does not tell of it again.
    _fit(model, [1], tfmp.LossScaleCallback(every_n_steps=1))
    assert len(_messages(caplog)) == 1


def test_spikes_are_shown_without_their_norms(keras: ModuleType) -> None:
    callback = tfmp.LossScaleCallback(gradient_norm=False)
    history = _fit(_model(keras, tfmp.SpikeDetector(max_norm=10)), [100, 1], callback)
    assert (set(history), history["skipped_spikes"]) == (_ALWAYS | {"skipped_spikes"}, [1])
    assert callback.norms.to_dict()["step"] == []


def test_spikes_without_end_are_no_reason_to_stop_but_one_to_warn(
    keras: ModuleType, caplog: pytest.LogCaptureFixture
) -> None:
    model = _model(keras, tfmp.SpikeDetector(max_norm=10, max_consecutive_skips=3))
    settings: Any = {"on_stuck": "raise", "stuck_after": 1}
    _fit(model, [100] * 5, tfmp.LossScaleCallback(every_n_steps=1, **settings))
    assert (int(model.optimizer.skipped_spikes), int(model.optimizer.applied_steps)) == (3, 2)
    (warning,) = _messages(caplog, logging.WARNING)
    assert warning.startswith("the number of spikes in a row reached max_consecutive_skips=3: the gradients have grown")
    # The next `fit` warns of what is new only.
    _fit(model, [100], tfmp.LossScaleCallback(every_n_steps=1, **settings))
    assert len(_messages(caplog, logging.WARNING)) == 1
    _fit(model, [1, 100, 100, 100], tfmp.LossScaleCallback(**settings))
    assert len(_messages(caplog, logging.WARNING)) == 2


@pytest.mark.parametrize("has_detector", [False, True])
def test_summaries_hold_the_norm_and_the_spikes(keras: ModuleType, tmp_path: Path, has_detector: bool) -> None:
    detector = tfmp.SpikeDetector(max_norm=10) if has_detector else None
    _fit(_model(keras, detector), [1, 100], tfmp.LossScaleCallback(every_n_steps=1, summary_dir=str(tmp_path)))
    seen: dict[str, list[float]] = {}
    (path,) = tmp_path.iterdir()
    for record in tf.data.TFRecordDataset(str(path)):
        for value in tf.compat.v1.Event.FromString(record.numpy()).summary.value:
            seen.setdefault(value.tag, []).append(float(tf.make_ndarray(value.tensor)))
    # The last report is that of the epoch.
    expected = {"gradient_norm": [5, 500, 500]} | ({"skipped_spikes": [0, 1, 1]} if has_detector else {})
    assert {tag: values for tag, values in seen.items() if tag not in LossScaleStatus._fields} == expected


def test_steps_of_a_scaler_are_shown(keras: ModuleType, caplog: pytest.LogCaptureFixture) -> None:
    scaler = tfmp.GradScaler(8, skip_spikes=tfmp.SpikeDetector(max_norm=10))

    class Model(keras.Model):  # type: ignore[name-defined]
        def __init__(self) -> None:
            super().__init__()
            # In a tuple, because Keras would track the scaler as an attribute.
            self._train = (scaler, [tf.Variable(0.0, name=name) for name in ("one", "two")])

        def train_step(self, batch: Any) -> dict[str, Any]:
            scaler, (first, second) = self._train
            grad = scaler.scale(tf.reduce_mean(batch))
            scaler.step(self.optimizer, [(3 * grad, first), (4 * grad, second)])
            scaler.update()
            return {"loss": tf.constant(0.0)}

    model = Model()
    model.compile(keras.optimizers.SGD(0.0), jit_compile=False)
    callback, grads = tfmp.LossScaleCallback(every_n_steps=1, scaler=scaler), tf.constant([1.0, math.inf, 100.0, 2.0])
    history = model.fit(grads, batch_size=1, shuffle=False, verbose=0, callbacks=[callback]).history
    assert (history["gradient_norm"], history["skipped_steps"], history["skipped_spikes"]) == ([10], [2], [1])
    assert [message for message in _messages(caplog) if message.startswith("spike")] == [
        "spike: gradient norm 500 above the bound 10, from two:0 (64 %), one:0 (36 %); 1 skipped so far"
    ]


@pytest.mark.parametrize("bad", [0, None, "yes"])
def test_bad_flag_is_refused(bad: Any) -> None:
    with pytest.raises(TypeError, match=f"gradient_norm must be True or False, got {bad!r}"):
        tfmp.LossScaleCallback(gradient_norm=bad)
