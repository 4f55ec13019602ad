"""The wrapper around Keras optimizers on two workers, in two processes that must make the same decisions."""

import functools
import re
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import numpy as np
import pytest
import replica_processes
import replica_training
import tensorflow as tf
from kerases import for_every_keras, installed
from kit import checks
from kit.hosts import from_json
from kit.installed import replicated_hosts
from replica_training import ReplicaTraining, State, inputs
from scenarios import REPLICATED, STRUCTURE

#: Of 200 steps in one process in `test_keras_replicas.py`: a step of two workers takes longer.
_STEPS = 60


class _Died(NamedTuple):
    """A launch in which the second worker died in the last training, and the directory of that one's checkpoints."""

    finished: replica_processes.Finished
    saved: Path


@pytest.fixture(scope="module")
def died(tmp_path_factory: pytest.TempPathFactory) -> _Died:
    """Train with every Keras in one launch: starting the workers takes longer than most of their steps.

    The last training is the loop of the package `keras`. In it a worker dies: what follows in TensorFlow's runtime is
    the same for tf_keras.
    """
    names = ",".join(sorted((keras.__name__ for keras in installed().values()), reverse=True))
    directory = tmp_path_factory.mktemp("workers")
    program = replica_training.command(
        names, "workers", "ours", "random", "scenarios", "fit", "compiled", "legacy", "loop", f"--last={_STEPS}"
    )
    options = [f"--save={directory}", "--die=10"]
    finished = replica_processes.run(
        [*program, *options], directory, 120, replica_processes.two_workers(), outlive=True
    )
    assert finished.codes[1] == 3, str(finished)
    return _Died(finished, directory / "0")


@pytest.fixture(scope="module")
def on_one_device() -> Callable[..., list[State]]:
    """Return a function that trains on one device by one Keras, once."""

    @functools.cache
    def trained(keras: ModuleType, legacy: bool = False) -> list[State]:
        return ReplicaTraining(keras, tf.distribute.get_strategy(), legacy=legacy).by_fit(inputs("random")[:_STEPS])

    return trained


@for_every_keras()
def test_two_workers_hold_equal_states_through_60_random_overflows(
    keras: ModuleType, died: _Died, on_one_device: Callable[..., list[State]]
) -> None:
    # The next test has the loop of `keras`.
    for way in ("fit",) if keras.__name__ == "keras" else ("fit", "loop"):
        first, second = died.finished.states(f"{keras.__name__}/{way}")
        assert first == second
        assert first == on_one_device(keras)


@for_every_keras("keras2", "tf_keras")
def test_two_workers_with_a_legacy_optimizer_decide_alike(
    keras: ModuleType, died: _Died, on_one_device: Callable[..., list[State]]
) -> None:
    first, second = died.finished.states(f"{keras.__name__}/legacy")
    assert first == second
    assert first == on_one_device(keras, legacy=True)


@for_every_keras()
def test_workers_compile_their_updates(
    keras: ModuleType, died: _Died, on_one_device: Callable[..., list[State]]
) -> None:
    first, second = died.finished.states(f"{keras.__name__}/compiled")
    assert first == second
    for own, other in zip(first, on_one_device(keras), strict=True):
        for mine, theirs in zip(own[0], other[0], strict=True):
            np.testing.assert_allclose(mine, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.promise(8, 10, 11, 14)
@pytest.mark.filterwarnings("ignore:Gradients do not exist for variables:UserWarning")
@pytest.mark.parametrize(("name", "scenario_name"), replica_training.on_workers())
def test_workers_do_together_what_the_oracle_says(name: str, scenario_name: str, died: _Died) -> None:
    scenario = REPLICATED[scenario_name]
    for states in died.finished.states(re.escape(f"scenarios/{name}/{scenario_name}")):
        plain = replicated_hosts()[name].make_plain(STRUCTURE, None)
        found = checks.violations(scenario.course(), list(map(from_json, states)), plain, rtol=scenario.rtol or 1e-6)
        assert found == []


@for_every_keras("keras3", "keras2")
def test_worker_that_dies_ends_the_other_and_the_run_resumes(
    keras: ModuleType, died: _Died, on_one_device: Callable[..., list[State]], tmp_path: Path
) -> None:
    finished, expected = died.finished, on_one_device(keras)
    assert finished.codes[0] not in {0, None}, str(finished)
    # TensorFlow's runtime checks every 10 seconds whether the other workers are alive.
    assert re.search(r"UnavailableError: .*task:1.*heartbeat", finished.logs[0]), str(finished)
    for states in finished.states("keras/loop"):
        assert len(states) in {9, 10}
        assert states == expected[: len(states)]
    last = tf.train.latest_checkpoint(died.saved)
    taken = int(last.rpartition("-")[2])
    assert taken in {9, 10}

    program = replica_training.command("keras", "workers", "ours", "random", "loop", f"--last={_STEPS}")
    options = [f"--first={taken}", f"--restore={last}"]
    resumed = replica_processes.run([*program, *options], tmp_path, 90, replica_processes.two_workers())
    assert resumed.codes == [0, 0], str(resumed)
    assert resumed.states("keras/loop") == [expected[taken:], expected[taken:]]
