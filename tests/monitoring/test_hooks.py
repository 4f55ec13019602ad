import logging
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import tfmp

pytestmark = [pytest.mark.essential, pytest.mark.graph]


@tf.custom_gradient
def _times(w: tf.Tensor, factor: tf.Tensor) -> Any:
    """Return `w` with the factor as its gradient, so that the loss stays finite if the factor is infinite."""
    return tf.identity(w), lambda upstream: (upstream * factor, None)


def _train_op(factor: Any = 1.0, with_global_step: bool = True) -> tuple[tf.Operation, tfmp.LossScaleOptimizer]:
    w = tf.compat.v1.get_variable("w", initializer=1.0)
    manager = tfmp.ExponentialUpdateLossScaleManager(1024, 1000, decr_every_n_nan_or_inf=1, decr_ratio=0.5)
    opt = tfmp.LossScaleOptimizer(tf.compat.v1.train.GradientDescentOptimizer(0.5), manager)
    global_step = tf.compat.v1.train.get_or_create_global_step() if with_global_step else None
    return opt.minimize(_times(tf.identity(w), tf.convert_to_tensor(factor)), global_step), opt


def _messages(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "tfmp"]


def _reports(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return the logged reports of scales and steps."""
    return [message for message in _messages(caplog) if message.startswith("loss scale ")]


def _overflows(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return the logged messages about variables that overflowed."""
    return [message for message in _messages(caplog) if message.startswith("overflow")]


def _run(hook: tfmp.LossScaleLoggingHook, train_op: tf.Operation, steps: int, **settings: Any) -> None:
    with tf.compat.v1.train.MonitoredTrainingSession(hooks=[hook], log_step_count_steps=None, **settings) as session:
        for _ in range(steps):
            session.run(train_op)


@pytest.fixture
def graph() -> Any:
    with tf.Graph().as_default() as graph:
        yield graph


@pytest.fixture(autouse=True)
def _log_level(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="tfmp")


@pytest.mark.usefixtures("graph")
@pytest.mark.parametrize("given", ["manager", "optimizer", "nothing"])
def test_reports_come_first_every_n_steps_and_at_the_end(caplog: pytest.LogCaptureFixture, given: str) -> None:
    train_op, opt = _train_op(math.inf)
    manager = {"manager": opt._loss_scale_manager, "optimizer": opt, "nothing": None}[given]
    _run(tfmp.LossScaleLoggingHook(manager, every_n_steps=3), train_op, 6)
    assert _reports(caplog) == [
        "loss scale 512, global step 0, steps applied 0, skipped 1 (1 in a row), gradient norm inf",
        "loss scale 64, global step 0, steps applied 0, skipped 4 (4 in a row), gradient norm inf",
        "loss scale 16, global step 0, steps applied 0, skipped 6 (6 in a row)",
    ]


@pytest.mark.usefixtures("graph")
def test_last_step_is_reported_once(caplog: pytest.LogCaptureFixture) -> None:
    train_op, _ = _train_op()
    _run(tfmp.LossScaleLoggingHook(every_n_steps=2), train_op, 3)
    assert len(_reports(caplog)) == 2


@pytest.mark.usefixtures("graph")
def test_reports_come_every_n_seconds(caplog: pytest.LogCaptureFixture) -> None:
    train_op, _ = _train_op()
    _run(tfmp.LossScaleLoggingHook(every_n_secs=1e-9), train_op, 3)
    _run(tfmp.LossScaleLoggingHook(every_n_secs=1e9), train_op, 3)
    assert len(_reports(caplog)) == 3 + 2


@pytest.mark.usefixtures("graph")
def test_large_scale_is_shown_to_the_digit(caplog: pytest.LogCaptureFixture) -> None:
    manager = tfmp.ExponentialUpdateLossScaleManager(2**32, 1000)
    _run(tfmp.LossScaleLoggingHook(manager), _train_op()[0], 1)
    assert _reports(caplog)[0].startswith("loss scale 4294967296, ")


@pytest.mark.usefixtures("graph")
def test_hook_works_without_global_step(caplog: pytest.LogCaptureFixture) -> None:
    train_op, opt = _train_op(with_global_step=False)
    hook = tfmp.LossScaleLoggingHook(opt)
    hook.begin()
    with tf.compat.v1.Session() as session:
        session.run(tf.compat.v1.global_variables_initializer())
        session.run(train_op)
        hook.end(session)
    assert _messages(caplog) == ["loss scale 1024, steps applied 1, skipped 0 (0 in a row)"]


@pytest.mark.usefixtures("graph")
def test_hook_works_under_scopes_and_shows_every_manager(caplog: pytest.LogCaptureFixture) -> None:
    with tf.compat.v1.variable_scope("first"):
        first, _ = _train_op()
    with tf.name_scope("second"), tf.compat.v1.variable_scope("second"):
        second, _ = _train_op(math.inf)
    _run(tfmp.LossScaleLoggingHook(), tf.group(first, second), 1)
    assert [message.split(",")[0] for message in _reports(caplog)] == ["loss scale 1024", "loss scale 512"]


@pytest.mark.usefixtures("graph")
def test_variables_that_overflowed_since_the_last_report_are_named(caplog: pytest.LogCaptureFixture) -> None:
    # The third report follows an applied step. Before the fourth report no further step was skipped.
    train_op, _ = _train_op(_factors(1, math.inf, math.nan, 1, 1, 1, 1))
    _run(tfmp.LossScaleLoggingHook(every_n_steps=2), train_op, 7)
    assert [message.split("steps applied")[1] for message in _reports(caplog)] == [
        " 1, skipped 0 (0 in a row), gradient norm 1",
        " 1, skipped 2 (2 in a row), gradient norm nan",
        " 3, skipped 2 (0 in a row), gradient norm 1",
        " 5, skipped 2 (0 in a row), gradient norm 1",
    ]
    assert _overflows(caplog) == [
        "overflow in w:0: 1 nan",
        "overflows by variable:\nvariable  skipped steps  at the last one\nw:0                   2  1 nan",
    ]


@pytest.mark.usefixtures("graph")
def test_variables_of_an_optimizer_that_took_no_step_are_not_named_again(caplog: pytest.LogCaptureFixture) -> None:
    with tf.compat.v1.variable_scope("first"):
        first, _ = _train_op(math.inf)
    with tf.compat.v1.variable_scope("second"):
        second, _ = _train_op(math.nan)
    hook = tfmp.LossScaleLoggingHook(every_n_steps=1)
    with tf.compat.v1.train.MonitoredTrainingSession(hooks=[hook], log_step_count_steps=None) as session:
        for train_op in (first, second, second):
            session.run(train_op)
    head = "overflows by variable:\nvariable   skipped steps  at the last one\n"
    assert _overflows(caplog) == [
        "overflow in first/w:0: 1 inf",
        "overflow in second/w:0: 1 nan",
        "overflow in second/w:0: 1 nan",
        f"{head}first/w:0              1  1 inf",
        "overflows by variable:\nvariable    skipped steps  at the last one\nsecond/w:0              2  1 nan",
    ]


def _factors(*values: float) -> tf.Tensor:
    """Return a tensor that has the next of the values at each run."""
    dataset = tf.data.Dataset.from_tensor_slices(np.float32(values))
    return tf.compat.v1.data.make_one_shot_iterator(dataset).get_next()


def test_restored_scale_is_shown(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(2):
        with tf.Graph().as_default():
            train_op, _ = _train_op(_factors(math.inf, 1))
            _run(tfmp.LossScaleLoggingHook(every_n_steps=100), train_op, 2, checkpoint_dir=str(tmp_path))
    assert _reports(caplog) == [
        "loss scale 512, global step 0, steps applied 0, skipped 1 (1 in a row), gradient norm inf",
        "loss scale 512, global step 1, steps applied 1, skipped 1 (0 in a row)",
        "loss scale 256, global step 1, steps applied 0, skipped 1 (1 in a row), gradient norm inf",
        "loss scale 256, global step 2, steps applied 1, skipped 1 (0 in a row)",
    ]


@pytest.mark.usefixtures("graph")
def test_summaries_are_written_over_the_global_step(tmp_path: Path) -> None:
    train_op, _ = _train_op(_factors(1, math.inf, 1))
    _run(tfmp.LossScaleLoggingHook(every_n_steps=1, summary_dir=str(tmp_path)), train_op, 3)
    (path,) = tmp_path.iterdir()
    seen: dict[str, list[tuple[int, float]]] = {}
    for event in tf.compat.v1.train.summary_iterator(str(path)):
        for value in event.summary.value:
            seen.setdefault(value.tag, []).append((event.step, value.simple_value))
    assert seen == {
        "loss_scale": [(1, 1024), (1, 512), (2, 512)],
        "attempted_steps": [(1, 1), (1, 2), (2, 3)],
        "applied_steps": [(1, 1), (1, 1), (2, 2)],
        "skipped_steps": [(1, 0), (1, 1), (2, 1)],
        "consecutive_skipped_steps": [(1, 0), (1, 1), (2, 0)],
        "last_step_applied": [(1, 1), (1, 0), (2, 1)],
        "last_step_finite": [(1, 1), (1, 0), (2, 1)],
        "gradient_norm": [(1, 1), (1, math.inf), (2, 1)],
    }


@pytest.mark.usefixtures("graph")
def test_plain_session_loop_reads_the_manager() -> None:
    train_op, opt = _train_op(math.inf)
    scale = opt._loss_scale_manager.get_loss_scale()
    with tf.compat.v1.Session() as session:
        session.run(tf.compat.v1.global_variables_initializer())
        session.run(train_op)
        assert session.run(scale) == 512


def _advance(step: tf.Operation, way: str) -> tf.Operation:
    """Return a step that also increments the global step by hand."""
    global_step = tf.compat.v1.train.get_global_step()
    with tf.control_dependencies([step]):
        if way == "assign":
            return global_step.assign(global_step + 1, read_value=False)
        return tf.group(tf.compat.v1.assign_add(global_step, 1))


def _line_of_advance(way: str) -> str:
    return f"test_hooks.py:{_advance.__code__.co_firstlineno + (5 if way == 'assign' else 6)}"


@pytest.mark.usefixtures("graph")
@pytest.mark.parametrize("use_resource", [True, False])
@pytest.mark.parametrize("way", ["", "assign", "assign_add"])
def test_script_that_counts_by_hand_is_told_its_line_once(
    caplog: pytest.LogCaptureFixture, way: str, use_resource: bool
) -> None:
    if not use_resource and tf.compat.v1.control_flow_v2_enabled():
        pytest.skip("control flow v2 updates no reference variable")
    if not use_resource:
        graph_keys = tf.compat.v1.GraphKeys
        tf.compat.v1.get_variable(
            "global_step",
            initializer=np.int64(0),
            trainable=False,
            use_resource=False,
            collections=[graph_keys.GLOBAL_STEP, graph_keys.GLOBAL_VARIABLES],
        )
    train_op, _ = _train_op(_factors(1, math.inf, 1, 1, 1))
    _run(tfmp.LossScaleLoggingHook(every_n_steps=1), _advance(train_op, way) if way else train_op, 5)
    warnings = [message for message in _messages(caplog) if message.startswith("global_step went up by more than")]
    assert len(warnings) == bool(way)
    assert all(f": {_line_of_advance(way)}, beside the optimizer, advances it too." in text for text in warnings)


@pytest.mark.estimator
def test_model_fn_that_counts_by_hand_is_told_its_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def model_fn(features: tf.Tensor, mode: str) -> Any:
        tf.compat.v1.train.get_or_create_global_step()
        train_op = _advance(_train_op()[0], "assign")
        return tf.estimator.EstimatorSpec(mode, loss=tf.reduce_sum(features), train_op=train_op)

    config = tf.estimator.RunConfig(str(tmp_path), log_step_count_steps=None)
    hook = tfmp.LossScaleLoggingHook(every_n_steps=1)
    tf.estimator.Estimator(model_fn, config=config).train(lambda: tf.data.Dataset.from_tensors([1.0]).repeat(4), [hook])
    (warning,) = [message for message in _messages(caplog) if message.startswith("global_step went up by more than")]
    assert f": {_line_of_advance('assign')}, beside the optimizer, advances it too." in warning


@pytest.mark.usefixtures("graph")
def test_two_optimizers_on_one_global_step_are_no_reason_to_warn(caplog: pytest.LogCaptureFixture) -> None:
    with tf.compat.v1.variable_scope("first"):
        first, opt = _train_op()
    with tf.compat.v1.variable_scope("second"):
        second, _ = _train_op()
    with tf.control_dependencies([first]):
        both = tf.group(second)
    _run(tfmp.LossScaleLoggingHook(opt, every_n_steps=1), both, 4)
    assert not any("went up by more" in message for message in _messages(caplog))


@pytest.mark.usefixtures("graph")
def test_graph_without_a_step_is_refused() -> None:
    with pytest.raises(ValueError, match=r"holds no step of a tfmp\.LossScaleOptimizer"):
        tfmp.LossScaleLoggingHook().begin()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"every_n_steps": 0}, "every_n_steps must be a whole number from 1 to 2**31 - 1, got 0."),
        ({"every_n_secs": -1.0}, "every_n_secs must be greater than 0, got -1.0."),
        ({"every_n_steps": 1, "every_n_secs": 1}, "not both, got every_n_steps=1 and every_n_secs=1."),
    ],
)
def test_bad_interval_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        tfmp.LossScaleLoggingHook(**settings)


@pytest.mark.parametrize("bad", [8, "loss_scale:0", object()])
def test_what_holds_no_manager_is_refused(bad: Any) -> None:
    with pytest.raises(
        TypeError, match=r"a tfmp\.LossScaleManager, or a tfmp\.LossScaleOptimizer or tfmp\.GradScaler, got "
    ):
        tfmp.LossScaleLoggingHook(bad)
