"""The wrapper inside a `SyncReplicasOptimizer`, whose workers wait for each other."""

import math
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import tensorflow as tf

import tfmp

pytestmark = [
    pytest.mark.graph,
    # When a session is closed, the thread that waits for gradients raises an error.
    pytest.mark.filterwarnings(
        "ignore:Exception in thread QueueRunnerThread:pytest.PytestUnhandledThreadExceptionWarning"
    ),
]

tf1 = tf.compat.v1

#: A run that takes longer than the timeout hangs. A session that is closed waits a second for the thread that waits for
#: gradients.
_SESSION: dict[str, Any] = {"config": tf1.ConfigProto(operation_timeout_in_ms=30_000), "stop_grace_period_secs": 1}


@pytest.fixture(autouse=True)
def _no_thread_outlives_the_test() -> Iterator[None]:
    yield
    for thread in threading.enumerate():
        if thread.name.startswith("QueueRunnerThread"):
            thread.join(30)


def _synchronized(workers: int, **settings: Any) -> Any:
    manager = tfmp.ExponentialUpdateLossScaleManager(1024, 1000, decr_every_n_nan_or_inf=1, decr_ratio=0.5)
    opt = tfmp.LossScaleOptimizer(tf1.train.GradientDescentOptimizer(0.125), manager, **settings)
    return tf1.train.SyncReplicasOptimizer(opt, replicas_to_aggregate=workers)


#: The settings, the gradients of the runs, and the weight, the global step and the loss scale after each.
_RUNS = {
    "sparse": ({}, [1, math.inf, 1, math.nan], [[0.875, 1, 1024], [0.875, 1, 512], [0.75, 2, 512], [0.75, 2, 256]]),
    "window": (
        {"accumulation_steps": 2},
        [1, 3, 1, math.inf, 1, 1],
        [[1, 0, 1024], *[[0.75, 1, 1024]] * 2, *[[0.75, 1, 512]] * 2, [0.625, 2, 512]],
    ),
}


@pytest.mark.parametrize("name", _RUNS)
def test_training_goes_on_after_a_skipped_step_and_after_a_micro_batch_that_ends_no_window(name: str) -> None:
    settings, factors, expected = _RUNS[name]
    with tf.Graph().as_default():
        w, factor = tf1.get_variable("w", initializer=[1.0]), tf1.placeholder(tf.float32, [])
        step, opt = tf1.train.get_or_create_global_step(), _synchronized(1, **settings)
        train_op = opt.minimize(factor * (tf.gather(w, [0])[0] if name == "sparse" else w[0]), step)
        shown = [w[0], step, opt._opt.loss_scale]
        hooks = [opt.make_session_run_hook(is_chief=True, num_tokens=0)]
        with tf1.train.MonitoredTrainingSession(hooks=hooks, **_SESSION) as session:
            for value, after in zip(factors, expected, strict=True):
                session.run(train_op, {factor: value})
                assert session.run(shown) == after


def test_step_of_each_accumulator_is_set_on_its_own_parameter_server() -> None:
    with tf.Graph().as_default() as graph, tf1.device(tf1.train.replica_device_setter(2)):
        step = tf1.train.get_or_create_global_step()
        v, w = (tf1.get_variable(name, initializer=1.0) for name in "vw")
        _synchronized(2).minimize(v + w, step)
    sets = [op for op in graph.get_operations() if op.type == "ResourceAccumulatorSetGlobalStep"]
    # TensorFlow sets the steps when a session begins.
    of_tfmp = [op for op in sets if not op.name.startswith("sync_replicas/")]
    assert [op.device for op in of_tfmp] == [op.inputs[0].device for op in of_tfmp]
    assert sorted(op.device for op in of_tfmp) == [f"/job:ps/task:{task}" for task in range(2)]
