"""Optimizers in two processes under Horovod, which must take the same steps."""

import dataclasses
import functools
import importlib
import itertools
import json
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import horovod_training
import keras
import numpy as np
import pytest
import replica_processes
import replica_training
import tensorflow as tf
from kit import checks
from kit.hosts import from_json
from kit.installed import hosts
from kit.oracle import combined
from scenarios import REPLICATED, STRUCTURE

import tfmp
from tfmp.core.distribute import current_distribution

pytestmark = pytest.mark.horovod

_ORDERS = ("plain", "inside", "outside", "float16")


def _in_orders(way: str, options: str = "", orders: Sequence[str] = _ORDERS) -> list[str]:
    return [f"{way}/{order} {options}".strip() for order in orders]


#: The trainings of one launch, by the behavior that they test.
_TRAININGS = {
    "random": _in_orders("session", "--last=100"),
    "functions": [
        *_in_orders("eager", "--last=30"),
        *_in_orders("function", "--last=30"),
        *_in_orders("scaler", "--last=30", ["eager", "function"]),
    ],
    "fit": _in_orders("fit", "--last=60"),
    "loop": [
        *_in_orders("loop", "--last=30"),
        "tape/plain --last=30",
        *_in_orders("minimize", "--last=30", ["plain", "outside"]),
    ],
    "legacy": [
        *_in_orders("fit", "--last=30 --legacy", ["plain", "inside", "outside"]),
        *_in_orders("loop", "--last=30 --legacy"),
        "tape/plain --last=30 --legacy",
        *_in_orders("minimize", "--last=30 --legacy", ["plain", "outside"]),
    ],
    "updates": _in_orders("updates"),
    # Without a check for overflow, the flag that the workers exchange is a constant too.
    "constants": _in_orders("constants", "--last=4", ["plain", "float16", "unchecked"]),
    # These gradients would be 0 in float16 if they were not scaled.
    "small": [f"{way}/float16 --last=3 --factor={2.0**-30}" for way in ("loop", "fit")],
    "alone": ["session/alone --last=3", "eager/alone --last=3"],
    "missing": ["session/plain --missing", "loop/plain --missing"],
    "strategy": ["loop/strategy --last=1"],
    "scenario": [
        *_in_orders("scenario", '--host="v1 graph, resource variables"', ["plain", "inside", "outside"]),
        *_in_orders("scenario", '--host="keras2 function"', ["plain", "outside"]),
        *_in_orders("scenario", '--host="keras2 legacy function"', ["plain", "inside"]),
        *(f"scenario/plain --host={host}" for host in ('"v1 function"', '"GradScaler, v1 eager"')),
        'scenario/plain --host="GradScaler, keras2 function"',
        'scenario/plain --host="v1 graph, resource variables" --clips',
        *(f"scenario/plain --host={host} --clips" for host in ('"keras2 function"', '"GradScaler, v1 eager"')),
    ],
    # The last ones: TensorFlow 1's behavior cannot be turned off again.
    "reference_variables": _in_orders("session", "--last=100 --v1-behavior", ["plain", "outside", "npu"]),
    "scenario_with_reference_variables": ['scenario/plain --host="v1 graph, reference variables" --v1-behavior'],
}

#: The trainings of another launch, which records the collective operations. That keeps a core busy, so they are few:
#: a function has the operations of eager code, and `minimize` those of the loop.
_RECORDED = {
    "shared_v1": [
        *_in_orders("session", "--last=2"),
        *_in_orders("eager", "--last=2", ["plain", "inside"]),
        *_in_orders("function", "--last=2"),
        # Horovod's own optimizer does not average constants correctly, so these orders are without it.
        *_in_orders("constants", "--last=2", ["plain", "float16"]),
        # Workers know the norm of the mean without asking each other.
        'scenario/plain --host="v1 graph, resource variables" --last=1',
    ],
    "shared_keras": [
        *_in_orders("fit", "--last=2"),
        *_in_orders("loop", "--last=2"),
        *_in_orders("minimize", "--last=2", ["plain", "outside"]),
        *_in_orders("tape", "--last=2", ["plain", "float16"]),
    ],
    "windows": ["window/plain", *_in_orders("micro_batch")],
}


class _Printed(NamedTuple):
    """The lines that the workers of a launch printed, and its exit status, which is None if it had to be killed."""

    status: int | None
    log: str

    def lines(self, title: str, rank: int, training: str) -> list[Any]:
        printed = re.findall(rf"{title} {rank} {re.escape(training)}: (.*)$", self.log, re.MULTILINE)
        return [json.loads(line) for line in printed]

    def assert_states(self, training: str, expected: Sequence[Any]) -> None:
        for rank in range(2):
            failure = f"{training}, worker {rank}: {self.lines('REFUSED', rank, training)}"
            assert self.lines("STATE", rank, training) == expected, failure


def _launch(arguments: Sequence[str], directory: Path) -> _Printed:
    program = [sys.executable, horovod_training.__file__, *arguments]
    # If a worker waits for ever, the time-out ends the launch.
    finished = replica_processes.run(replica_processes.under_horovod(program), directory, 120)
    return _Printed(finished.codes[0], finished.logs[0])


def _launched_to_the_end(arguments: Sequence[str], directory: Path) -> _Printed:
    printed = _launch(arguments, directory)
    assert printed.status == 0, printed.log
    return printed


class _Died(NamedTuple):
    """A launch in which a worker died.

    Attributes:
        printed: What the workers printed.
        taken: For each way, the steps before its last checkpoint.
        resumed: For each way, the training that goes on from that checkpoint.
    """

    printed: _Printed
    taken: dict[str, int]
    resumed: dict[str, str]


@pytest.fixture(scope="module")
def died(tmp_path_factory: pytest.TempPathFactory) -> _Died:
    # The session ends before the worker dies: `test_v1_workers.py` has one within a session. A death costs a launch.
    saved = {way: tmp_path_factory.mktemp(way) for way in ("session", "loop")}
    session, loop = (f"{way}/plain --save={directory}" for way, directory in saved.items())
    trainings = [f"{session} --last=20", f"{loop} --last=40 --die=20"]
    printed = _launch(trainings, tmp_path_factory.mktemp("workers"))
    last = {way: tf.train.latest_checkpoint(directory) for way, directory in saved.items()}
    assert None not in last.values(), printed.log
    taken = {way: int(path.rpartition("-")[2]) for way, path in last.items()}
    resumed = {way: f"{way}/plain --first={taken[way]} --last=40 --restore={path}" for way, path in last.items()}
    return _Died(printed, taken, resumed)


@pytest.fixture(scope="module")
def printed(died: _Died, tmp_path_factory: pytest.TempPathFactory) -> _Printed:
    """Run those that go on after a worker died, and all of `_TRAININGS`, and return what the workers printed."""
    trainings = [*died.resumed.values(), *itertools.chain(*_TRAININGS.values())]
    return _launched_to_the_end(trainings, tmp_path_factory.mktemp("workers"))


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> _Printed:
    """Run all of `_RECORDED`, and return what the workers printed."""
    return _launched_to_the_end([*itertools.chain(*_RECORDED.values()), "--record"], tmp_path_factory.mktemp("workers"))


def _expected_of_keras(steps: int, factor: float = 1.0) -> list[replica_training.State]:
    """Return the states of a single process that trains on the mean of the workers' gradients."""
    one_device = replica_training.ReplicaTraining(keras, tf.distribute.get_strategy())
    return one_device.by_fit(replica_training.inputs("random")[:steps] * factor)


def test_workers_hold_equal_states_through_100_random_overflows(printed: _Printed) -> None:
    expected = horovod_training.reference(100)
    for training in _TRAININGS["random"]:
        printed.assert_states(training, expected)


def test_workers_with_reference_variables_hold_equal_states_through_100_random_overflows(printed: _Printed) -> None:
    expected = horovod_training.reference(100)
    for training in _TRAININGS["reference_variables"]:
        printed.assert_states(training, expected)


def test_callable_losses_train_as_on_one_device(printed: _Printed) -> None:
    expected = horovod_training.reference(30, eager=True)
    for training in _TRAININGS["functions"]:
        printed.assert_states(training, expected)


@pytest.mark.parametrize(("trainings", "steps"), [("fit", 60), ("loop", 30)])
def test_keras_on_two_workers_equals_one_device(printed: _Printed, trainings: str, steps: int) -> None:
    expected = _expected_of_keras(steps)
    for training in _TRAININGS[trainings]:
        printed.assert_states(training, expected)


def test_legacy_optimizers_on_two_workers_equal_one_device(printed: _Printed) -> None:
    one_device = replica_training.ReplicaTraining(keras, tf.distribute.get_strategy(), legacy=True)
    expected = one_device.by_fit(replica_training.inputs("random")[:30])
    for training in _TRAININGS["legacy"]:
        printed.assert_states(training, expected)


def test_updates_of_legacy_optimizers_in_a_graph_are_averaged(printed: _Printed) -> None:
    # Weight, count of steps and loss scale after each step. The second step overflows on the second worker.
    weights = [0.25, 0.25, -0.5, -1.5, -2.0, -3.5]
    scales = [1024, 1024, 1024, 2048, 2048, 4096]
    expected = [list(state) for state in zip(weights, [1, 1, 2, 3, 4, 5], scales, strict=True)]
    for training in _TRAININGS["updates"]:
        printed.assert_states(training, expected)


@pytest.mark.parametrize(("trainings", "dense"), [("shared_v1", 1), ("shared_keras", 2)])
def test_gradients_are_averaged_once_and_sparse_gradients_stay_sparse(
    recorded: _Printed, trainings: str, dense: int
) -> None:
    for training in _RECORDED[trainings]:
        way, order = training.split()[0].split("/")
        # Horovod's optimizer averages gradients in `compute_gradients`, and Horovod's tape averages them too. In all
        # other cases tfmp does, after one more sum by which the workers compare which gradients they have.
        asks = way == "loop" or (way != "tape" and order in {"plain", "float16"})
        # One more sum is that of the flag. Of a sparse gradient the values and the row indices are gathered.
        collectives = {"ALLREDUCE": dense + 1 + asks, "ALLGATHER": 2}
        assert recorded.lines("COLLECTIVES", 0, training) == [collectives], training


def _after_windows(overflow_drops: str, order: str) -> list[list[float]]:
    """Return the expected weight and rows of the table after each micro-batch."""
    weights, states = np.ones(3), []
    for window in np.split(horovod_training.MICRO_BATCHES, 2):
        # Three gradients for each micro-batch of each worker: those of the weight and of the two rows.
        kept = np.isfinite(window)
        finite = np.where(kept, window, 0)
        grads = np.stack([finite, finite * [1, 0], finite * [0, 1]], axis=-1)
        if order in {"inside", "outside"}:
            # Horovod averages each micro-batch, so that an overflow on one worker reaches the other.
            kept &= kept.all(axis=1, keepdims=True)
        states += [weights.tolist()] * 2
        if kept.all() or overflow_drops == "micro_batch":
            weights = weights - 0.5 * grads[kept].mean(axis=0)
        states.append(weights.tolist())
    return states


def test_windows_are_averaged_once_over_all_micro_batches_kept(recorded: _Printed) -> None:
    for training in _RECORDED["windows"]:
        overflow_drops, order = training.split()[0].split("/")
        expected = _after_windows(overflow_drops, order)
        for rank in range(2):
            tolerance = 1e-3 if order == "float16" else 1e-6
            states = recorded.lines("STATE", rank, training)
            np.testing.assert_allclose(states, expected, atol=tolerance, err_msg=training)
        # Three sums in each window of three micro-batches: the number of micro-batches kept, the flag, and the counts
        # of overflows. Two more sums and two gathers, if tfmp averages the window: which gradients there are, and the
        # gradients. Horovod's own optimizer has a sum and two gathers for each micro-batch in their place.
        once = {"ALLREDUCE": (3 + 2) / 3, "ALLGATHER": 2 / 3}
        each = {"ALLREDUCE": (3 + 3) / 3, "ALLGATHER": 2}
        collectives = each if order in {"inside", "outside"} else once
        assert recorded.lines("COLLECTIVES", 0, training) == [collectives], training


@pytest.mark.promise(8, 9, 11, 14)
@pytest.mark.filterwarnings("ignore:Gradients do not exist for variables:UserWarning")
def test_workers_do_together_what_the_oracle_says(printed: _Printed) -> None:
    for training in [*_TRAININGS["scenario"], *_TRAININGS["scenario_with_reference_variables"]]:
        clips, name = "--clips" in training, training.split('"')[1]
        scenario = horovod_training.of_mean(REPLICATED["clipped" if clips else "spikes of sums"])
        # The mean of two gradients is the sum of their halves.
        halves = [[combined(STRUCTURE, [fed], 0.5) for fed in feds] for feds in scenario.steps()]
        course = dataclasses.replace(scenario, fed=halves).course()
        plain = hosts()[name.replace("reference", "resource")].make_plain(STRUCTURE, None, scenario.plain_settings)
        for rank in range(2):
            states = [*checks.train(plain, []), *map(from_json, printed.lines("STATE", rank, training))]
            # Keras averages the gradients after the script has clipped them, which one device cannot do.
            other = None if clips and name.startswith("keras") else plain
            assert checks.violations(course, states, other, rtol=1e-5) == [], training


def test_constant_gradients_are_averaged_at_every_step(printed: _Printed) -> None:
    for training in _TRAININGS["constants"]:
        step = 0.125 if "float16" in training else 0.125 + 2**-15
        printed.assert_states(training, [1 - step * taken for taken in range(1, 5)])


def test_small_gradients_travel_scaled_in_float16(printed: _Printed) -> None:
    expected = _expected_of_keras(3, 2.0**-30)
    for training in _TRAININGS["small"]:
        printed.assert_states(training, expected)


def test_one_warning_is_given_if_nothing_averages_gradients(printed: _Printed) -> None:
    warning = "Horovod runs 2 processes, and nothing averages the gradients over them: pass is_distributed=True"
    for rank in range(2):
        for training in itertools.chain(*_TRAININGS.values()):
            warned = printed.lines("WARNED", rank, training)
            assert [warning in message for message in warned] == [True] * (training in _TRAININGS["alone"]), warned
        for training in _TRAININGS["alone"]:
            expected = horovod_training.reference(3, [rank], eager=training.startswith("eager"))
            assert printed.lines("STATE", rank, training) == expected, training


def test_gradient_that_one_worker_lacks_is_an_error_in_both(printed: _Printed) -> None:
    for training, variable in zip(_TRAININGS["missing"], ["bias:0", r"dense\w*/bias:0"], strict=True):
        message = rf"differ in whether the gradients of these are None, or sparse:.*\b{variable}"
        for rank in range(2):
            [refused] = printed.lines("REFUSED", rank, training)
            assert re.search(message, refused), refused


def test_strategy_together_with_horovod_is_refused(printed: _Printed) -> None:
    for rank in range(2):
        [refused] = printed.lines("REFUSED", rank, *_TRAININGS["strategy"])
        assert "Horovod runs 2 processes, and OneDeviceStrategy is active in this one" in refused


@pytest.fixture
def horovod_of_one() -> Iterator[Any]:
    """Return Horovod, initialized with this process as the only one."""
    hvd = importlib.import_module("horovod.tensorflow")
    hvd.init()
    yield hvd
    hvd.shutdown()


_FLOAT16_REFUSED = "aggregation_dtype='float16' is for an optimizer that Horovod did not make"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda hvd, opt, ours: ours(hvd.DistributedOptimizer(opt, backward_passes_per_step=2)), "at 1."),
        (lambda hvd, opt, ours: ours(hvd.DistributedOptimizer(opt, op=hvd.Adasum)), "use op=hvd.Average."),
        (
            lambda hvd, opt, ours: ours(hvd.DistributedOptimizer(opt), aggregation_dtype="float16"),
            _FLOAT16_REFUSED,
        ),
        (
            lambda hvd, opt, ours: hvd.DistributedOptimizer(ours(opt, aggregation_dtype="float16")).compute_gradients(
                lambda: 1.0 * tf.Variable(1.0)
            ),
            _FLOAT16_REFUSED,
        ),
    ],
    ids=["passes", "adasum", "float16_inside", "float16_outside"],
)
def test_unsupported_settings_of_horovods_optimizer_are_refused(
    make: Callable[..., Any], message: str, horovod_of_one: Any
) -> None:
    ours = functools.partial(
        tfmp.LossScaleOptimizer, loss_scale_manager=tfmp.FixedLossScaleManager(8), is_distributed=True
    )
    # Horovod itself refuses several passes in eager mode.
    with tf.Graph().as_default(), pytest.raises(ValueError, match=re.escape(message)):
        make(horovod_of_one, tf.compat.v1.train.GradientDescentOptimizer(0.5), ours)


def test_one_process_trains_as_it_does_without_horovod(horovod_of_one: Any) -> None:
    for training in [*_in_orders("session", "--last=20"), *_in_orders("eager", "--last=20")]:
        expected = horovod_training.reference(20, [0], eager=training.startswith("eager"))
        assert list(horovod_training.states(horovod_of_one, training)) == expected, training


def test_horovod_that_is_not_initialized_is_an_error() -> None:
    hvd = importlib.import_module("horovod.tensorflow")
    assert not hvd.is_initialized()
    with pytest.raises(ValueError, match=r"is_distributed=True, and nothing distributes: call hvd\.init\(\)"):
        current_distribution(is_distributed=True)


def test_worker_that_dies_ends_the_other_and_the_run_resumes(died: _Died, printed: _Printed) -> None:
    assert died.printed.status not in {0, None}, died.printed.log
    assert "Process name: 1\nExit code: 3" in died.printed.log
    assert set(died.taken.values()) <= {19, 20}
    printed.assert_states(died.resumed["loop"], _expected_of_keras(40)[died.taken["loop"] :])
    # A checkpoint of a session holds the same variables as with tf.contrib, so the counts of steps start again at 0.
    expected = [state["variables"] for state in horovod_training.reference(40)[died.taken["session"] :]]
    for rank in range(2):
        states = printed.lines("STATE", rank, died.resumed["session"])
        assert [state["variables"] for state in states] == expected
