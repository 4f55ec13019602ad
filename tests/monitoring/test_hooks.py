"""What only the hook has: its lines, its interval, and what it fetches together with which steps of a graph."""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from reporters import HALVED, events, following, graph_step, logged, run_session

import tfmp
from tfmp.monitoring.step_counting import lines_that_assign

tf1 = tf.compat.v1
pytestmark = pytest.mark.graph

#: Multiplied by a scale of 8 or more it overflows float32; the loss itself does not.
_HUGE = 2.0**124


@pytest.fixture(autouse=True)
def _graph(request: pytest.FixtureRequest) -> Iterator[None]:
    if request.node.get_closest_marker("estimator"):
        yield
    else:
        with tf.Graph().as_default():
            yield


def _logged(hook: Any, fetches: Any, steps: int) -> list[str]:
    with logged() as log:
        run_session(hook, fetches, steps)
    return log.info


def _reports(hook: Any, fetches: Any, steps: int) -> list[str]:
    """Return the reports of scales and steps."""
    return [line for line in _logged(hook, fetches, steps) if line.startswith("loss scale ")]


class _Asked(tfmp.LossScaleLoggingHook):
    """Records what it asks for at each call of `session.run`."""

    def begin(self) -> None:
        super().begin()
        self.asked: list[Any] = []

    def before_run(self, run_context: Any) -> Any:
        asked = super().before_run(run_context)
        self.asked.append(asked and asked.fetches)
        return asked

    def has_asked(self, kind: str) -> list[bool]:
        return [bool(asked and any(asked[kind])) for asked in self.asked]


@pytest.mark.parametrize("given", ["manager", "optimizer", "nothing"])
def test_reports_come_first_every_n_steps_and_at_the_end(given: str) -> None:
    step = graph_step(_HUGE)
    manager = {"manager": step.opt.manager, "optimizer": step.opt, "nothing": None}[given]
    # The norm of the last step is not known, because nobody asked for it in time.
    assert _reports(tfmp.LossScaleLoggingHook(manager, every_n_steps=3), step.train_op, 6) == [
        "loss scale 512, global step 0, steps applied 0, skipped 1 (1 in a row), gradient norm inf",
        "loss scale 64, global step 0, steps applied 0, skipped 4 (4 in a row), gradient norm inf",
        "loss scale 16, global step 0, steps applied 0, skipped 6 (6 in a row)",
    ]


@pytest.mark.parametrize(
    ("settings", "reports"), [({"every_n_steps": 2}, 2), ({"every_n_secs": 1e-9}, 3), ({"every_n_secs": 1e9}, 2)]
)
def test_last_step_is_reported_once(settings: dict[str, Any], reports: int) -> None:
    step = graph_step(1.0, {**HALVED, "init_loss_scale": 2**32})
    lines = _reports(tfmp.LossScaleLoggingHook(**settings), step.train_op, 3)
    assert len(lines) == reports
    # A large scale is shown to the digit.
    assert lines[0].startswith("loss scale 4294967296, ")


def test_steps_are_counted_without_a_global_step() -> None:
    step = graph_step(following(1, 1, 1, 2), with_global_step=False)
    hook = tfmp.LossScaleLoggingHook(step.opt, every_n_steps=100, ranges_every_n_steps=2)
    with logged() as log, tf1.Session() as session:
        hook.begin()
        session.run(tf1.global_variables_initializer())
        for _ in range(4):
            context = tf1.train.SessionRunContext(tf1.train.SessionRunArgs(step.train_op), session)
            asked = hook.before_run(context)
            fetched = session.run({"step": step.train_op, "asked": asked.fetches if asked else []})
            hook.after_run(context, tf1.train.SessionRunValues(fetched["asked"] or None, None, None))
        hook.end(session)
    assert log.info[-1] == "loss scale 1024, steps applied 4, skipped 0 (0 in a row)"
    assert hook.ranges.to_dict()["step"] == [2, 4]


def test_hook_works_under_scopes_and_shows_every_manager(tmp_path: Path) -> None:
    with tf1.variable_scope("first"):
        first = graph_step(1.0)
    with tf.name_scope("second"), tf1.variable_scope("second"):
        second = graph_step(3.0, {**HALVED, "init_loss_scale": 8}, skip_spikes=tfmp.SpikeDetector(max_norm=10))
    with tf1.variable_scope("third"):
        # It cannot be computed, as nothing is fed: it is no part of the step that is taken.
        graph_step(tf1.placeholder(tf.float32, []))
    hook = tfmp.LossScaleLoggingHook(every_n_steps=1, summary_dir=str(tmp_path), loss=tf.constant(0.0))
    assert _reports(hook, tf.group(first.train_op, second.train_op), 1) == [
        "loss scale 1024, global step 1, steps applied 1, skipped 0 (0 in a row), gradient norm 5",
        "loss scale 8, global step 1, steps applied 0, skipped 1 (1 in a row, 1 as spikes), gradient norm 15",
        "loss scale 1024, global step 1, steps applied 0, skipped 0 (0 in a row)",
    ]
    assert hook.norms.to_dict()["gradient_norm"] == [5]
    found = events(tmp_path)
    assert [found[tag] for tag in ("loss_scale", "loss_scale_1", "skipped_spikes_1")] == [
        [(1, 1024)],
        [(1, 8)],
        [(1, 1)],
    ]


def test_variables_of_an_optimizer_that_took_no_step_are_not_named_again() -> None:
    with tf1.variable_scope("first"):
        first = graph_step(_HUGE)
    with tf1.variable_scope("second"):
        second = graph_step(math.nan)
    with (
        logged() as log,
        tf1.train.MonitoredTrainingSession(
            hooks=[tfmp.LossScaleLoggingHook(every_n_steps=1)], log_step_count_steps=None
        ) as session,
    ):
        for step in (first, second, second):
            session.run(step.train_op)
    assert [line for line in log.info if line.startswith("overflow")] == [
        "overflow in first/w:0: 2 inf",
        "overflow in second/w:0: 2 nan",
        "overflow in second/w:0: 2 nan",
        "overflows by variable:\nvariable   skipped steps  at the last one\nfirst/w:0              1  2 inf",
        "overflows by variable:\nvariable    skipped steps  at the last one\nsecond/w:0              2  2 nan",
    ]


def test_losses_and_norms_are_fetched_with_reported_steps_alone() -> None:
    step = graph_step(following(1, 2, 3, math.inf, 5))
    hook = _Asked(every_n_steps=3)
    run_session(hook, step.train_op, 5)
    assert [asked and asked["losses"] for asked in hook.asked] == [[[step.loss]], None, None, [[step.loss]], None]
    assert hook.has_asked("norms") == [True, False, False, True, False]
    assert hook.norms.to_dict() == {"step": [1, 4], "gradient_norm": [5, math.inf], "skipped_spikes": [0, 0]}


def test_run_that_takes_no_step_is_asked_for_nothing() -> None:
    fed = tf1.placeholder(tf.float32, [])
    step = graph_step(fed)
    hook = _Asked(every_n_steps=1, ranges_every_n_steps=1)
    with tf1.train.MonitoredTrainingSession(hooks=[hook], log_step_count_steps=None) as session:
        # It has no input for the gradients.
        session.run({"weight": step.weight})
        session.run(step.train_op, {fed: 2.0})
    assert hook.asked[0] is None
    assert [hook.has_asked(kind)[1] for kind in ("losses", "norms", "ranges")] == [True] * 3
    assert hook.norms.to_dict()["gradient_norm"] == [10]
    assert hook.ranges.to_dict()["step"] == [1]


def test_each_manager_has_its_losses_and_those_of_managers_without_reports() -> None:
    steps = []
    for scope in ("first", "second"):
        with tf1.variable_scope(scope):
            steps.append(graph_step())
    train_op, losses = tf.group(*(step.train_op for step in steps)), [step.loss for step in steps]
    of_one, of_all = _Asked(steps[0].opt), _Asked()
    run_session([of_one, of_all], train_op, 1)
    assert [hook.asked[0]["losses"] for hook in (of_one, of_all)] == [[losses], [[losses[0]], [losses[1]]]]


def test_loss_inside_a_conditional_is_left_alone() -> None:
    w = tf1.get_variable("w", initializer=1.0, use_resource=True)
    opt = tfmp.LossScaleOptimizer(tf1.train.GradientDescentOptimizer(0.5), tfmp.FixedLossScaleManager(8))

    def gradient() -> tf.Tensor:
        return opt.compute_gradients(w * 2.0, [w])[0][0]

    hook = _Asked(every_n_steps=1)
    run_session(hook, opt.apply_gradients([(tf.cond(w > 0.0, gradient, gradient), w)]), 1)
    assert [asked["losses"] for asked in hook.asked] == [[[]]]


@pytest.mark.parametrize("given", ["other", "other:0", "tensor"])
def test_loss_that_is_given_is_looked_at(given: str) -> None:
    step, other = graph_step(_HUGE), tf.constant([1.0, math.nan], name="other")
    hook = tfmp.LossScaleLoggingHook(every_n_steps=1, on_stuck="stop", loss=other if given == "tensor" else given)
    with logged() as log:
        run_session(hook, step.train_op, 3)
    (warning,) = log.warnings
    assert "the loss is NaN before it is scaled" in warning


@pytest.mark.parametrize(("norm", "shown"), [(False, [""] * 4), (True, ["", "10", "10", "25"])])
def test_norm_of_a_window_is_shown_if_it_is_recorded(norm: bool, shown: list[str]) -> None:
    step = graph_step(following(1, 3, 4, 6), norm=norm, accumulation_steps=2)
    hook = tfmp.LossScaleLoggingHook(every_n_steps=1)
    lines = _reports(hook, step.train_op, 4)
    assert [line.partition("), gradient norm ")[2] for line in lines] == shown
    assert hook.norms.to_dict()["gradient_norm"] == ([10, 25] if norm else [])


def _advance(step: tf.Operation, way: str) -> tf.Operation:
    """Return a step that also increments the global step by hand."""
    global_step = tf1.train.get_global_step()
    with tf.control_dependencies([step]):
        if way == "assign":
            return global_step.assign(global_step + 1, read_value=False)
        return tf.group(tf1.assign_add(global_step, 1))


def _assert_line_of_advance(warning: str, way: str) -> None:
    line = _advance.__code__.co_firstlineno + (5 if way == "assign" else 6)
    assert warning.startswith("global_step went up by more than")
    assert f": test_hooks.py:{line}, beside the optimizer, advances it too." in warning


@pytest.mark.parametrize("use_resource", [True, False])
@pytest.mark.parametrize("way", ["", "assign", "assign_add"])
def test_script_that_counts_by_hand_is_told_its_line_once(way: str, use_resource: bool) -> None:
    if not use_resource and tf1.control_flow_v2_enabled():
        pytest.skip("control flow v2 updates no reference variable")
    if not use_resource:
        keys = [tf1.GraphKeys.GLOBAL_STEP, tf1.GraphKeys.GLOBAL_VARIABLES]
        settings: dict[str, Any] = {"trainable": False, "use_resource": False, "collections": keys}
        tf1.get_variable("global_step", initializer=np.int64(0), **settings)
    step = graph_step(following(1, _HUGE, 1, 1, 1))
    with logged() as log:
        hook = tfmp.LossScaleLoggingHook(every_n_steps=1)
        run_session(hook, _advance(step.train_op, way) if way else step.train_op, 5)
    assert len(log.warnings) == bool(way)
    for warning in log.warnings:
        _assert_line_of_advance(warning, way)


def test_two_optimizers_on_one_global_step_are_no_reason_to_warn() -> None:
    with tf1.variable_scope("first"):
        first = graph_step()
    with tf1.variable_scope("second"):
        second = graph_step()
    with tf.control_dependencies([first.train_op]):
        both = tf.group(second.train_op)
    with logged() as log:
        run_session(tfmp.LossScaleLoggingHook(first.opt, every_n_steps=1), both, 4)
    assert log.warnings == []


@pytest.mark.parametrize("by_hand", [False, True])
def test_mirrored_step_is_known_outside_its_scope(two_replicas: tf.distribute.MirroredStrategy, by_hand: bool) -> None:
    with two_replicas.scope():
        global_step = tf1.train.get_or_create_global_step()
        if by_hand:
            global_step.assign_add(1)
    # The initializer of the global step is not counted as a line of the script.
    assert len(lines_that_assign(global_step)) == by_hand


def test_graph_without_what_the_hook_needs_is_refused() -> None:
    tf.no_op(name="train")
    manager = tfmp.FixedLossScaleManager(8)
    for settings, message in (
        ({}, r"holds no step of a tfmp\.LossScaleOptimizer"),
        ({"manager": manager, "ranges_every_n_steps": 1}, "the graph has no gradients that a hook can fetch"),
        *(
            ({"manager": manager, "loss": loss}, "loss must be a tensor of the graph, or the name of one, got ")
            for loss in ("no_such_op", "train", 3.0)
        ),
    ):
        with pytest.raises(ValueError, match=message):
            tfmp.LossScaleLoggingHook(**settings).begin()


def _estimator(directory: Path, values: Any, strategy: Any = None, by_hand: bool = False, **settings: Any) -> Any:
    """Train an Estimator whose loss is the weight times the next value; return it, and what was logged."""

    def model_fn(features: tf.Tensor, labels: tf.Tensor, mode: str) -> Any:
        del labels
        w = tf1.get_variable("w", initializer=1.0)
        inner, spikes = tf1.train.GradientDescentOptimizer(0.5), tfmp.SpikeDetector(max_norm=10)
        opt = tfmp.LossScaleOptimizer(inner, tfmp.FixedLossScaleManager(8), skip_spikes=spikes)
        loss = tf.reduce_sum(w * features)
        step = opt.minimize(loss, tf1.train.get_or_create_global_step())
        return tf.estimator.EstimatorSpec(mode, loss=loss, train_op=_advance(step, "assign") if by_hand else step)

    config = tf.estimator.RunConfig(str(directory), train_distribute=strategy, log_step_count_steps=None)
    estimator = tf.estimator.Estimator(model_fn, config=config)
    hook = tfmp.LossScaleLoggingHook(every_n_steps=1, **settings)
    rows = np.float32(values).ravel()
    with logged() as log:
        estimator.train(lambda: tf.data.Dataset.from_tensor_slices((rows, rows)), hooks=[hook])
    return estimator, log


@pytest.mark.estimator
def test_model_fn_that_counts_by_hand_is_told_its_line(tmp_path: Path) -> None:
    _, log = _estimator(tmp_path, [1] * 4, by_hand=True)
    _assert_line_of_advance(*log.warnings, way="assign")


@pytest.mark.estimator
@pytest.mark.filterwarnings("ignore:To make it possible to preserve tf.data options:UserWarning")
@pytest.mark.parametrize("bad_replica", [0, 1])
def test_spikes_and_losses_of_all_replicas_of_an_estimator_count(
    tmp_path: Path, two_replicas: tf.distribute.MirroredStrategy, bad_replica: int
) -> None:
    values = np.ones([4, 2])
    values[1, bad_replica] = 99
    # The bad loss is infinite and not NaN, because Estimator itself stops at NaN.
    values[2, bad_replica] = math.inf
    estimator, log = _estimator(tmp_path, values, two_replicas, on_stuck="stop")
    # Estimator takes the mean over the replicas.
    assert [line.partition("global step ")[2] for line in log.info[:2]] == [
        "1, steps applied 1, skipped 0 (0 in a row, 0 as spikes), gradient norm 1",
        "1, steps applied 1, skipped 1 (1 in a row, 1 as spikes), gradient norm 50",
    ]
    assert log.info[2].startswith("spike: gradient norm 50 above the bound 10, from w:0 (100 %)")
    assert any("the loss is infinite before it is scaled" in warning for warning in log.warnings)
    assert (estimator.get_variable_value("w"), estimator.get_variable_value("global_step")) == (0.5, 1)
