"""The hook's recordings of the ranges of gradients, weights and probes, fetched together with a step."""

import itertools
import math
import re
import sys
from pathlib import Path
from typing import Any

import graph_range_workers
import numpy as np
import pytest
import replica_processes
import tensorflow as tf

import tfmp

tf1 = tf.compat.v1
pytestmark = pytest.mark.graph

_KINDS = dict[str, dict[str, dict[str, int]]]


@pytest.fixture
def graph() -> Any:
    with tf.Graph().as_default() as graph:
        yield graph


def _next(*values: Any) -> tf.Tensor:
    """Return a tensor that has the next of the values at each run."""
    return tf1.data.make_one_shot_iterator(tf.data.Dataset.from_tensor_slices(np.float32(values))).get_next()


def _train_op(factor: Any, *, with_global_step: bool = True, manager: Any = None, **settings: Any) -> Any:
    """Return a step of two weights that stay 1; the factor is the gradient of `w`, and twice it that of `v`."""
    w, v = (tf1.get_variable(name, initializer=tf.ones([2])) for name in ("w", "v"))
    opt = tfmp.LossScaleOptimizer(
        tf1.train.GradientDescentOptimizer(0.0), manager or tfmp.FixedLossScaleManager(1024), **settings
    )
    global_step = tf1.train.get_or_create_global_step() if with_global_step else None
    return opt.minimize(tf.reduce_sum(w * factor) + tf.reduce_sum(v * factor * 2.0), global_step, [w, v])


def _run(hook: tf1.train.SessionRunHook, train_op: Any, steps: int) -> None:
    with tf1.train.MonitoredTrainingSession(hooks=[hook], log_step_count_steps=None) as session:
        for _ in range(steps):
            session.run(train_op)


def _found(hook: tfmp.LossScaleLoggingHook) -> _KINDS:
    """Return what the last recording has found, by kinds and names."""
    return {
        kind: {name: found.to_dict() for name, found in histograms.items()}
        for kind, histograms in hook.ranges.last.histograms.items()
    }


class _Runs(tf1.train.SessionRunHook):
    """Wraps a hook; records at each call of `session.run` whether it asks for ranges, and what it has seen after it."""

    def __init__(self, hook: tfmp.LossScaleLoggingHook) -> None:
        self._hook = hook
        self.asked: list[bool] = []
        self.seen: list[_KINDS] = []

    def begin(self) -> None:
        self._hook.begin()

    def before_run(self, run_context: Any) -> Any:
        asked = self._hook.before_run(run_context)
        self.asked.append(bool(asked and asked.fetches["ranges"]))
        return asked

    def after_run(self, run_context: Any, run_values: Any) -> None:
        self._hook.after_run(run_context, run_values)
        if self.asked[-1]:
            self.seen.append(_found(self._hook))

    def end(self, session: Any) -> None:
        self._hook.end(session)


@pytest.mark.usefixtures("graph")
@pytest.mark.parametrize("reports", [1, 3, 100])
def test_look_is_a_part_of_every_nth_call(reports: int) -> None:
    # A recording in a call of its own would take the next value of the input.
    train_op = _train_op(_next([1, 0], [2, 0], [4, 0], [8, 0], [16, 0]))
    hook = tfmp.LossScaleLoggingHook(every_n_steps=reports, ranges_every_n_steps=2)
    runs = _Runs(hook)
    _run(runs, train_op, 5)
    assert runs.asked == [False, True, False, True, False]
    assert hook.ranges.to_dict()["step"] == [2, 4]
    weights = {"w": {"0": 2}, "v": {"0": 2}}
    assert runs.seen == [
        {"gradients": {"w": {"1": 1, "zero": 1}, "v": {"2": 1, "zero": 1}}, "weights": weights},
        {"gradients": {"w": {"3": 1, "zero": 1}, "v": {"4": 1, "zero": 1}}, "weights": weights},
    ]


@pytest.mark.usefixtures("graph")
def test_looks_have_the_scale_of_their_step_and_its_overflows() -> None:
    manager = tfmp.ExponentialUpdateLossScaleManager(1024, 1000, decr_every_n_nan_or_inf=1, decr_ratio=0.5)
    hook = tfmp.LossScaleLoggingHook(ranges_every_n_steps=1)
    _run(hook, _train_op(_next([1, 1], [2.0**-40, 2.0**-27], [math.inf, math.nan], [0, 4]), manager=manager), 4)
    # The global step stands still at the third step.
    assert hook.ranges.to_dict() == {
        "step": [1, 2, 3, 4],
        "loss_scale": [1024, 1024, 1024, 512],
        "gradients_zero": [0, 0, 0, 0.5],
        "gradients_lost": [0, 0.5, 0, 0],
        "gradients_subnormal": [0, 0.5, 0, 0],
        "gradients_normal": [1, 0, 0, 0.5],
        "gradients_overflow": [0, 0, 0, 0],
        "gradients_nonfinite": [0, 0, 1, 0],
    }


@pytest.mark.usefixtures("graph")
def test_run_that_takes_no_step_is_not_looked_at() -> None:
    fed = tf1.placeholder(tf.float32, [2])
    train_op = _train_op(fed)
    hook = tfmp.LossScaleLoggingHook(ranges_every_n_steps=1)
    runs = _Runs(hook)
    with tf1.train.MonitoredTrainingSession(hooks=[runs], log_step_count_steps=None) as session:
        # It has no input for the gradients.
        session.run({"weights": tf1.global_variables()[0]})
        session.run(train_op, {fed: [1.0, 4.0]})
    assert runs.asked == [False, True]
    assert runs.seen[0]["gradients"] == {"w": {"0": 1, "2": 1}, "v": {"1": 1, "3": 1}}


@pytest.mark.usefixtures("graph")
def test_steps_are_counted_without_a_global_step() -> None:
    hook = tfmp.LossScaleLoggingHook(ranges_every_n_steps=2)
    train_op = _train_op(_next([1, 1], [1, 1], [1, 1], [2, 2]), with_global_step=False)
    hook.begin()
    with tf1.Session() as session:
        session.run(tf1.global_variables_initializer())
        for _ in range(4):
            context = tf1.train.SessionRunContext(tf1.train.SessionRunArgs(train_op), session)
            asked = hook.before_run(context)
            fetched = session.run({"step": train_op, "asked": asked.fetches if asked else []})
            values = tf1.train.SessionRunValues(fetched["asked"] or None, None, None)
            hook.after_run(context, values)
    assert hook.ranges.to_dict()["step"] == [2, 4]


def _probed(x: tf.Tensor, w: tf.Tensor) -> tf.Tensor:
    """Return a loss with a probe that is used twice under one name, and one that the loss does not depend on."""
    first = tfmp.ranges.probe(x * w, "hidden")
    second = tfmp.ranges.probe(first * 4.0, "hidden")
    tfmp.ranges.probe(x * 1024.0, "unused")
    return tf.reduce_sum(tfmp.ranges.probe(second * 0.5, "last")) * 8.0


@pytest.mark.usefixtures("graph")
def test_probes_show_activations_and_their_gradients() -> None:
    w = tf1.get_variable("w", initializer=1.0)
    opt = tfmp.LossScaleOptimizer(tf1.train.GradientDescentOptimizer(0.0), tfmp.FixedLossScaleManager(2.0**12))
    train_op = opt.minimize(_probed(_next([1, 0, 2.0**-20]), w), tf1.train.get_or_create_global_step())
    hook = tfmp.LossScaleLoggingHook(ranges_every_n_steps=1)
    _run(hook, train_op, 1)
    assert _found(hook) == {
        "gradients": {"w": {"4": 1}},
        "weights": {"w": {"0": 1}},
        "activations": {
            "hidden": {"-20": 1, "-18": 1, "0": 1, "2": 1, "zero": 2},
            "last": {"-19": 1, "1": 1, "zero": 1},
        },
        # 8 for the last one, 4 for the second, 16 for the first.
        "activation_gradients": {"hidden": {"2": 3, "4": 3}, "last": {"3": 3}},
    }


@pytest.mark.usefixtures("graph")
def test_gradients_of_probes_in_float16_are_those_of_the_scaled_loss() -> None:
    w = tf1.get_variable("w", initializer=1.0)
    opt = tfmp.LossScaleOptimizer(tf1.train.GradientDescentOptimizer(0.0), tfmp.FixedLossScaleManager(2.0**12))
    half = tfmp.ranges.probe(tf.cast(w * [1.0, 2.0], tf.float16), "half")
    # Without the scale the gradient would be 0 in float16.
    loss = tf.reduce_sum(tf.cast(half, tf.float32)) * 2.0**-30
    train_op = opt.minimize(loss, tf1.train.get_or_create_global_step())
    hook = tfmp.LossScaleLoggingHook(ranges_every_n_steps=1)
    _run(hook, train_op, 1)
    found = _found(hook)
    assert found["activations"] == {"half": {"0": 1, "1": 1}}
    assert found["activation_gradients"] == {"half": {"-30": 2}}


@pytest.mark.usefixtures("graph")
def test_sparse_and_missing_gradients_have_their_names() -> None:
    table, unused = (tf1.get_variable(name, initializer=tf.ones([8, 2])) for name in ("table", "unused"))
    opt = tfmp.LossScaleOptimizer(tf1.train.GradientDescentOptimizer(0.0), tfmp.FixedLossScaleManager(8))
    train_op = opt.minimize(tf.reduce_sum(tf.gather(table, [3, 3, 5])) * 4.0, var_list=[table, unused])
    hook = tfmp.LossScaleLoggingHook(ranges_every_n_steps=1)
    _run(hook, train_op, 1)
    assert _found(hook)["gradients"] == {"table": {"2": 6}, "unused": {}}


@pytest.mark.usefixtures("graph")
def test_only_the_steps_of_the_given_manager_are_looked_at() -> None:
    with tf1.variable_scope("first"):
        first = _train_op(tf.constant([1.0, 1.0]))
    manager = tfmp.FixedLossScaleManager(4)
    with tf1.variable_scope("second"):
        second = _train_op(tf.constant([2.0, 2.0]), manager=manager)
    hook = tfmp.LossScaleLoggingHook(manager, ranges_every_n_steps=1)
    _run(hook, tf.group(first, second), 1)
    found = _found(hook)
    assert found["gradients"] == {"second/w": {"1": 2}, "second/v": {"2": 2}}
    assert set(found["weights"]) == {"first/w", "first/v", "second/w", "second/v"}
    assert hook.ranges.last.loss_scale == 4


@pytest.mark.usefixtures("graph")
def test_steps_of_a_scaler_in_a_graph_are_looked_at() -> None:
    scaler, w = tfmp.GradScaler(8), tf1.get_variable("w", initializer=[1.0, 1.0])
    (grad,) = tf.gradients(scaler.scale(tf.reduce_sum(w * [2.0, 0.0])), [w])
    step = scaler.step(tf1.train.GradientDescentOptimizer(0.0), [(grad, w)])
    with tf.control_dependencies([step]):
        train_op = scaler.update()
    tf1.add_to_collection(tf1.GraphKeys.TRAIN_OP, train_op)
    hook = tfmp.LossScaleLoggingHook(scaler, ranges_every_n_steps=1)
    _run(hook, train_op, 1)
    assert _found(hook) == {"gradients": {"w": {"1": 1, "zero": 1}}, "weights": {"w": {"0": 2}}}


@pytest.mark.usefixtures("graph")
def test_windows_cannot_be_fetched() -> None:
    _train_op(tf.constant([1.0, 1.0]), accumulation_steps=2)
    message = "ranges_every_n_steps is given, and the graph has no gradients that a hook can fetch: it cannot fetch"
    with pytest.raises(ValueError, match=message):
        tfmp.LossScaleLoggingHook(ranges_every_n_steps=1).begin()


@pytest.mark.usefixtures("graph")
def test_manager_without_a_step_is_refused() -> None:
    with pytest.raises(ValueError, match="the graph has no gradients that a hook can fetch"):
        tfmp.LossScaleLoggingHook(tfmp.FixedLossScaleManager(8), ranges_every_n_steps=1).begin()


@pytest.mark.usefixtures("graph")
def test_hook_without_looks_adds_no_ops_for_them(graph: tf.Graph) -> None:
    _train_op(tf.constant([1.0, 1.0]))
    tfmp.LossScaleLoggingHook().begin()
    assert not [op.name for op in graph.get_operations() if "tfmp_ranges" in op.name]


def test_ranges_without_an_interval_are_refused() -> None:
    with pytest.raises(ValueError, match="no ranges are looked at: pass ranges_every_n_steps to LossScaleLoggingHook"):
        _ = tfmp.LossScaleLoggingHook().ranges


@pytest.mark.parametrize(
    ("bad", "error", "message"),
    [
        (0, ValueError, "ranges_every_n_steps must be a whole number from 1 to 2**31 - 1, got 0."),
        ("2", TypeError, "ranges_every_n_steps must be a number, got '2' of type str."),
    ],
)
def test_bad_interval_of_looks_is_refused(bad: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=re.escape(message)):
        tfmp.LossScaleLoggingHook(ranges_every_n_steps=bad)


@pytest.mark.usefixtures("graph")
def test_summaries_hold_the_shares_and_a_histogram_of_each_name(tmp_path: Path) -> None:
    train_op = _train_op(_next([2.0**-40, 1], [2.0**-27, 0]))
    _run(tfmp.LossScaleLoggingHook(summary_dir=str(tmp_path), ranges_every_n_steps=1), train_op, 2)
    (path,) = tmp_path.iterdir()
    scalars: dict[str, list[tuple[int, float]]] = {}
    histograms: dict[str, list[tuple[int, Any]]] = {}
    for event in tf1.train.summary_iterator(str(path)):
        for value in event.summary.value:
            if value.HasField("tensor"):
                # TensorFlow writes it with the first value of each tag.
                plugin = "" if value.tag in histograms else "histograms"
                assert value.metadata.plugin_data.plugin_name == plugin
                histograms.setdefault(value.tag, []).append((event.step, tf.make_ndarray(value.tensor).tolist()))
            else:
                scalars.setdefault(value.tag, []).append((event.step, value.simple_value))
    assert {tag: found for tag, found in scalars.items() if tag.startswith("gradients")} == {
        "gradients_zero": [(1, 0), (2, 0.5)],
        "gradients_lost": [(1, 0.5), (2, 0)],
        "gradients_subnormal": [(1, 0), (2, 0.5)],
    }
    assert set(histograms) == {"gradients/w", "gradients/v", "weights/w", "weights/v"}
    assert histograms["weights/w"] == [(1, [[0, 1, 2]]), (2, [[0, 1, 2]])]
    assert [step for step, _ in histograms["gradients/v"]] == [1, 2]
    first, second = (rows for _, rows in histograms["gradients/w"])
    assert first == [[power, power + 1, int(power in (-40, 0))] for power in range(-40, 1)]
    assert second == [[-27, -26, 1]]


@pytest.mark.horovod
def test_workers_see_the_sum_over_all_of_them(tmp_path: Path) -> None:
    program = [sys.executable, graph_range_workers.__file__]
    finished = replica_processes.run(replica_processes.under_horovod(program), tmp_path, 120)
    assert finished.codes == [0], str(finished)
    # Gradients are the mean of 4 and 8 on both workers, before and after they are scaled.
    expected = {
        "step": 2,
        "loss_scale": 16,
        "gradients": {"w": {"2": 2, "zero": 2}},
        "weights": {"w": {"0": 2, "1": 2}},
        "activations": {"product": {"2": 1, "3": 1, "zero": 2}},
        "activation_gradients": {"product": {"0": 4}},
    }
    for behavior, rank in itertools.product(("v2", "v1"), range(2)):
        assert finished.states(f"{behavior}/hook/{rank}") == [[expected]]
        assert finished.states(f"{behavior}/counts/{rank}") == [[[{"0": 3, "1": 1}, {}]]]
