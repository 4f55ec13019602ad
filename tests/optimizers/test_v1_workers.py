"""The wrapper under tf.estimator on two replicas, of one process or of two: one decision for all."""

import importlib.util
import itertools
import sys
from pathlib import Path

import estimator_training
import numpy as np
import pytest
import replica_processes
import tensorflow as tf
from estimator_training import OPTIMIZERS, State, Worker, train
from replica_training import inputs

pytestmark = pytest.mark.skipif(not hasattr(tf, "estimator"), reason="this TensorFlow has no tf.estimator; 2.15 has")

needs_horovod = pytest.mark.skipif(
    importlib.util.find_spec("horovod") is None, reason="needs Horovod, which the lane `horovod` builds"
)


def _on_one_device(optimizer: str, directory: Path) -> list[State]:
    return train(optimizer, inputs("random"), directory / "one_device", Worker())


@pytest.mark.filterwarnings("ignore:To make it possible to preserve tf.data options:UserWarning")
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_two_replicas_stay_one_through_200_random_overflows(
    optimizer: str, two_replicas: tf.distribute.MirroredStrategy, tmp_path: Path
) -> None:
    on_both = train(optimizer, inputs("random"), tmp_path / "replicas", Worker(strategy=two_replicas))
    on_one_device = _on_one_device(optimizer, tmp_path)
    for replica in (0, -1):
        assert [{name: [values[replica]] for name, values in state.items()} for state in on_both] == on_one_device


@pytest.mark.parametrize(
    ("kind", "optimizer"),
    [
        ("tf_config", "Adam"),
        ("tf_config_v1", "Momentum"),
        pytest.param("horovod", "Adam", marks=needs_horovod),
    ],
)
def test_two_workers_stay_one_through_200_random_overflows(kind: str, optimizer: str, tmp_path: Path) -> None:
    program = [sys.executable, estimator_training.__file__, kind, optimizer, "random", str(tmp_path / "workers")]
    if kind == "horovod":
        finished = replica_processes.run(replica_processes.under_horovod(program), tmp_path, 120)
    else:
        finished = replica_processes.run(program, tmp_path, 120, replica_processes.two_workers())
    assert set(finished.codes) == {0}, str(finished)
    first, second = ([*itertools.chain.from_iterable(finished.states(str(rank)))] for rank in range(2))
    assert first == second
    assert first == _on_one_device(optimizer, tmp_path)
    applied = int(np.isfinite(inputs("random")).all(axis=1).sum())
    assert first[-1]["global_step"] == first[-1]["applied_steps"] == [applied]
    assert first[-1]["skipped_steps"] == [200 - applied]
