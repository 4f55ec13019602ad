"""A save that is interrupted leaves the last whole checkpoint, from which training goes on exactly."""

import itertools
import os
import resource
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tensorflow as tf

import tfmp

# Many weights, so that a save takes about ten milliseconds.
_WEIGHTS = 1_000_000

#: The longest time that a child process may take.
_SECONDS = 60

# A save may end between being seen and being killed; not several times in a row.
_ATTEMPTS = 3


class SessionRun:
    """A run in a session, saved by a `Saver`."""

    def __init__(self, directory: Path) -> None:
        self._prefix = str(directory / "model.ckpt")
        with tf.Graph().as_default() as graph:
            w = tf.compat.v1.get_variable("w", initializer=tf.ones([_WEIGHTS]))
            self._global_step = tf.compat.v1.train.get_or_create_global_step()
            self._factor = tf.compat.v1.placeholder(tf.float32, [])
            manager = tfmp.ExponentialUpdateLossScaleManager(1024.0, 3, 1, 2, 0.5)
            opt = tfmp.LossScaleOptimizer(tf.compat.v1.train.AdamOptimizer(0.125), manager)
            self._train_op = opt.minimize(tf.reduce_sum(w) * self._factor, self._global_step)
            self._values = [tf.reduce_sum(v) for v in tf.compat.v1.global_variables()]
            self._initializer = tf.compat.v1.global_variables_initializer()
            self._saver = tf.compat.v1.train.Saver(max_to_keep=3)
        self._session = tf.compat.v1.Session(graph=graph)
        self._session.run(self._initializer)

    def step(self, step: int) -> list[float]:
        self._session.run(self._train_op, {self._factor: factor(step)})
        return [float(value) for value in self._session.run(self._values)]

    def save(self, step: int) -> None:
        with self._session.graph.as_default():
            self._saver.save(self._session, self._prefix, step, write_meta_graph=False)

    def restore(self) -> str:
        latest = tf.train.latest_checkpoint(str(Path(self._prefix).parent))
        with self._session.graph.as_default():
            self._saver.restore(self._session, latest)
        return str(latest)


class EagerRun:
    """A run in eager code, saved by a `tf.train.CheckpointManager`."""

    def __init__(self, directory: Path) -> None:
        self._w = tf.Variable(tf.ones([_WEIGHTS]))
        manager = tfmp.ExponentialUpdateLossScaleManager(1024.0, 3, 1, 2, 0.5)
        inner = tf.compat.v1.train.AdamOptimizer(0.125)
        self._opt = tfmp.LossScaleOptimizer(inner, manager)
        self._kept = [self._w, *manager.state.values]
        checkpoint = tf.train.Checkpoint(w=self._w, optimizer=inner, manager=manager)
        self._saver = tf.train.CheckpointManager(checkpoint, str(directory), max_to_keep=3)

    def step(self, step: int) -> list[float]:
        self._opt.minimize(lambda: tf.reduce_sum(self._w) * factor(step), var_list=[self._w])
        return [float(tf.reduce_sum(variable)) for variable in self._kept]

    def save(self, step: int) -> None:
        self._saver.save(step)

    def restore(self) -> str:
        return str(self._saver.restore_or_initialize())


def factor(step: int) -> float:
    """Return the factor of the loss. Every third step overflows."""
    return float("inf") if step % 3 == 2 else 1.0 + step


_RUNS = (SessionRun, EagerRun)


def saving_for_ever(name: str, directory: Path) -> None:
    """Take steps with a run, and save after each, which is said before, until killed."""
    run = {make.__name__: make for make in _RUNS}[name](directory)
    for step in itertools.count():
        run.step(step)
        print(step, flush=True)  # noqa: T201 - the parent waits for it
        run.save(step)


_SAVE = """
import sys
from pathlib import Path
import test_interrupted_saves
test_interrupted_saves.saving_for_ever(sys.argv[1], Path(sys.argv[2]))
"""


def _check_going_on(make: Callable[[Path], Any], directory: Path, at_least: int) -> None:
    resumed = make(directory)
    saved_after = int(resumed.restore().rsplit("-", 1)[1])
    assert saved_after >= at_least
    uninterrupted = make(directory)
    for step in range(saved_after + 1):
        uninterrupted.step(step)
    for step in range(saved_after + 1, saved_after + 6):
        assert resumed.step(step) == uninterrupted.step(step)


def _unfinished(directory: Path) -> list[Path]:
    """Return the parts of saves that have not ended: TensorFlow renames them at the end."""
    return [path for path in directory.rglob("*") if path.is_file() and "temp" in str(path.relative_to(directory))]


def _kill_while_it_saves(name: str, directory: Path, log: Path) -> None:
    """Start a process that takes steps and saves, and kill it once part of the fifth save, or a later one, is seen."""
    root, here = Path(tfmp.__file__).parent.parent, Path(__file__).parent
    environment = os.environ | {"PYTHONPATH": f"{root}{os.pathsep}{here}", "CUDA_VISIBLE_DEVICES": "-1"}
    command = [sys.executable, "-c", _SAVE, name, str(directory)]
    with (
        log.open("w+b") as errors,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, env=environment) as child,
    ):
        # Kills a child that hangs, too.
        limit = threading.Timer(_SECONDS, child.kill)
        limit.start()
        try:
            assert child.stdout is not None
            said = [child.stdout.readline() for _ in range(5)]
            while child.poll() is None and not _unfinished(directory):
                pass
        finally:
            child.kill()
            limit.cancel()
    assert said == [f"{step}\n".encode() for step in range(5)], log.read_text()


@pytest.mark.parametrize("make", _RUNS)
def test_process_killed_while_it_saves_leaves_a_checkpoint_to_go_on_from(
    make: Callable[[Path], Any], tmp_path: Path
) -> None:
    for attempt in range(_ATTEMPTS):
        directory = tmp_path / str(attempt)
        _kill_while_it_saves(make.__name__, directory, tmp_path / "log")
        _check_going_on(make, directory, at_least=3)
        if _unfinished(directory):
            return
    pytest.fail(f"none of {_ATTEMPTS} kills came while a checkpoint was written.")


@pytest.mark.parametrize("make", _RUNS)
def test_disk_that_is_full_while_saving_leaves_a_checkpoint_to_go_on_from(
    make: Callable[[Path], Any], tmp_path: Path
) -> None:
    run = make(tmp_path)
    for step in range(3):
        run.step(step)
        run.save(step)
    run.step(3)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    # Less than the weights take: the write fails in the middle, as on a full disk.
    resource.setrlimit(resource.RLIMIT_FSIZE, (_WEIGHTS, hard))
    try:
        with pytest.raises((tf.errors.OpError, ValueError)):
            run.save(3)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    _check_going_on(make, tmp_path, at_least=2)
    # The run itself continues, and can save again.
    run.step(4)
    run.save(4)
    _check_going_on(make, tmp_path, at_least=4)
