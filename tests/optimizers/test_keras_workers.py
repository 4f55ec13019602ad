"""The wrapper around Keras optimizers on two workers, in two processes that must make the same decisions."""

import re
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import replica_processes
import replica_training
import tensorflow as tf
from kerases import for_every_keras, installed
from replica_training import ReplicaTraining, inputs

#: Of 200 steps in one process in `test_keras_distributed.py`: a step of two workers takes longer.
_STEPS = 60


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> replica_processes.Finished:
    """Train with every Keras in one launch: starting the workers takes longer than most of their steps."""
    names = ",".join(keras.__name__ for keras in installed().values())
    program = replica_training.command(
        names, "workers", "ours", "random", "loop", "fit", "compiled", f"--last={_STEPS}"
    )
    directory = tmp_path_factory.mktemp("workers")
    finished = replica_processes.run(program, directory, 120, replica_processes.two_workers())
    assert finished.codes == [0, 0], str(finished)
    return finished


@for_every_keras()
@pytest.mark.home(None)
def test_two_workers_hold_equal_states_through_60_random_overflows(
    keras: ModuleType, trained: replica_processes.Finished
) -> None:
    on_one_device = ReplicaTraining(keras, tf.distribute.get_strategy()).by_fit(inputs("random")[:_STEPS])
    for way in ("loop", "fit"):
        first, second = trained.states(f"{keras.__name__}/{way}")
        assert first == second
        assert first == on_one_device


@for_every_keras("keras3")
@pytest.mark.essential
def test_workers_compile_their_updates(keras: ModuleType, trained: replica_processes.Finished) -> None:
    first, second = trained.states(f"{keras.__name__}/compiled")
    assert first == second
    expected = ReplicaTraining(keras, tf.distribute.get_strategy()).by_fit(inputs("random")[:_STEPS])
    for own, other in zip(first, expected, strict=True):
        for mine, theirs in zip(own[0], other[0], strict=True):
            np.testing.assert_allclose(mine, theirs, rtol=1e-4, atol=1e-5)


# Without tf_keras: the test spends its time waiting for TensorFlow's runtime, which is the same for it.
@for_every_keras("keras3", "keras2")
def test_worker_that_dies_ends_the_other_and_the_run_resumes(keras: ModuleType, tmp_path: Path) -> None:
    program = replica_training.command(keras.__name__, "workers", "ours", "random", "loop", f"--save={tmp_path}")
    died = replica_processes.run([*program, "--die=10"], tmp_path, 90, replica_processes.two_workers(), outlive=True)
    assert died.codes[0] not in {0, None}, str(died)
    assert died.codes[1] == 3, str(died)
    # TensorFlow's runtime checks every 10 seconds whether the other workers are alive.
    assert re.search(r"UnavailableError: .*task:1.*heartbeat", died.logs[0]), str(died)
    last = tf.train.latest_checkpoint(tmp_path / "0")
    taken = int(last.rpartition("-")[2])
    assert taken in {9, 10}

    options = [f"--first={taken}", "--last=30", f"--restore={last}"]
    resumed = replica_processes.run([*program, *options], tmp_path, 90, replica_processes.two_workers())
    assert resumed.codes == [0, 0], str(resumed)
    expected = ReplicaTraining(keras, tf.distribute.get_strategy()).by_fit(inputs("random")[:30])[taken:]
    assert resumed.states(f"{keras.__name__}/loop") == [expected, expected]
