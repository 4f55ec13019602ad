"""Optimizers in two processes that Horovod connects: one step for both."""

import importlib.util
import json
import re
import sys
from pathlib import Path
from typing import Any

import horovod_training
import keras
import pytest
import replica_processes
import replica_training
import tensorflow as tf

if importlib.util.find_spec("horovod") is None:
    pytest.skip("needs Horovod, which the lane `horovod` builds", allow_module_level=True)


def _horovodrun(arguments: list[str], directory: Path, seconds: float) -> tuple[int | None, str]:
    """Run the program in two processes; return its status, None if it had to be killed, and what it printed."""
    program = [sys.executable, horovod_training.__file__, *arguments]
    finished = replica_processes.run(replica_processes.under_horovod(program), directory, seconds)
    return finished.codes[0], finished.logs[0]


def _states(log: str, rank: int, order: str = "plain") -> list[Any]:
    return [json.loads(line) for line in re.findall(rf"STATE {rank} {order} (.*)$", log, re.MULTILINE)]


@pytest.mark.parametrize("behavior", [[], ["--v1-behavior"]], ids=["resource", "reference"])
def test_workers_stay_one_through_300_random_overflows(tmp_path: Path, behavior: list[str]) -> None:
    orders = ["plain", "inside", "outside", "float16"]
    status, log = _horovodrun(["session", *orders, *behavior], tmp_path, seconds=150)
    assert status == 0, log
    expected = horovod_training.reference(300)
    for order in orders:
        for rank in range(2):
            assert _states(log, rank, order) == expected, f"{order}, worker {rank}"


@pytest.mark.parametrize(("way", "orders"), [("fit", ["plain", "inside", "outside"]), ("loop", ["plain"])])
def test_keras_on_two_workers_equals_one_device(tmp_path: Path, way: str, orders: list[str]) -> None:
    status, log = _horovodrun([way, *orders], tmp_path, seconds=150)
    assert status == 0, log
    one_device = replica_training.ReplicaTraining(keras, tf.distribute.get_strategy())
    expected = one_device.by_fit(replica_training.inputs("random"))
    for order in orders:
        for rank in range(2):
            assert _states(log, rank, order) == expected, f"{order}, worker {rank}"


def test_gradients_that_nothing_averages_are_warned_of(tmp_path: Path) -> None:
    status, log = _horovodrun(["session", "alone", "--last=3"], tmp_path, seconds=60)
    assert status == 0, log
    assert "Horovod runs 2 processes, and nothing averages the gradients over them: pass is_distributed=True" in log
    for rank in range(2):
        assert _states(log, rank, "alone") == horovod_training.reference(3, [rank])


@pytest.mark.parametrize("order", ["plain", "inside"])
def test_processes_that_are_averaged_are_not_warned_of(tmp_path: Path, order: str) -> None:
    status, log = _horovodrun(["session", order, "--last=1"], tmp_path, seconds=60)
    assert status == 0, log
    assert "nothing averages" not in log


def test_gradient_that_one_worker_lacks_is_an_error_in_both(tmp_path: Path) -> None:
    status, log = _horovodrun(["session", "plain", "--missing"], tmp_path, seconds=60)
    assert status not in {0, None}, log
    for rank in range(2):
        assert re.search(
            rf"^\[{rank}\].*differ in whether the gradients of these are None, or sparse:.*bias:0", log, re.MULTILINE
        )


def test_worker_that_dies_ends_the_other_and_the_run_resumes(tmp_path: Path) -> None:
    status, log = _horovodrun(
        ["session", "plain", "--last=60", f"--save={tmp_path}/checkpoint", "--die=30"], tmp_path, seconds=90
    )
    assert status not in {0, None}, log
    assert "Process name: 1\nExit code: 3" in log
    last = tf.train.latest_checkpoint(tmp_path)
    taken = int(last.rpartition("-")[2])
    assert taken in {29, 30}

    status, log = _horovodrun(
        ["session", "plain", f"--first={taken}", "--last=60", f"--restore={last}"], tmp_path, seconds=90
    )
    assert status == 0, log
    # A checkpoint holds what tf.contrib's held, and so not the counts of steps.
    expected = [state["variables"] for state in horovod_training.reference(60)[taken:]]
    for rank in range(2):
        assert [state["variables"] for state in _states(log, rank)] == expected
