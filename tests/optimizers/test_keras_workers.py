"""The wrapper around Keras optimizers on two workers, which are two processes: one decision for all."""

from pathlib import Path
from types import ModuleType

import replica_processes
import replica_training
import tensorflow as tf
from kerases import for_every_keras
from replica_training import ReplicaTraining, inputs


@for_every_keras()
def test_two_workers_stay_one_through_200_random_overflows(keras: ModuleType, tmp_path: Path) -> None:
    program = replica_training.command(keras.__name__, "workers", "ours", "random", "loop", "fit")
    finished = replica_processes.run(program, tmp_path, 120, replica_processes.two_workers())
    assert finished.codes == [0, 0], str(finished)
    on_one_device = ReplicaTraining(keras, tf.distribute.get_strategy()).by_fit(inputs("random"))
    for way in ("loop", "fit"):
        first, second = finished.states(way)
        assert first == second
        assert first == on_one_device
