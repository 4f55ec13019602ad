"""Optimizers in two processes that Horovod connects: one step for both."""

import importlib
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import horovod_training
import keras
import numpy as np
import pytest
import replica_processes
import replica_training
import tensorflow as tf

from tfmp.core.distribute import current_distribution

pytestmark = pytest.mark.horovod

_ORDERS = ("plain", "inside", "outside", "float16")


def _horovodrun(arguments: list[str], directory: Path, seconds: float, processes: int = 2) -> tuple[int | None, str]:
    """Run the program in some processes; return its status, None if it had to be killed, and what it printed."""
    program = [sys.executable, horovod_training.__file__, *arguments]
    finished = replica_processes.run(replica_processes.under_horovod(program, processes), directory, seconds)
    return finished.codes[0], finished.logs[0]


def _states(log: str, rank: int, training: str) -> list[Any]:
    return [json.loads(line) for line in re.findall(rf"STATE {rank} {training} (.*)$", log, re.MULTILINE)]


def _of_keras(steps: int | None = None) -> list[replica_training.State]:
    """Return the states of a single process that trains on the mean of the workers' gradients."""
    one_device = replica_training.ReplicaTraining(keras, tf.distribute.get_strategy())
    return one_device.by_fit(replica_training.inputs("random")[:steps])


@pytest.mark.parametrize(
    ("orders", "behavior"),
    [(_ORDERS, []), (("plain", "outside", "npu"), ["--v1-behavior"])],
    ids=["resource", "reference"],
)
def test_workers_stay_one_through_300_random_overflows(
    tmp_path: Path, orders: Sequence[str], behavior: list[str]
) -> None:
    trainings = [f"session/{order}" for order in orders]
    status, log = _horovodrun([*trainings, *behavior], tmp_path, seconds=150)
    assert status == 0, log
    assert "nothing averages" not in log
    expected = horovod_training.reference(300)
    for training in trainings:
        for rank in range(2):
            assert _states(log, rank, training) == expected, f"{training}, worker {rank}"


def test_losses_that_are_functions_train_as_on_one_device(tmp_path: Path) -> None:
    trainings = [f"{way}/{order}" for way in ("eager", "function") for order in _ORDERS]
    trainings += ["scaler/eager", "scaler/function"]
    status, log = _horovodrun([*trainings, "--last=60"], tmp_path, seconds=150)
    assert status == 0, log
    expected = horovod_training.reference(60, eager=True)
    for training in trainings:
        for rank in range(2):
            assert _states(log, rank, training) == expected, f"{training}, worker {rank}"


@pytest.mark.parametrize(
    ("trainings", "steps"),
    [
        ([f"fit/{order}" for order in _ORDERS], None),
        ([*(f"loop/{order}" for order in _ORDERS), "tape/plain", *(f"minimize/{order}" for order in _ORDERS)], 60),
    ],
    ids=["fit", "loop"],
)
def test_keras_on_two_workers_equals_one_device(tmp_path: Path, trainings: list[str], steps: int | None) -> None:
    status, log = _horovodrun([*trainings, *([f"--last={steps}"] if steps else [])], tmp_path, seconds=150)
    assert status == 0, log
    assert "nothing averages" not in log
    expected = _of_keras(steps)
    for training in trainings:
        for rank in range(2):
            assert _states(log, rank, training) == expected, f"{training}, worker {rank}"


@pytest.mark.parametrize(
    ("ways", "dense"),
    [(["session", "eager", "function", "constants"], 1), (["fit", "loop", "minimize", "tape"], 2)],
    ids=["v1", "keras"],
)
def test_gradients_are_shared_once_and_sparse_ones_as_such(tmp_path: Path, ways: Sequence[str], dense: int) -> None:
    # Horovod's own optimizer does not share constants well.
    trainings = [
        f"{way}/{order}" for way in ways for order in _ORDERS if way != "constants" or order in {"plain", "float16"}
    ]
    status, log = _horovodrun([*trainings, "--last=2", "--record"], tmp_path, seconds=60)
    assert status == 0, log
    for training in trainings:
        way, _, order = training.partition("/")
        # Horovod's optimizer shares gradients where it computes them, Horovod's tape does, and everywhere else tfmp,
        # which first asks what they are.
        asks = way == "loop" or (way != "tape" and order in {"plain", "float16"})
        [meetings] = re.findall(rf"MEETINGS {training} (.*)$", log, re.MULTILINE)
        # The flag, too, is summed; of a sparse gradient the values and the rows are gathered.
        assert json.loads(meetings) == {"ALLREDUCE": dense + 1 + asks, "ALLGATHER": 2}, training


def _after_windows(overflow_drops: str, order: str) -> list[list[float]]:
    """Return the weight and the two rows of the table after each micro-batch."""
    weights, states = np.ones(3), []
    for window in np.split(horovod_training.MICRO_BATCHES, 2):
        # A row for each worker's micro-batch: the weight's gradient, and those of the rows.
        kept = np.isfinite(window)
        finite = np.where(kept, window, 0)
        grads = np.stack([finite, finite * [1, 0], finite * [0, 1]], axis=-1)
        if order in {"inside", "outside"}:
            # Horovod has averaged it.
            kept &= kept.all(axis=1, keepdims=True)
        states += [weights.tolist()] * 2
        if kept.all() or overflow_drops == "micro_batch":
            weights = weights - 0.5 * grads[kept].mean(axis=0)
        states.append(weights.tolist())
    return states


def test_windows_are_shared_once_and_divided_by_what_all_workers_kept(tmp_path: Path) -> None:
    trainings = ["window/plain", *(f"micro_batch/{order}" for order in _ORDERS)]
    status, log = _horovodrun([*trainings, "--record"], tmp_path, seconds=60)
    assert status == 0, log
    for training in trainings:
        overflow_drops, _, order = training.partition("/")
        expected = _after_windows(overflow_drops, order)
        for rank in range(2):
            tolerance = 1e-3 if order == "float16" else 1e-6
            np.testing.assert_allclose(_states(log, rank, training), expected, atol=tolerance, err_msg=training)
        [meetings] = re.findall(rf"MEETINGS {training} (.*)$", log, re.MULTILINE)
        # In a window: how many micro-batches all have kept, the flag, and who overflowed. Gradients, and what they are,
        # once; but Horovod's own optimizer shares those of each micro-batch.
        once = {"ALLREDUCE": (3 + 2) / 3, "ALLGATHER": 2 / 3}
        each = {"ALLREDUCE": (3 + 3) / 3, "ALLGATHER": 2}
        assert json.loads(meetings) == (each if order in {"inside", "outside"} else once), training


def test_gradients_that_are_constants_are_shared_at_every_step(tmp_path: Path) -> None:
    # Where nothing is checked, the flag is a constant too.
    trainings = ["constants/plain", "constants/float16", "constants/unchecked"]
    # A worker that waits for ever is told of by the time-out.
    status, log = _horovodrun([*trainings, "--last=4"], tmp_path, seconds=40)
    assert status == 0, log
    for training in trainings:
        for rank in range(2):
            step = 0.125 if training == "constants/float16" else 0.125 + 2**-15
            assert _states(log, rank, training) == [1 - step * taken for taken in range(1, 5)]


def test_small_gradients_travel_scaled_in_float16(tmp_path: Path) -> None:
    # Unscaled, 2**-30 is 0 in float16.
    status, log = _horovodrun(["loop/float16", "fit/float16", "--last=3", f"--factor={2.0**-30}"], tmp_path, seconds=60)
    assert status == 0, log
    fed = replica_training.inputs("random")[:3] * 2.0**-30
    expected = replica_training.ReplicaTraining(keras, tf.distribute.get_strategy()).by_fit(fed)
    for training in ("loop/float16", "fit/float16"):
        for rank in range(2):
            assert _states(log, rank, training) == expected, f"{training}, worker {rank}"


_REFUSALS = {
    "tfmp.LossScaleOptimizer(hvd.DistributedOptimizer(opt, backward_passes_per_step=2), manager, True)": "at 1.",
    "tfmp.LossScaleOptimizer(hvd.DistributedOptimizer(opt, op=hvd.Adasum), manager, True)": "use op=hvd.Average.",
    "tfmp.LossScaleOptimizer(hvd.DistributedOptimizer(opt), manager, True, aggregation_dtype='float16')": (
        "aggregation_dtype='float16' is for an optimizer that Horovod did not make"
    ),
    "hvd.DistributedOptimizer(tfmp.LossScaleOptimizer(opt, manager, True, aggregation_dtype='float16'))"
    ".compute_gradients(lambda: 1.0 * tf.Variable(1.0))": (
        "aggregation_dtype='float16' is for an optimizer that Horovod did not make"
    ),
}

# Horovod itself refuses several passes in eager mode.
_REFUSING_PROGRAM = """
import horovod.tensorflow as hvd, tensorflow as tf, tfmp
hvd.init()
tf.compat.v1.disable_eager_execution()
opt, manager = tf.compat.v1.train.GradientDescentOptimizer(0.5), tfmp.FixedLossScaleManager(8)
for refused in {}:
    try:
        eval(refused)
    except ValueError as error:
        print("ValueError of", refused, error)
"""


def test_what_horovods_optimizer_cannot_do_is_refused(tmp_path: Path) -> None:
    program = _REFUSING_PROGRAM.format(list(_REFUSALS))
    finished = replica_processes.run([sys.executable, "-c", program], tmp_path, 60)
    assert finished.codes == [0], str(finished)
    for refused, message in _REFUSALS.items():
        told = rf"^ValueError of {re.escape(refused)} .*{re.escape(message)}"
        assert re.search(told, finished.logs[0], re.MULTILINE), str(finished)


def test_strategy_beside_horovod_is_refused(tmp_path: Path) -> None:
    status, log = _horovodrun(["loop/strategy", "--last=1"], tmp_path, seconds=60)
    assert status == 1, log
    assert "Horovod runs 2 processes, and OneDeviceStrategy is active in this one" in log


def test_one_process_trains_as_it_does_without_horovod(tmp_path: Path) -> None:
    trainings = [f"{way}/{order}" for way in ("session", "eager") for order in _ORDERS]
    status, log = _horovodrun([*trainings, "--last=20"], tmp_path, seconds=60, processes=1)
    assert status == 0, log
    for training in trainings:
        expected = horovod_training.reference(20, [0], eager=training.startswith("eager"))
        assert _states(log, 0, training) == expected, training


def test_horovod_that_is_not_initialized_is_an_error() -> None:
    hvd = importlib.import_module("horovod.tensorflow")
    assert not hvd.is_initialized()
    with pytest.raises(ValueError, match=r"is_distributed=True, and nothing distributes: call hvd\.init\(\)"):
        current_distribution(is_distributed=True)


def test_gradients_that_nothing_averages_are_warned_of_once(tmp_path: Path) -> None:
    trainings = ["session/alone", "eager/alone"]
    status, log = _horovodrun([*trainings, "--last=3"], tmp_path, seconds=60)
    assert status == 0, log
    warning = "Horovod runs 2 processes, and nothing averages the gradients over them: pass is_distributed=True"
    for rank in range(2):
        for training in trainings:
            expected = horovod_training.reference(3, [rank], eager=training.startswith("eager"))
            assert _states(log, rank, training) == expected, training
        warned = re.findall(rf"^\[{rank}\].*{re.escape(warning)}", log, re.MULTILINE)
        assert len(warned) == len(trainings), log


def test_gradient_that_one_worker_lacks_is_an_error_in_both(tmp_path: Path) -> None:
    lacked = {"session/plain": "bias:0", "loop/plain": "dense/bias:0"}
    status, log = _horovodrun([*lacked, "--missing"], tmp_path, seconds=60)
    assert status == 0, log
    for training, variable in lacked.items():
        message = rf"differ in whether the gradients of these are None, or sparse:.*\b{variable}"
        for rank in range(2):
            assert re.search(rf"REFUSED {rank} {training} .*{message}", log), log


@pytest.mark.parametrize("training", ["session/plain", "loop/plain"])
def test_worker_that_dies_ends_the_other_and_the_run_resumes(tmp_path: Path, training: str) -> None:
    status, log = _horovodrun([training, "--last=60", f"--save={tmp_path}", "--die=30"], tmp_path, seconds=90)
    assert status not in {0, None}, log
    assert "Process name: 1\nExit code: 3" in log
    last = tf.train.latest_checkpoint(tmp_path)
    taken = int(last.rpartition("-")[2])
    assert taken in {29, 30}

    status, log = _horovodrun([training, f"--first={taken}", "--last=60", f"--restore={last}"], tmp_path, seconds=90)
    assert status == 0, log
    resumed = [_states(log, rank, training) for rank in range(2)]
    if training == "loop/plain":
        assert resumed == [_of_keras(60)[taken:]] * 2
        return
    # A checkpoint of a session holds what tf.contrib's held, and so not the counts of steps.
    expected = [state["variables"] for state in horovod_training.reference(60)[taken:]]
    for states in resumed:
        assert [state["variables"] for state in states] == expected
