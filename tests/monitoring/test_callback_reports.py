"""What the callback does at its reports, in the `fit` of every Keras there is."""

import importlib
import importlib.util
import logging
import math
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import tfmp
from tfmp.core.managers.step_counters import LossScaleStatus

_KERASES = [name for name in ("keras", "tf_keras") if importlib.util.find_spec(name)]


@pytest.fixture(params=_KERASES)
def keras(request: pytest.FixtureRequest) -> ModuleType:
    return importlib.import_module(request.param)


@pytest.fixture(autouse=True)
def _log_level(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, logger="tfmp")


def _messages(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "tfmp"]


def _model(keras: ModuleType, opt: Any = None, policy: str = "float32") -> Any:
    """Return a model of one weight. Its gradient is the target; its loss is the weight times the target."""
    layer = keras.layers.Dense(1, use_bias=False, kernel_initializer="ones", dtype=policy)
    model = keras.Sequential([keras.Input([1]), layer])
    manager = tfmp.ExponentialUpdateLossScaleManager(4, 1000, decr_every_n_nan_or_inf=1, decr_ratio=0.5)
    opt = opt or tfmp.LossScaleOptimizer(keras.optimizers.SGD(0.5), manager)
    model.compile(opt, loss=lambda target, output: target * tf.cast(output, tf.float32))
    return model


def _fit(model: Any, targets: Any, *callbacks: Any, **settings: Any) -> Any:
    y = np.float32(targets).reshape(-1, 1)
    settings = {"batch_size": 1, "shuffle": False, "verbose": 0} | settings
    return model.fit(np.ones_like(y), y, callbacks=list(callbacks), **settings)


# Multiplied by a scale of 4 it overflows float32; multiplied by 2, the scale after one back-off, it does not.
_OVERFLOW = 2.0**126


def _summaries(directory: Path) -> dict[str, list[tuple[int, float]]]:
    seen: dict[str, list[tuple[int, float]]] = {}
    (path,) = directory.iterdir()
    for record in tf.data.TFRecordDataset(str(path)):
        event = tf.compat.v1.Event.FromString(record.numpy())
        for value in event.summary.value:
            seen.setdefault(value.tag, []).append((event.step, float(tf.make_ndarray(value.tensor))))
    return seen


def test_summaries_are_written_where_variables_have_copies(
    keras: ModuleType, two_replicas: tf.distribute.MirroredStrategy, tmp_path: Path
) -> None:
    with two_replicas.scope():
        model = _model(keras)
    _fit(model, [1, 1, 1, 1], tfmp.LossScaleCallback(summary_dir=str(tmp_path)), batch_size=2)
    assert _summaries(tmp_path)["attempted_steps"] == [(2, 2)]


def test_summaries_hold_every_tag_at_each_report(keras: ModuleType, tmp_path: Path) -> None:
    callback = tfmp.LossScaleCallback(every_n_steps=2, summary_dir=str(tmp_path))
    _fit(_model(keras), [_OVERFLOW, 1, 1, 1, 1], callback)
    seen = _summaries(tmp_path)
    assert set(seen) == {*LossScaleStatus._fields, "gradient_norm"}
    assert seen["loss_scale"] == [(1, 2), (3, 2), (4, 2)]
    assert seen["attempted_steps"] == [(1, 2), (3, 4), (4, 5)]
    assert seen["gradient_norm"] == [(1, 1), (3, 1), (4, 1)]
    assert seen["last_step_finite"] == [(1, 1), (3, 1), (4, 1)]


def test_variables_that_overflowed_since_the_last_report_are_named(
    keras: ModuleType, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="tfmp")
    model = _model(keras)
    (weight,) = model.trainable_variables
    name = getattr(weight, "path", weight.name)
    # The report of the first epoch follows an applied step. The last epoch skips no step.
    for targets in ([_OVERFLOW, 1], [1], [1]):
        _fit(model, targets, tfmp.LossScaleCallback())
    head = f"{'variable':{len(name)}}  skipped steps  at the last one"
    table = f"overflows by variable:\n{head}\n{name}              1  1 inf"
    # The table counts the overflows of one `fit` only.
    assert _messages(caplog) == [f"overflow in {name}: 1 inf", table]


@pytest.mark.parametrize("policy", ["warn", "stop", "raise"])
def test_loss_that_is_nan_is_not_the_scales_fault(
    keras: ModuleType, caplog: pytest.LogCaptureFixture, policy: Any
) -> None:
    model = _model(keras)
    callback = tfmp.LossScaleCallback(every_n_steps=1, on_stuck=policy)
    targets = [1, math.nan, math.nan, math.nan]
    if policy == "raise":
        with pytest.raises(tfmp.LossScaleStuckError, match="the loss is NaN before it is scaled"):
            _fit(model, targets, callback, verbose=2)
    else:
        _fit(model, targets, callback, verbose=2)
        (warning,) = _messages(caplog)
        assert "the loss is NaN before it is scaled" in warning
    assert int(model.optimizer.attempted_steps) == (4 if policy == "warn" else 2)
    assert model.get_weights()[0].item() == 0.5


def test_fit_whose_gradients_overflow_without_scaling_trains_with_the_scale_that_the_warning_names(
    keras: ModuleType, caplog: pytest.LogCaptureFixture
) -> None:
    for manager, trains in [("dynamic", False), ({"min_loss_scale": 2**-20}, True)]:
        layer = keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros", dtype="mixed_float16")
        model = keras.Sequential([layer, keras.layers.Activation("linear", dtype="float32")])
        optimizer = tfmp.LossScaleOptimizer(keras.optimizers.SGD(2.0**-26), manager)
        model.compile(optimizer, loss=lambda targets, outputs: 2.0**24 * tf.reduce_mean((outputs - targets) ** 2))
        features = np.ones([32, 1], np.float32)
        model.fit(features, features, batch_size=1, verbose=0, callbacks=[tfmp.LossScaleCallback(every_n_steps=8)])
        warnings = [text for text in _messages(caplog) if text.startswith("training is stuck")]
        assert ['pass {"min_loss_scale": 2**-20} as the loss-scale manager' in text for text in warnings] == [True]
        assert (int(optimizer.applied_steps) > 0) == trains == bool(model.get_weights()[0].item() > 0.1)


@pytest.mark.parametrize(
    ("settings", "steps", "message"),
    [
        # The scales are 2**21 and 2**20: the second step runs at the floor.
        (
            {"init_loss_scale": 2**21, "min_loss_scale": 2**20},
            3,
            "the loss scale is at its floor, 1048576, and 2 steps",
        ),
        ({"init_loss_scale": 2**60}, 5, "enough to lower the loss scale 5 times, and it is 3.602879702e+16 now"),
    ],
    ids=["floor", "back-offs"],
)
@pytest.mark.parametrize("policy", ["stop", "raise"])
def test_scale_that_does_not_help_is_stuck(
    keras: ModuleType, caplog: pytest.LogCaptureFixture, settings: Any, steps: int, message: str, policy: Any
) -> None:
    caplog.set_level(logging.INFO, logger="tfmp")
    manager = tfmp.ExponentialUpdateLossScaleManager(
        incr_every_n_steps=1000, decr_every_n_nan_or_inf=1, decr_ratio=0.5, **settings
    )
    model = _model(keras, tfmp.LossScaleOptimizer(keras.optimizers.SGD(0.5), manager))
    callback = tfmp.LossScaleCallback(every_n_steps=1, on_stuck=policy, stuck_after=5)
    # Multiplied by a scale of 2**18 or more it overflows float32.
    targets = [2.0**110] * 9
    if policy == "raise":
        with pytest.raises(tfmp.LossScaleStuckError, match=re.escape(message)):
            _fit(model, targets, callback)
    else:
        _fit(model, targets, callback)
        assert any(message in text for text in _messages(caplog))
    assert int(model.optimizer.attempted_steps) == steps
    assert model.get_weights()[0].item() == 1
    # The table is logged even if `fit` raises.
    assert _messages(caplog)[-1].endswith(f" {steps}  1 inf")


def test_overflow_without_end_is_told_at_the_end_of_the_epoch(
    keras: ModuleType, caplog: pytest.LogCaptureFixture
) -> None:
    model = _model(keras, tfmp.LossScaleOptimizer(keras.optimizers.SGD(0.5), tfmp.FixedLossScaleManager(4)))
    _fit(model, [_OVERFLOW] * 3, tfmp.LossScaleCallback(stuck_after=3, on_stuck="stop"), epochs=5)
    (warning,) = _messages(caplog)
    assert "the last 3 steps were skipped, and the loss scale is 4 now: a fixed scale may be too high" in warning
    assert int(model.optimizer.attempted_steps) == 3


@pytest.mark.parametrize("own", [False, True])
def test_float16_without_a_wrapper_is_warned_of_once(
    keras: ModuleType, caplog: pytest.LogCaptureFixture, own: bool
) -> None:
    inner = keras.optimizers.Adam(0.5)
    layer = keras.layers.Dense(1, dtype="mixed_float16")
    model = keras.Sequential([keras.Input([1]), keras.Sequential([layer])])
    # Keras wraps the optimizer only if the policy of the model itself is mixed_float16, not that of one layer.
    model.compile(keras.mixed_precision.LossScaleOptimizer(inner) if own else inner, "mse")
    callback, x = tfmp.LossScaleCallback(every_n_steps=1), np.ones([2, 1], np.float32)

    def fit() -> Any:
        return model.fit(x, x, verbose=0, callbacks=[callback])

    for _ in range(2):
        history = fit().history
    (warning,) = _messages(caplog)
    assert warning.startswith(
        f"the model that test_callback_reports.py:{fit.__code__.co_firstlineno + 1} trains computes in float16 with "
        + ("Keras' own LossScaleOptimizer" if own else "Adam alone")
    )
    assert "Write model.compile(tfmp.LossScaleOptimizer(Adam(...)), ...)." in warning
    assert set(history) == {"loss"}


def test_kerass_own_wrapper_in_float32_is_warned_of(keras: ModuleType, caplog: pytest.LogCaptureFixture) -> None:
    model = _model(keras, keras.mixed_precision.LossScaleOptimizer(keras.optimizers.SGD()))
    _fit(model, [1], tfmp.LossScaleCallback())
    (warning,) = _messages(caplog)
    assert "trains was compiled with Keras' own LossScaleOptimizer, which tfmp does not watch." in warning
