"""The wrapper inside a `SyncReplicasOptimizer`, whose workers wait for each other."""

import math
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import tensorflow as tf
from replica_processes import free_addresses

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


def _train_worker(
    server: tf.distribute.Server, index: int, factors: Sequence[float], initialized: threading.Event
) -> list[list[float]]:
    """Return what a worker sees after each of its runs: the weights, the global step and the loss scale."""
    with tf.Graph().as_default():
        # The two variables, and so their accumulators, are on two parameter servers.
        with tf1.device(tf1.train.replica_device_setter(2, worker_device=f"/job:worker/task:{index}")):
            step = tf1.train.get_or_create_global_step()
            v, w = (tf1.get_variable(name, initializer=1.0) for name in "vw")
            factor = tf1.placeholder(tf.float32, [])
            opt = _synchronized(2)
            train_op = opt.minimize(factor * (v + w), step)
        assert {each.device for each in (v, w)} == {f"/job:ps/task:{task}" for task in range(2)}
        hooks = [opt.make_session_run_hook(is_chief=index == 0, num_tokens=0)]
        found = []
        if index:
            # TensorFlow would look for initialized variables every 30 seconds.
            assert initialized.wait(60)
        with tf1.train.MonitoredTrainingSession(server.target, index == 0, hooks=hooks, **_SESSION) as session:
            initialized.set()
            for value in factors:
                session.run(train_op, {factor: value})
                found.append([float(each) for each in session.run([v, w, step, opt._opt.loss_scale])])
        return found


def test_two_workers_go_on_after_a_step_that_overflowed_on_one_of_them() -> None:
    factors = [[1, 1, 1, 1], [3, math.inf, 3, 3]]
    cluster = tf.train.ClusterSpec({job: free_addresses(2) for job in ("ps", "worker")})
    servers = {(job, task): tf.distribute.Server(cluster, job, task) for job in cluster.jobs for task in range(2)}
    with ThreadPoolExecutor(2) as pool:
        initialized = threading.Event()
        runs = [
            pool.submit(_train_worker, servers["worker", index], index, factors[index], initialized)
            for index in range(2)
        ]
        found = [run.result(120) for run in runs]
    after_each_run = [[0.75, 0.75, 1, 1024], [0.75, 0.75, 1, 512], [0.5, 0.5, 2, 512], [0.25, 0.25, 3, 512]]
    assert found == [after_each_run, after_each_run]
