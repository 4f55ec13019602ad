import json
import logging
import math
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import tfmp
from tfmp.core.managers.step_counters import LossScaleStatus
from tfmp.monitoring.stuck import StuckWatch, several_processes, why_stuck

tf1 = tf.compat.v1


@pytest.fixture(autouse=True)
def _log_level(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="tfmp")


def _warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    records = [record for record in caplog.records if record.name == "tfmp"]
    return [record.getMessage() for record in records if record.levelno == logging.WARNING]


def _status(scale: float, skips: int, applied: int = 5) -> LossScaleStatus:
    return LossScaleStatus(scale, skips == 0, skips == 0, applied + skips, applied, skips, skips)


@pytest.mark.parametrize(
    ("scale", "skips", "per_backoff", "loss", "reason"),
    [
        (1.0, 0, 1, 3.0, None),
        (2.0, 7, 1, 3.0, None),
        (2.0, 8, 1, None, "last 8 steps were skipped, enough to lower the loss scale 8 times, and it is 2 now"),
        (2.0, 15, 2, None, None),
        (2.0, 16, 2, None, "last 16 steps were skipped, enough to lower the loss scale 8 times"),
        (1.0, 7, None, None, None),  # a fixed scale of 1
        (1.0, 8, None, None, "last 8 steps were skipped, and the loss scale is 1 now: a fixed scale may be too high"),
        (2.0, 1, 2, math.nan, "the loss is NaN before it is scaled"),
        (2.0, 1, 2, -math.inf, "the loss is infinite before it is scaled"),
        (2.0, 0, 2, math.nan, None),  # the step was applied
    ],
)
def test_stuck_is_told_from_too_high(
    scale: float, skips: int, per_backoff: int | None, loss: float | None, reason: str | None
) -> None:
    found = why_stuck(_status(scale, skips), 1.0, per_backoff, stuck_after=8, loss=loss)
    assert found is None if reason is None else reason in str(found)
    assert found is None or "tfmp.check_precision" in found


def test_spikes_are_no_overflows() -> None:
    assert why_stuck(_status(1.0, 100), 1.0, 1, stuck_after=8, skips_at_floor=100) is not None
    spike = _status(1.0, 100)._replace(last_step_finite=True)
    assert why_stuck(spike, 1.0, 1, stuck_after=8, skips_at_floor=100, loss=math.nan) is None


@pytest.mark.parametrize(
    ("per_backoff", "skips_at_floor", "is_stuck"),
    [(1, 1, False), (1, 2, True), (3, 2, False), (3, 3, True), (None, 1, False), (None, 2, True)],
)
def test_floor_is_reached_when_a_back_off_there_changed_nothing(
    per_backoff: int | None, skips_at_floor: int, is_stuck: bool
) -> None:
    reason = why_stuck(_status(0.25, 7), 0.25, per_backoff, 8, skips_at_floor)
    assert reason is None or f"is at its floor, 0.25, and {skips_at_floor} steps in a row overflowed" in reason
    assert (reason is not None) is is_stuck


@pytest.mark.parametrize(
    ("floor", "cause"),
    [
        (1024.0, "the floor may be too high; let the scale fall lower: pass"),
        (1.0, "the gradients are too large for float16 by themselves; let the scale fall below 1: pass"),
        (0.25, "the gradients are too large for float16 by themselves; let the scale fall below 1: pass"),
        (2.0**-20, "no scale makes the gradients finite; lower the learning rate"),
    ],
)
def test_floor_is_suspected_itself_unless_it_is_very_low(floor: float, cause: str) -> None:
    assert f"overflowed all the same: {cause}" in str(why_stuck(_status(floor, 7), floor, 2, 8, skips_at_floor=2))


def _advice(warning: str) -> dict[str, Any]:
    """Return the manager that a warning says to pass."""
    (cure,) = re.findall(r'pass {"min_loss_scale": 2\*\*(-\d+)} as the loss-scale manager', warning)
    assert f"min_loss_scale=2**{cure} to the manager that you make" in warning
    return {"min_loss_scale": 2.0 ** int(cure)}


@pytest.mark.parametrize(
    ("first", "mode"), [("dynamic", "dynamic"), ({"mode": "log_max"}, "log_max"), ({"min_loss_scale": 64}, "dynamic")]
)
def test_advice_at_the_floor_cures_gradients_that_overflow_without_scaling(
    first: Any, mode: str, caplog: pytest.LogCaptureFixture
) -> None:
    def applied_steps(manager: Any) -> int:
        scaler, watch = tfmp.GradScaler(manager=manager), StuckWatch("warn", 64)
        optimizer, weight = tf.compat.v1.train.GradientDescentOptimizer(1.0), tf.Variable(0.0)
        for step in range(48):
            with tf.GradientTape() as tape:
                half = tf.cast(tf.cast(weight, tf.float16), tf.float32)
                scaled = scaler.scale(2.0**20 * half)
            scaler.step(optimizer, [(tape.gradient(scaled, weight), weight)])
            scaler.update()
            if step % 8 == 0:
                status = LossScaleStatus(*(each.numpy() for each in scaler.manager.get_status()))
                watch.wants_stop(scaler.manager, status)
        return int(scaler.applied_steps)

    assert applied_steps(first) == 0
    (warning,) = _warnings(caplog)
    assert applied_steps({"mode": mode} | _advice(warning)) > 20
    assert len(_warnings(caplog)) == 1


def _watch(floor: float = 1, **settings: Any) -> tuple[StuckWatch, tfmp.LossScaleManager]:
    settings = {"decr_every_n_nan_or_inf": 1} | settings
    return StuckWatch("stop", 8), tfmp.ExponentialUpdateLossScaleManager(1, 1000, min_loss_scale=floor, **settings)


def test_steps_that_bring_the_scale_to_its_floor_are_not_held_against_it() -> None:
    watch, manager = _watch()
    # The scales of the first three steps are 4, 2 and 1, so no step has run at 1 at the third status.
    statuses = [_status(4, 1), _status(2, 2), _status(1, 3), _status(1, 4), _status(1, 5)]
    assert [watch.wants_stop(manager, status) for status in statuses] == [False] * 4 + [True]


def test_floor_that_was_left_between_two_reports_is_no_floor_of_the_next_streak() -> None:
    watch, manager = _watch()
    # Between the reports, finite steps raise the scale to 8, and three overflows lower it to 1 again.
    statuses = [_status(1, 0, applied=4), _status(1, 3, applied=16), _status(1, 4, applied=16)]
    assert [watch.wants_stop(manager, status) for status in statuses] == [False] * 3
    assert watch.wants_stop(manager, _status(1, 5, applied=16))


def test_streak_that_began_at_the_floor_counts_as_a_whole() -> None:
    watch, manager = _watch()
    assert not watch.wants_stop(manager, _status(1, 0))
    assert watch.wants_stop(manager, _status(1, 2))


def test_floor_is_the_managers() -> None:
    watch, manager = _watch(floor=0.25)
    statuses = [_status(0.5, 1), _status(0.5, 2), _status(0.25, 3), _status(0.25, 5)]
    assert [watch.wants_stop(manager, status) for status in statuses] == [False, False, False, True]


def test_manager_with_a_tolerance_has_a_floor() -> None:
    watch, manager = _watch(tolerance=0.5)
    assert manager.skips_per_backoff is None
    assert [watch.wants_stop(manager, _status(1, skips)) for skips in (1, 2, 3)] == [False, False, True]


def test_fixed_scale_is_no_floor(caplog: pytest.LogCaptureFixture) -> None:
    watch, manager = StuckWatch("stop", 8), tfmp.FixedLossScaleManager(1)
    assert [watch.wants_stop(manager, _status(1, skips)) for skips in (1, 7, 8)] == [False, False, True]
    (warning,) = _warnings(caplog)
    assert "the last 8 steps were skipped, and the loss scale is 1 now" in warning
    assert 'For a scale below 1, pass {"min_loss_scale": 2**-20} as the loss-scale manager.' in warning


def test_it_is_said_once_until_a_step_is_applied(caplog: pytest.LogCaptureFixture) -> None:
    watch, manager = _watch()
    statuses = [_status(1, 1), _status(1, 3), _status(1, 4), _status(1, 0, applied=6), _status(1, 3, applied=6)]
    assert [watch.wants_stop(manager, status) for status in statuses] == [False, True, False, False, True]
    assert len(_warnings(caplog)) == 2
    watch.start()
    assert not watch.wants_stop(manager, statuses[0])
    assert watch.wants_stop(manager, statuses[1])


@pytest.mark.parametrize("policy", ["stop", "raise"])
def test_loss_of_one_of_several_processes_decides_nothing(caplog: pytest.LogCaptureFixture, policy: Any) -> None:
    _, manager = _watch()
    watch = StuckWatch(policy, 8)
    watch.start(several=True)
    assert not watch.wants_stop(manager, _status(8, 1), [math.nan])
    assert not watch.wants_stop(manager, _status(8, 2), [math.nan])
    (warning,) = _warnings(caplog)
    assert "the loss is NaN before it is scaled" in warning
    assert "Training stops here" not in warning
    # Within the same streak, the watch still acts on the status, which all processes share.
    if policy == "stop":
        assert watch.wants_stop(manager, _status(2, 8), [math.nan])
    else:
        with pytest.raises(tfmp.LossScaleStuckError, match="the last 8 steps were skipped"):
            watch.wants_stop(manager, _status(2, 8), [math.nan])


# The first of two workers. With TensorFlow 1's behaviour a strategy does not wait for the other worker.
_WORKER = """
import tensorflow as tf
tf.compat.v1.disable_v2_behavior()
import tfmp
with tf.Graph().as_default(), tf.distribute.MultiWorkerMirroredStrategy().scope():
    manager = tfmp.FixedLossScaleManager(8)
    for settings in [{"every_n_secs": 2}, {"on_stuck": "stop"}, {"every_n_secs": 2, "on_stuck": "raise"}]:
        tfmp.LossScaleLoggingHook(manager, **settings).begin()
        print("began")
"""


def test_one_of_several_workers_may_not_stop_by_its_clock() -> None:
    cluster = {"worker": ["localhost:1", "localhost:2"]}
    config = json.dumps({"cluster": cluster, "task": {"type": "worker", "index": 0}})
    environment = os.environ | {"TF_CONFIG": config}
    done = subprocess.run([sys.executable, "-c", _WORKER], env=environment, capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["began", "began"]
    assert "with every_n_secs=2 one process would stop before the others. Pass every_n_steps" in done.stderr


def test_replicas_of_one_process_are_no_several_processes(two_replicas: tf.distribute.MirroredStrategy) -> None:
    assert not several_processes(two_replicas)


def test_at_the_end_of_training_it_is_only_said(caplog: pytest.LogCaptureFixture) -> None:
    _, manager = _watch()
    watch = StuckWatch("raise", 8)
    assert not watch.wants_stop(manager, _status(2, 1), [math.nan], at_end=True)
    (warning,) = _warnings(caplog)
    assert "the loss is NaN before it is scaled" in warning


@pytest.mark.parametrize("make", [tfmp.LossScaleLoggingHook, tfmp.LossScaleCallback])
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"on_stuck": "hold"}, 'on_stuck must be "warn", "raise" or "stop", got \'hold\'.'),
        ({"stuck_after": 0}, "stuck_after must be a whole number from 1 to 2**31 - 1, got 0."),
    ],
)
def test_bad_policy_is_refused(make: Any, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        make(**settings)


@tf.custom_gradient
def _with_infinite_gradient(w: tf.Tensor) -> Any:
    return tf.identity(w), lambda upstream: upstream * math.inf


def _overflowing_train_op(scale: float = 4) -> tf.Operation:
    """Return a step with a finite loss and an infinite gradient."""
    w = tf1.get_variable("w", initializer=1.0)
    manager = tfmp.ExponentialUpdateLossScaleManager(scale, 1000, decr_every_n_nan_or_inf=1, decr_ratio=0.5)
    opt = tfmp.LossScaleOptimizer(tf1.train.GradientDescentOptimizer(0.5), manager)
    return opt.minimize(_with_infinite_gradient(tf.identity(w)), tf1.train.get_or_create_global_step())


def _run(hook: tfmp.LossScaleLoggingHook, train_op: Any, at_most: int) -> int:
    """Run until a hook stops it, and return the number of steps."""
    with tf1.train.MonitoredTrainingSession(hooks=[hook], log_step_count_steps=None) as session:
        for step in range(at_most):
            if session.should_stop():
                return step
            session.run(train_op)
    return at_most


@pytest.mark.graph
@pytest.mark.parametrize("policy", ["warn", "stop", "raise"])
def test_run_at_the_floor_is_stuck(caplog: pytest.LogCaptureFixture, policy: Any) -> None:
    with tf.Graph().as_default():
        train_op = _overflowing_train_op()
        hook = tfmp.LossScaleLoggingHook(every_n_steps=1, on_stuck=policy)
        if policy == "raise":
            with pytest.raises(tfmp.LossScaleStuckError, match=r"training is stuck: the loss scale is at its floor, 1"):
                _run(hook, train_op, 9)
            return
        # The scales are 4, 2, 1: the third step runs at the floor, but one overflow there may come from a bad batch.
        assert _run(hook, train_op, 9) == (4 if policy == "stop" else 9)
        (warning,) = _warnings(caplog)
        assert "the loss scale is at its floor, 1, and 2 steps in a row overflowed all the same" in warning
        assert ("Training stops here" in warning) == (policy == "stop")


@pytest.mark.graph
def test_run_that_backs_off_without_end_is_stuck(caplog: pytest.LogCaptureFixture) -> None:
    with tf.Graph().as_default():
        train_op = _overflowing_train_op(2**30)
        hook = tfmp.LossScaleLoggingHook(every_n_steps=1, on_stuck="stop", stuck_after=5)
        assert _run(hook, train_op, 9) == 5
    (warning,) = _warnings(caplog)
    assert "skipped, enough to lower the loss scale 5 times, and it is 33554432 now" in warning


@pytest.mark.graph
def test_run_that_raises_leaves_all_that_was_done_until_then(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with tf.Graph().as_default():
        train_op, w, _ = _train_op([1, math.nan])
        value = w.read_value()
        hook = tfmp.LossScaleLoggingHook(every_n_steps=1, summary_dir=str(tmp_path), on_stuck="raise")
        with tf1.train.MonitoredTrainingSession(hooks=[hook], log_step_count_steps=None) as session:
            session.run(train_op)
            with pytest.raises(tfmp.LossScaleStuckError, match="the loss is NaN"):
                session.run(train_op)
            # The table, the weights of the last applied step, and the summaries of both reports.
            assert caplog.messages[-1].startswith("overflows by variable:")
            assert session.run_step_fn(lambda step_context: step_context.session.run(value)) == 0.5
            (path,) = tmp_path.iterdir()
            events = [tf1.Event.FromString(record) for record in tf1.io.tf_record_iterator(str(path))]
            assert sum(len(event.summary.value) > 0 for event in events) == 2


def _train_op(factors: list[float]) -> tuple[tf.Operation, tf.Variable, tf.Tensor]:
    """Return a step whose loss is the weight times the next factor, the weight, and the loss."""
    w = tf1.get_variable("w", initializer=1.0)
    factor = tf1.data.make_one_shot_iterator(tf.data.Dataset.from_tensor_slices(np.float32(factors))).get_next()
    opt = tfmp.LossScaleOptimizer(tf1.train.GradientDescentOptimizer(0.5), tfmp.FixedLossScaleManager(8))
    loss = tf.identity(w * factor, name="loss")
    return opt.minimize(loss, tf1.train.get_or_create_global_step()), w, loss


@pytest.mark.graph
@pytest.mark.parametrize("given", ["nothing", "name", "tensor"])
def test_loss_that_is_nan_stops_the_run_with_the_last_applied_weights(
    caplog: pytest.LogCaptureFixture, given: str
) -> None:
    with tf.Graph().as_default():
        train_op, w, loss = _train_op([1, math.nan, 1])
        seen: list[float] = []
        last = tf1.train.FinalOpsHook(w.read_value())
        hook = tfmp.LossScaleLoggingHook(
            every_n_steps=1, on_stuck="stop", loss={"nothing": None, "name": "loss", "tensor": loss}[given]
        )
        with tf1.train.MonitoredTrainingSession(hooks=[hook, last], log_step_count_steps=None) as session:
            while not session.should_stop():
                seen.append(session.run([train_op, loss])[1])
        assert len(seen) == 2
        assert last.final_ops_values == 0.5
    assert "the loss is NaN before it is scaled" in _warnings(caplog)[0]


@pytest.mark.graph
@pytest.mark.estimator
@pytest.mark.filterwarnings("ignore:To make it possible to preserve tf.data options:UserWarning")
@pytest.mark.parametrize("bad_replica", [0, 1])
def test_losses_of_all_replicas_of_an_estimator_count(
    tmp_path: Any, two_replicas: tf.distribute.MirroredStrategy, caplog: pytest.LogCaptureFixture, bad_replica: int
) -> None:
    def model_fn(features: tf.Tensor, labels: tf.Tensor, mode: str) -> Any:
        del labels
        w = tf1.get_variable("w", initializer=1.0)
        opt = tfmp.LossScaleOptimizer(tf1.train.GradientDescentOptimizer(0.5), tfmp.FixedLossScaleManager(8))
        # The bad loss is infinite and not NaN, because Estimator itself stops at NaN.
        loss = tf.reduce_sum(w * features)
        return tf.estimator.EstimatorSpec(mode, loss=loss, train_op=opt.minimize(loss, tf1.train.get_global_step()))

    rows = np.ones([4, 2], np.float32)
    rows[1, bad_replica] = math.inf
    hook = tfmp.LossScaleLoggingHook(every_n_steps=1, on_stuck="stop")
    config = tf.estimator.RunConfig(train_distribute=two_replicas, log_step_count_steps=None)
    estimator = tf.estimator.Estimator(model_fn, tmp_path, config)
    estimator.train(lambda: tf.data.Dataset.from_tensor_slices((rows.ravel(), np.zeros(8, np.float32))), hooks=[hook])
    assert any("the loss is infinite before it is scaled" in warning for warning in _warnings(caplog))
    assert estimator.get_variable_value("w") == 0.5
    assert estimator.get_variable_value("global_step") == 1
