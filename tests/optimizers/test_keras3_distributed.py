"""The wrapper around Keras 3 optimizers on several replicas and workers: one decision for all."""

import json
import math
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfmp

if not keras.__version__.startswith("3."):
    pytest.skip(f"needs Keras 3, this is Keras {keras.__version__}", allow_module_level=True)

_OVERFLOWS = {"none": (), "first": (0,), "last": (1,), "both": (0, 1)}


def _opt() -> tfmp.LossScaleOptimizer:
    manager = tfmp.ExponentialUpdateLossScaleManager(1024, 5, decr_every_n_nan_or_inf=2, decr_ratio=0.5)
    return tfmp.LossScaleOptimizer(keras.optimizers.Adam(0.125), manager)


def _on_every_replica(strategy: tf.distribute.Strategy, variables: list[keras.Variable]) -> list[list[Any]]:
    """Return the variables' values, a list for each replica."""
    parts = [strategy.experimental_local_results(variable.value) for variable in variables]
    return [[part.numpy().tolist() for part in replica] for replica in zip(*parts, strict=True)]


class TwoReplicas:
    """A weight that two replicas train, each fed a gradient of its own."""

    def __init__(self, strategy: tf.distribute.MirroredStrategy) -> None:
        self.strategy = strategy
        with strategy.scope():
            self.weight = keras.Variable([1.0, 2.0])
            self.opt = _opt()
            self.opt.build([self.weight])
        self._run = tf.function(self._step)

    def step(self, factors: tuple[float, float]) -> None:
        self._run(tf.constant(factors, tf.float32))

    def _step(self, factors: tf.Tensor) -> None:
        def on_replica() -> None:
            factor = factors[tf.distribute.get_replica_context().replica_id_in_sync_group]
            with tf.GradientTape() as tape:
                loss = self.opt.scale_loss(tf.reduce_sum(self.weight.value) * factor)
            self.opt.apply(tape.gradient(loss, [self.weight.value]), [self.weight])

        self.strategy.run(on_replica)


@pytest.mark.parametrize("bad_replicas", _OVERFLOWS.values(), ids=_OVERFLOWS)
def test_overflow_on_any_replica_skips_all(
    two_replicas: tf.distribute.MirroredStrategy, bad_replicas: tuple[int, ...]
) -> None:
    problem = TwoReplicas(two_replicas)
    problem.step(tuple(math.inf if replica in bad_replicas else 1.0 for replica in range(2)))
    replicas = _on_every_replica(two_replicas, [problem.weight, *problem.opt.variables])
    assert replicas[0] == replicas[1]
    assert (replicas[0][0] == [1, 2]) is bool(bad_replicas)
    assert int(problem.opt.skipped_steps) == bool(bad_replicas)


def test_replicas_stay_one_through_200_random_overflows(two_replicas: tf.distribute.MirroredStrategy) -> None:
    problem = TwoReplicas(two_replicas)
    single_weight, single = keras.Variable([1.0, 2.0]), _opt()
    single.build([single_weight])
    rng = np.random.default_rng(0)
    for _ in range(200):
        factors = rng.choice([0.25, 0.5, -1.0, math.inf, math.nan], size=2, p=[0.3, 0.3, 0.2, 0.1, 0.1])
        problem.step(tuple(factors))
        scaled = float(single.loss_scale) * np.float32([factors.sum()] * 2)
        single.apply([tf.constant(scaled)], [single_weight])
        replicas = _on_every_replica(two_replicas, [problem.weight, *problem.opt.variables])
        assert replicas[0] == replicas[1]
        assert replicas[0] == [variable.numpy().tolist() for variable in [single_weight, *single.variables]]
    assert int(single.skipped_steps) > 50
    assert int(single.applied_steps) > 50


@pytest.mark.parametrize("bad_replicas", _OVERFLOWS.values(), ids=_OVERFLOWS)
def test_fit_skips_on_all_replicas(two_replicas: tf.distribute.MirroredStrategy, bad_replicas: tuple[int, ...]) -> None:
    with two_replicas.scope():
        model = keras.Sequential([keras.Input([1]), keras.layers.Dense(1)])
        model.compile(_opt(), "mse")
    before = _on_every_replica(two_replicas, model.weights)
    # A batch of four gives two rows to each replica.
    x = np.ones([4, 1], np.float32)
    x[[2 * replica for replica in bad_replicas]] = np.inf
    model.fit(x, np.zeros([4, 1]), batch_size=4, shuffle=False, verbose=0)
    after = _on_every_replica(two_replicas, model.weights)
    assert after[0] == after[1]
    assert np.isfinite(after[0][0]).all()
    assert (after == before) is bool(bad_replicas)
    assert int(model.optimizer.skipped_steps) == bool(bad_replicas)


_WORKER = """
import json, math, sys
import numpy as np, tensorflow as tf, keras, tfmp

rank = int(sys.argv[1])
strategy = tf.distribute.MultiWorkerMirroredStrategy()
with strategy.scope():
    weight = keras.Variable([1.0, 2.0])
    manager = tfmp.ExponentialUpdateLossScaleManager(1024, 5, decr_every_n_nan_or_inf=2, decr_ratio=0.5)
    opt = tfmp.LossScaleOptimizer(keras.optimizers.Adam(0.125), manager)
    opt.build([weight])

@tf.function
def step(factor):
    def on_replica():
        with tf.GradientTape() as tape:
            loss = opt.scale_loss(tf.reduce_sum(weight.value) * factor)
        opt.apply(tape.gradient(loss, [weight.value]), [weight])
    strategy.run(on_replica)

rng = np.random.default_rng(0)
for _ in range(40):
    factors = rng.choice([0.25, 0.5, -1.0, math.inf, math.nan], size=2, p=[0.3, 0.3, 0.2, 0.1, 0.1])
    step(tf.constant(factors[rank], tf.float32))
    print("SEEN", json.dumps([variable.numpy().tolist() for variable in [weight, *opt.variables]]), flush=True)
"""


def _free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    try:
        for each in sockets:
            each.bind(("localhost", 0))
        return [each.getsockname()[1] for each in sockets]
    finally:
        for each in sockets:
            each.close()


def _start_worker(rank: int, ports: list[int], log: Path) -> subprocess.Popen[bytes]:
    cluster = {"worker": [f"localhost:{port}" for port in ports]}
    config = json.dumps({"cluster": cluster, "task": {"type": "worker", "index": rank}})
    root = str(Path(tfmp.__file__).parent.parent)
    environment = os.environ | {"TF_CONFIG": config, "PYTHONPATH": root, "CUDA_VISIBLE_DEVICES": "-1"}
    with log.open("wb") as file:
        return subprocess.Popen(
            [sys.executable, "-c", _WORKER, str(rank)], stdout=file, stderr=subprocess.STDOUT, env=environment
        )


def test_two_workers_stay_one_through_random_overflows(tmp_path: Path) -> None:
    logs = [tmp_path / f"worker_{rank}.log" for rank in range(2)]
    ports = _free_ports(2)
    workers = [_start_worker(rank, ports, log) for rank, log in enumerate(logs)]
    try:
        codes = [worker.wait(timeout=120) for worker in workers]
    except subprocess.TimeoutExpired:
        codes = ["hangs"]
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()
    texts = [log.read_text(errors="replace") for log in logs]
    assert codes == [0, 0], "\n".join(texts)
    first, second = ([line for line in text.splitlines() if line.startswith("SEEN")] for text in texts)
    assert first == second
    assert len(first) == 40

    weight, opt = keras.Variable([1.0, 2.0]), _opt()
    opt.build([weight])
    rng = np.random.default_rng(0)
    for line in first:
        factors = rng.choice([0.25, 0.5, -1.0, math.inf, math.nan], size=2, p=[0.3, 0.3, 0.2, 0.1, 0.1])
        opt.apply([tf.constant(float(opt.loss_scale) * np.float32([factors.sum()] * 2))], [weight])
        assert json.loads(line.removeprefix("SEEN ")) == [
            variable.numpy().tolist() for variable in [weight, *opt.variables]
        ]
