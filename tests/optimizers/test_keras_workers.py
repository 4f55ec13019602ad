"""The wrapper around Keras optimizers on two workers, in two processes that must make the same decisions."""

import re
from pathlib import Path
from types import ModuleType

import replica_processes
import replica_training
import tensorflow as tf
from kerases import for_every_keras
from replica_training import ReplicaTraining, inputs


@for_every_keras()
def test_two_workers_hold_equal_states_through_200_random_overflows(keras: ModuleType, tmp_path: Path) -> None:
    program = replica_training.command(keras.__name__, "workers", "ours", "random", "loop", "fit")
    finished = replica_processes.run(program, tmp_path, 120, replica_processes.two_workers())
    assert finished.codes == [0, 0], str(finished)
    on_one_device = ReplicaTraining(keras, tf.distribute.get_strategy()).by_fit(inputs("random"))
    for way in ("loop", "fit"):
        first, second = finished.states(way)
        assert first == second
        assert first == on_one_device


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
    assert resumed.states("loop") == [expected, expected]
