"""What only the hook records: ranges of probes, of sparse gradients, of the steps of a manager, and of all workers."""

import itertools
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import graph_range_workers
import pytest
import replica_processes
import tensorflow as tf
from reporters import graph_step, kinds, run_session

import tfmp

tf1 = tf.compat.v1
pytestmark = pytest.mark.graph


@pytest.fixture(autouse=True)
def _graph() -> Iterator[None]:
    with tf.Graph().as_default():
        yield


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
    with tf1.variable_scope("first"):
        first = graph_step(1.0)
    with tf1.variable_scope("second"):
        second = graph_step(2.0, tfmp.FixedLossScaleManager(4))
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


def test_windows_cannot_be_fetched() -> None:
    graph_step(accumulation_steps=2)
    message = "ranges_every_n_steps is given, and the graph has no gradients that a hook can fetch: it cannot fetch"
    with pytest.raises(ValueError, match=message):
        tfmp.LossScaleLoggingHook(ranges_every_n_steps=1).begin()


def test_hook_without_looks_adds_no_ops_for_them() -> None:
    graph_step()
    tfmp.LossScaleLoggingHook().begin()
    assert not [op.name for op in tf1.get_default_graph().get_operations() if "tfmp_ranges" in op.name]


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
