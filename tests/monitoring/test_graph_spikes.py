"""The norms of gradients and the spikes that the hook shows, in graphs of TensorFlow 2's and 1's behaviour."""

import logging
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import tfmp
from tfmp.core.managers.step_counters import LossScaleStatus

tf1 = tf.compat.v1
pytestmark = pytest.mark.graph


@pytest.fixture
def graph() -> Any:
    with tf.Graph().as_default() as graph:
        yield graph


@pytest.fixture(autouse=True)
def _log_level(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="tfmp")


def _messages(caplog: pytest.LogCaptureFixture, level: int = logging.INFO) -> list[str]:
    records = [record for record in caplog.records if record.name == "tfmp"]
    return [record.getMessage() for record in records if record.levelno == level]


def _norms(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return what the lines of the reports say of norms."""
    lines = [message for message in _messages(caplog) if message.startswith("loss scale ")]
    return [line.partition("), gradient norm ")[2] for line in lines]


def _next(*values: float) -> tf.Tensor:
    """Return a tensor that has the next of the values at each run."""
    return tf1.data.make_one_shot_iterator(tf.data.Dataset.from_tensor_slices(np.float32(values))).get_next()


def _train_op(factor: Any, max_norm: float | None = None) -> Any:
    """Return a step of two weights. The norm of their gradients is 5 times the factor; `w` has 36 % of its square."""
    w, v = (tf1.get_variable(name, initializer=0.0) for name in ("w", "v"))
    detector = None if max_norm is None else tfmp.SpikeDetector(max_norm=max_norm, max_consecutive_skips=3)
    opt = tfmp.LossScaleOptimizer(
        tf1.train.GradientDescentOptimizer(1.0), tfmp.FixedLossScaleManager(8), skip_spikes=detector
    )
    return opt.minimize((w * 3.0 + v * 4.0) * factor, tf1.train.get_or_create_global_step(), [w, v])


def _run(hook: tf1.train.SessionRunHook, fetches: Any, steps: int, **settings: Any) -> None:
    with tf1.train.MonitoredTrainingSession(hooks=[hook], log_step_count_steps=None, **settings) as session:
        for _ in range(steps):
            session.run(fetches)


class _Asked(tfmp.LossScaleLoggingHook):
    """Records at each call of `session.run` whether it asks for a norm."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.asked: list[bool] = []

    def before_run(self, run_context: Any) -> Any:
        asked = super().before_run(run_context)
        self.asked.append(bool(asked and any(asked.fetches["norms"])))
        return asked


@pytest.mark.essential
@pytest.mark.usefixtures("graph")
def test_norm_is_fetched_together_with_a_reported_step(caplog: pytest.LogCaptureFixture) -> None:
    train_op = _train_op(_next(1, 2, 3, math.inf, 5))
    hook = _Asked(every_n_steps=3)
    _run(hook, train_op, 5)
    assert hook.asked == [True, False, False, True, False]
    # The norm of the last step is not known, because nobody asked for it in time.
    assert _norms(caplog) == ["5", "inf", ""]
    assert _messages(caplog)[0] == (
        "loss scale 8, global step 1, steps applied 1, skipped 0 (0 in a row), gradient norm 5"
    )
    assert hook.norms.to_dict() == {"step": [1, 4], "gradient_norm": [5, math.inf], "skipped_spikes": [0, 0]}


@pytest.mark.usefixtures("graph")
def test_run_that_takes_no_step_is_not_asked_for_a_norm(caplog: pytest.LogCaptureFixture) -> None:
    fed = tf1.placeholder(tf.float32, [])
    train_op = _train_op(fed)
    hook = _Asked(every_n_steps=1)
    with tf1.train.MonitoredTrainingSession(hooks=[hook], log_step_count_steps=None) as session:
        # It has no input for the gradients.
        session.run(tf1.global_variables()[0])
        session.run(train_op, {fed: 2.0})
    assert (hook.asked, _norms(caplog)) == ([False, True], ["", "10"])


@pytest.mark.usefixtures("graph")
@pytest.mark.parametrize(("records", "shown"), [(False, [""] * 4), (True, ["", "10", "10", "25"])])
def test_norm_of_a_window_is_shown_if_it_is_recorded(
    caplog: pytest.LogCaptureFixture, records: bool, shown: list[str]
) -> None:
    factor = _next(1, 3, 4, 6)
    w = tf1.get_variable("w", initializer=[0.0, 0.0])
    opt = tfmp.LossScaleOptimizer(tf1.train.GradientDescentOptimizer(1.0), 8, accumulation_steps=2)
    if records:
        opt.record_gradient_norm()
    train_op = opt.minimize(tf.reduce_sum(w * [3.0, 4.0]) * factor, tf1.train.get_or_create_global_step(), [w])
    hook = tfmp.LossScaleLoggingHook(every_n_steps=1)
    _run(hook, train_op, 4)
    assert _norms(caplog) == shown
    assert hook.norms.to_dict()["gradient_norm"] == ([10, 25] if records else [])


@pytest.mark.usefixtures("graph")
def test_each_manager_has_its_norm(caplog: pytest.LogCaptureFixture) -> None:
    with tf1.variable_scope("first"):
        first = _train_op(1.0)
    with tf1.variable_scope("second"):
        second = _train_op(2.0, max_norm=5)
    hook = tfmp.LossScaleLoggingHook(every_n_steps=1)
    _run(hook, tf.group(first, second), 1)
    assert [line.partition("steps ")[2] for line in _messages(caplog)[:2]] == [
        "applied 1, skipped 0 (0 in a row), gradient norm 5",
        "applied 0, skipped 1 (1 in a row, 1 as spikes), gradient norm 10",
    ]
    assert hook.norms.to_dict()["gradient_norm"] == [5]


@pytest.mark.usefixtures("graph")
def test_norm_of_a_step_that_is_not_taken_is_not_fetched(caplog: pytest.LogCaptureFixture) -> None:
    with tf1.variable_scope("first"):
        first = _train_op(1.0)
    with tf1.variable_scope("second"):
        # It cannot be computed, as nothing is fed.
        _train_op(tf1.placeholder(tf.float32, []))
    _run(tfmp.LossScaleLoggingHook(every_n_steps=1, loss=tf.constant(0.0)), first, 1)
    assert [line.partition("steps ")[2] for line in _messages(caplog)[:2]] == [
        "applied 1, skipped 0 (0 in a row), gradient norm 5",
        "applied 0, skipped 0 (0 in a row)",
    ]


@pytest.mark.essential
@pytest.mark.usefixtures("graph")
def test_spikes_are_counted_and_named(caplog: pytest.LogCaptureFixture) -> None:
    train_op = _train_op(_next(1, 100, 200, 1, 1), max_norm=10)
    hook = tfmp.LossScaleLoggingHook(every_n_steps=2)
    _run(hook, train_op, 5)
    assert [message.partition("skipped ")[2] for message in _messages(caplog)] == [
        "0 (0 in a row, 0 as spikes), gradient norm 5",
        "2 (2 in a row, 2 as spikes), gradient norm 1000",
        "so far",
        "2 (0 in a row, 2 as spikes), gradient norm 5",
    ]
    assert _messages(caplog)[2] == (
        "spike: gradient norm 1000 above the bound 10, from v:0 (64 %), w:0 (36 %); 2 skipped so far"
    )
    assert hook.norms.to_dict() == {"step": [1, 3, 5], "gradient_norm": [5, 1000, 5], "skipped_spikes": [0, 2, 2]}


def test_spikes_without_end_are_no_reason_to_stop_but_one_to_warn(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    # The second run begins where the first one ended. What it says of an earlier one would not be new.
    for factors, warnings in [((100,) * 5, 1), ((100, 1), 1), ((100,) * 3, 2)]:
        with tf.Graph().as_default():
            train_op = _train_op(_next(*factors), max_norm=10)
            hook = tfmp.LossScaleLoggingHook(every_n_steps=1, on_stuck="raise", stuck_after=1)
            _run(hook, train_op, len(factors), checkpoint_dir=str(tmp_path))
        assert len(_messages(caplog, logging.WARNING)) == warnings
    assert set(_messages(caplog, logging.WARNING)) == {
        "the number of spikes in a row reached max_consecutive_skips=3: the gradients have grown for good, or training "
        "diverges. Steps are applied until a norm is within the bound again."
    }


@pytest.mark.usefixtures("graph")
@pytest.mark.parametrize("max_norm", [None, 10])
def test_summaries_hold_the_norm_and_the_spikes(tmp_path: Path, max_norm: float | None) -> None:
    train_op = _train_op(_next(1, 100, 1), max_norm)
    _run(tfmp.LossScaleLoggingHook(every_n_steps=1, summary_dir=str(tmp_path)), train_op, 3)
    (path,) = tmp_path.iterdir()
    seen: dict[str, list[float]] = {}
    for event in tf1.train.summary_iterator(str(path)):
        for value in event.summary.value:
            seen.setdefault(value.tag, []).append(value.simple_value)
    expected = {"gradient_norm": [5, 500, 5]} | ({} if max_norm is None else {"skipped_spikes": [0, 1, 1]})
    assert {tag: values for tag, values in seen.items() if tag not in LossScaleStatus._fields} == expected


@pytest.mark.estimator
@pytest.mark.filterwarnings("ignore:To make it possible to preserve tf.data options:UserWarning")
@pytest.mark.parametrize("replicas", [1, 2])
def test_estimator_skips_spikes(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, two_replicas: tf.distribute.MirroredStrategy, replicas: int
) -> None:
    def model_fn(features: tf.Tensor, mode: str) -> Any:
        w = tf1.get_variable("w", initializer=0.0)
        opt = tfmp.LossScaleOptimizer(
            tf1.train.GradientDescentOptimizer(1.0), 8, skip_spikes=tfmp.SpikeDetector(max_norm=10)
        )
        # Estimator takes the mean over the replicas.
        loss = tf.reduce_sum(w * features)
        return tf.estimator.EstimatorSpec(
            mode, loss=loss, train_op=opt.minimize(loss, tf1.train.get_or_create_global_step())
        )

    # One replica of the second step has the spike.
    values = np.ones([3, replicas])
    values[1, -1] = 100
    config = tf.estimator.RunConfig(
        str(tmp_path), log_step_count_steps=None, train_distribute=two_replicas if replicas == 2 else None
    )
    estimator = tf.estimator.Estimator(model_fn, config=config)
    hook = tfmp.LossScaleLoggingHook(every_n_steps=1)
    estimator.train(lambda: tf.data.Dataset.from_tensor_slices(np.float32(values.ravel())), [hook])
    norm = (99 + replicas) / replicas
    assert [message.partition("global step ")[2] for message in _messages(caplog)[:2]] == [
        "1, steps applied 1, skipped 0 (0 in a row, 0 as spikes), gradient norm 1",
        f"1, steps applied 1, skipped 1 (1 in a row, 1 as spikes), gradient norm {norm:.4g}",
    ]
    assert _messages(caplog)[2].startswith(f"spike: gradient norm {norm:.4g} above the bound 10, from w:0 (100 %)")
    assert estimator.get_variable_value("w") == -2
