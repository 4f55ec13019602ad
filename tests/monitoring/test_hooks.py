"""What only the hook has: its lines and interval, what it fetches with which steps, and the ranges of probes."""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from reporters import HALVED, events, following, graph_step, kinds, logged, run_session

import tfmp

tf1 = tf.compat.v1
pytestmark = pytest.mark.graph

#: Multiplied by a scale of 8 or more it overflows float32; the loss itself does not.
_HUGE = 2.0**124


@pytest.fixture(autouse=True)
def _graph() -> Iterator[None]:
    with tf.Graph().as_default():
        yield


def _reports(hook: Any, fetches: Any, steps: int) -> list[str]:
    """Return the reports of scales and steps."""
    with logged() as log:
        run_session(hook, fetches, steps)
    return [line for line in log.info if line.startswith("loss scale ")]


def _two_steps(*factors: Any, managers: Any = (HALVED, HALVED)) -> list[Any]:
    steps = []
    for scope, factor, manager in zip(("first", "second"), factors, managers, strict=True):
        with tf1.variable_scope(scope):
            steps.append(graph_step(factor, manager))
    return steps


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
    first, second = _two_steps(_HUGE, math.nan)
    hooks = [tfmp.LossScaleLoggingHook(every_n_steps=1)]
    with logged() as log, tf1.train.MonitoredTrainingSession(hooks=hooks, log_step_count_steps=None) as session:
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
    steps = _two_steps(1.0, 1.0)
    train_op, losses = tf.group(*(step.train_op for step in steps)), [step.loss for step in steps]
    of_one, of_all = _Asked(steps[0].opt), _Asked()
    run_session([of_one, of_all], train_op, 1)
    assert [hook.asked[0]["losses"] for hook in (of_one, of_all)] == [[losses], [[losses[0]], [losses[1]]]]


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


def _train_op(way: str) -> tf.Operation:
    """Return a step that increments the global step by hand as well, or with a second optimizer, or by itself."""
    if way == "two optimizers":
        first, second = _two_steps(1.0, 1.0)
        with tf.control_dependencies([first.train_op]):
            return tf.group(second.train_op)
    step, global_step = graph_step(following(1, _HUGE, 1, 1, 1)).train_op, tf1.train.get_global_step()
    with tf.control_dependencies([step]):
        if way == "assign":
            return global_step.assign(global_step + 1, read_value=False)
        return tf.group(tf1.assign_add(global_step, 1)) if way == "assign_add" else step


@pytest.mark.parametrize("use_resource", [True, False])
@pytest.mark.parametrize("way", ["alone", "two optimizers", "assign", "assign_add"])
def test_script_that_counts_by_hand_is_warned_once(way: str, use_resource: bool) -> None:
    if not use_resource and tf1.control_flow_v2_enabled():
        pytest.skip("control flow v2 updates no reference variable")
    if not use_resource:
        keys = [tf1.GraphKeys.GLOBAL_STEP, tf1.GraphKeys.GLOBAL_VARIABLES]
        settings: dict[str, Any] = {"trainable": False, "use_resource": False, "collections": keys}
        tf1.get_variable("global_step", initializer=np.int64(0), **settings)
    with logged() as log:
        train_op = _train_op(way)
        run_session(tfmp.LossScaleLoggingHook(every_n_steps=1), train_op, 5)
    assert log.warnings == ("assign" in way) * [
        "global_step went up by more than the applied steps: something beside the optimizer advances it too. A script "
        "that assigns global_step + 1 itself must leave that to LossScaleOptimizer."
    ]


def test_graph_without_what_the_hook_needs_is_refused() -> None:
    with pytest.raises(ValueError, match=r"holds no step of a tfmp\.LossScaleOptimizer"):
        tfmp.LossScaleLoggingHook().begin()
    tf.no_op(name="train")
    manager = tfmp.FixedLossScaleManager(8)
    # A window of micro-batches keeps its gradients in a conditional.
    windows = graph_step(accumulation_steps=2).opt
    no_gradients = (
        "ranges_every_n_steps is given, and the graph has no gradients that a hook can fetch: it cannot fetch"
    )
    for settings, message in (
        *(({"manager": each, "ranges_every_n_steps": 1}, no_gradients) for each in (manager, windows)),
        *(
            ({"manager": manager, "loss": loss}, "loss must be a tensor of the graph, or the name of one, got ")
            for loss in ("no_such_op", "train", 3.0)
        ),
    ):
        with pytest.raises(ValueError, match=message):
            tfmp.LossScaleLoggingHook(**settings).begin()


def _optimizer(scale: float) -> tfmp.LossScaleOptimizer:
    return tfmp.LossScaleOptimizer(tf1.train.GradientDescentOptimizer(0.0), tfmp.FixedLossScaleManager(scale))


def _found(train_op: Any, manager: Any = None) -> dict[str, dict[str, dict[str, int]]]:
    """Return what a hook finds at one step."""
    hook = tfmp.LossScaleLoggingHook(manager, ranges_every_n_steps=1)
    run_session(hook, train_op, 1)
    return kinds(hook.ranges)


def test_probes_show_activations_and_their_gradients() -> None:
    w = tf1.get_variable("w", initializer=1.0)
    # Two probes have one name, and the loss does not depend on the last one.
    first = tfmp.ranges.probe(tf.constant([1, 0, 2.0**-20]) * w, "hidden")
    second = tfmp.ranges.probe(first * 4.0, "hidden")
    loss = tf.reduce_sum(tfmp.ranges.probe(second * 0.5, "last")) * 8.0
    tfmp.ranges.probe(w * 1024.0, "unused")
    assert _found(_optimizer(2.0**12).minimize(loss)) == {
        "gradients": {"w": {"4": 1}},
        "weights": {"w": {"0": 1}},
        "activations": {
            "hidden": {"-20": 1, "-18": 1, "0": 1, "2": 1, "zero": 2},
            "last": {"-19": 1, "1": 1, "zero": 1},
        },
        # 8 for the last one, 4 for the second, 16 for the first.
        "activation_gradients": {"hidden": {"2": 3, "4": 3}, "last": {"3": 3}},
    }


def test_gradients_of_probes_in_float16_are_those_of_the_scaled_loss() -> None:
    w = tf1.get_variable("w", initializer=1.0)
    half = tfmp.ranges.probe(tf.cast(w * [1.0, 2.0], tf.float16), "half")
    # Without the scale the gradient would be 0 in float16.
    found = _found(_optimizer(2.0**12).minimize(tf.reduce_sum(tf.cast(half, tf.float32)) * 2.0**-30))
    assert found["activations"] == {"half": {"0": 1, "1": 1}}
    assert found["activation_gradients"] == {"half": {"-30": 2}}


def test_sparse_and_missing_gradients_have_their_names() -> None:
    table, unused = (tf1.get_variable(name, initializer=tf.ones([8, 2])) for name in ("table", "unused"))
    loss = tf.reduce_sum(tf.gather(table, [3, 3, 5])) * 4.0
    found = _found(_optimizer(8).minimize(loss, var_list=[table, unused]))
    assert found["gradients"] == {"table": {"2": 6}, "unused": {}}


def test_only_the_steps_of_the_given_manager_are_looked_at() -> None:
    first, second = _two_steps(1.0, 2.0, managers=(HALVED, tfmp.FixedLossScaleManager(4)))
    hook = tfmp.LossScaleLoggingHook(second.opt, ranges_every_n_steps=1)
    run_session(hook, tf.group(first.train_op, second.train_op), 1)
    found = kinds(hook.ranges)
    assert found["gradients"] == {"second/w": {"2": 1, "3": 1}}
    assert set(found["weights"]) == {"first/w", "second/w"}
    assert hook.ranges.last.loss_scale == 4


def test_steps_of_a_scaler_in_a_graph_are_looked_at() -> None:
    scaler, w = tfmp.GradScaler(8), tf1.get_variable("w", initializer=[1.0, 1.0])
    (grad,) = tf.gradients(scaler.scale(tf.reduce_sum(w * [2.0, 0.0])), [w])
    step = scaler.step(tf1.train.GradientDescentOptimizer(0.0), [(grad, w)])
    with tf.control_dependencies([step]):
        train_op = scaler.update()
    tf1.add_to_collection(tf1.GraphKeys.TRAIN_OP, train_op)
    assert _found(train_op, scaler) == {"gradients": {"w": {"1": 1, "zero": 1}}, "weights": {"w": {"0": 2}}}


def test_hook_without_looks_adds_no_ops_for_them() -> None:
    graph_step()
    tfmp.LossScaleLoggingHook().begin()
    assert not [op.name for op in tf1.get_default_graph().get_operations() if "tfmp_ranges" in op.name]
