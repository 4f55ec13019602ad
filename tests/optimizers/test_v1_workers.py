"""The wrapper under tf.estimator on two replicas, in one process or two, which must make the same decisions."""

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

from tfmp import LossScaleStatus

pytestmark = pytest.mark.estimator

#: Of 200 steps of replicas in one process: a step of two workers takes longer.
_STEPS = 100


def _on_one_device(optimizer: str, directory: Path, steps: int = _STEPS) -> list[State]:
    return train(optimizer, inputs("random")[:steps], directory / "one_device", Worker())


def _on_two_workers(kinds: str, optimizer: str, directory: Path, *options: str) -> replica_processes.Finished:
    program = [sys.executable, estimator_training.__file__, kinds, optimizer, "random", str(directory / "workers")]
    command = [*program, *options]
    if kinds.startswith("tf_config"):
        return replica_processes.run(command, directory, 120, replica_processes.two_workers())
    return replica_processes.run(replica_processes.under_horovod(command), directory, 120)


def _states(finished: replica_processes.Finished, kind: str) -> list[list[State]]:
    """Return the states of each worker, in the order of the workers."""
    return [[*itertools.chain.from_iterable(finished.states(f"{kind}/{rank}"))] for rank in range(2)]


@pytest.mark.filterwarnings("ignore:To make it possible to preserve tf.data options:UserWarning")
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_two_replicas_hold_equal_states_through_200_random_overflows(
    optimizer: str, two_replicas: tf.distribute.MirroredStrategy, tmp_path: Path
) -> None:
    on_both = train(optimizer, inputs("random"), tmp_path / "replicas", Worker(strategy=two_replicas))
    on_one_device = _on_one_device(optimizer, tmp_path, 200)
    for replica in (0, -1):
        assert [{name: [values[replica]] for name, values in state.items()} for state in on_both] == on_one_device


def test_two_workers_with_v1_behavior_hold_equal_states_through_100_random_overflows(tmp_path: Path) -> None:
    finished = _on_two_workers("tf_config_v1", "Momentum", tmp_path, f"--last={_STEPS}")
    assert set(finished.codes) == {0}, str(finished)
    on_one_device = _on_one_device("Momentum", tmp_path)
    _assert_counted(on_one_device[-1])
    assert _states(finished, "tf_config_v1") == [on_one_device, on_one_device]


def _assert_counted(last: State) -> None:
    applied = int(np.isfinite(inputs("random")[:_STEPS]).all(axis=1).sum())
    assert last["global_step"] == last["applied_steps"] == [applied]
    assert last["skipped_steps"] == [_STEPS - applied]


# A launch takes longer than the steps in it, so the one in which a worker dies also shows that states are equal.
@pytest.mark.parametrize("kinds", ["tf_config", pytest.param("inside,outside,plain", marks=pytest.mark.horovod)])
def test_states_are_equal_through_100_random_overflows_and_from_the_checkpoint_before_a_worker_died(
    kinds: str, tmp_path: Path
) -> None:
    expected = _on_one_device("Adam", tmp_path)
    _assert_counted(expected[-1])
    *whole, kind = kinds.split(",")
    # With TF_CONFIG, Estimator's session treats the loss of a worker as temporary, logs it at the level INFO and
    # retries for ever (TensorFlow 2.15.1). So the test ends the remaining process.
    died = _on_two_workers(kinds, "Adam", tmp_path, f"--last={_STEPS}", "--die=60")
    assert set(died.codes) <= ({3, None} if kind == "tf_config" else {1}), str(died)
    for order in whole:
        assert _states(died, order) == [expected, expected], order
    for states in _states(died, kind):
        assert len(states) in {59, 60}
        assert states == expected[: len(states)]
    saved = int(tf.train.latest_checkpoint(tmp_path / "workers" / kind).rpartition("-")[2])
    assert saved > 0
    taken = 1 + [state["global_step"] for state in expected].index([saved])

    resumed = _on_two_workers(kind, "Adam", tmp_path, f"--first={taken}", f"--last={_STEPS}")
    assert set(resumed.codes) == {0}, str(resumed)
    # A checkpoint holds the same variables as with tf.contrib, so the counts of steps start again at 0.
    counts = set(LossScaleStatus._fields) - {"loss_scale"}
    first, second = (
        [{name: state[name] for name in state.keys() - counts} for state in states] for states in _states(resumed, kind)
    )
    assert first == second
    assert first == [{name: state[name] for name in state.keys() - counts} for state in expected[taken:]]
