"""The wrapper under tf.estimator on two workers, in two processes that must make the same decisions."""

import sys
from pathlib import Path

import estimator_training
import numpy as np
import pytest
import replica_processes
import tensorflow as tf
from estimator_training import State, train
from replica_training import inputs

from tfmp import LossScaleStatus

pytestmark = pytest.mark.estimator

_STEPS = 100


def _on_two_workers(behavior: str, directory: Path, *options: str) -> replica_processes.Finished:
    command = [sys.executable, estimator_training.__file__, behavior, str(directory / "workers"), *options]
    return replica_processes.run([*command, f"--last={_STEPS}"], directory, 120, replica_processes.two_workers())


@pytest.fixture
def on_one_device(tmp_path: Path) -> list[State]:
    states: list[State] = []
    train(inputs()[:_STEPS], tmp_path / "one_device", states.append)
    applied = int(np.isfinite(inputs()[:_STEPS]).all(axis=1).sum())
    assert states[-1]["global_step"] == states[-1]["applied_steps"] == [applied]
    assert states[-1]["skipped_steps"] == [_STEPS - applied]
    return states


def test_two_workers_with_v1_behavior_hold_equal_states_through_100_random_overflows(
    tmp_path: Path, on_one_device: list[State]
) -> None:
    finished = _on_two_workers("v1", tmp_path)
    assert set(finished.codes) == {0}, str(finished)
    assert finished.states("estimator") == [on_one_device, on_one_device]


def test_states_are_equal_until_a_worker_dies_and_from_the_checkpoint_before(
    tmp_path: Path, on_one_device: list[State]
) -> None:
    # Estimator's session treats the loss of a worker as temporary, logs it at the level INFO and retries for ever
    # (TensorFlow 2.15.1). So the test ends the remaining process.
    died = _on_two_workers("v2", tmp_path, "--die=60")
    assert set(died.codes) <= {3, None}, str(died)
    for states in died.states("estimator"):
        assert len(states) in {59, 60}
        assert states == on_one_device[: len(states)]
    saved = int(tf.train.latest_checkpoint(tmp_path / "workers").rpartition("-")[2])
    assert saved > 0
    taken = 1 + [state["global_step"] for state in on_one_device].index([saved])

    resumed = _on_two_workers("v2", tmp_path, f"--first={taken}")
    assert set(resumed.codes) == {0}, str(resumed)
    # A checkpoint holds the same variables as with tf.contrib, so the counts of steps start again at 0.
    counts = set(LossScaleStatus._fields) - {"loss_scale"}
    first, second, expected = (
        [{name: state[name] for name in state.keys() - counts} for state in states]
        for states in [*resumed.states("estimator"), on_one_device[taken:]]
    )
    assert first == second == expected
