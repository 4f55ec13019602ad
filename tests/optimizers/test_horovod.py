"""Optimizers in two processes under Horovod, which must take the same steps."""

import argparse
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

import pytest
import replica_processes
import tensorflow as tf
import worker_training
from kit import checks
from kit.hosts import State, as_json, from_json
from kit.installed import hosts
from kit.oracle import Course, combined
from replica_training import SCENARIOS
from scenarios import STRUCTURE

import tfmp

pytestmark = [
    pytest.mark.horovod,
    pytest.mark.filterwarnings("ignore:Gradients do not exist for variables:UserWarning"),
]

_ORDERS = ("plain", "inside", "outside", "float16")
_GRAPH, _LOOP, _LEGACY = "v1 graph, resource variables", "keras2 function", "keras2 legacy function"


def _in_orders(fed: str, host: str, orders: Sequence[str] = _ORDERS, *options: str) -> list[str]:
    return [" ".join([f"'{fed}/{order}'", f'--host="{host}"', *options]) for order in orders]


#: The trainings of one launch, by the behavior that they test.
_TRAININGS = {
    "scenarios": [
        *_in_orders("random", _GRAPH, ["plain"]),
        *_in_orders("random", _GRAPH, ["inside", "outside", "float16"], "--last=40"),
        *_in_orders("random", "v1 eager", ["plain", "float16"], "--last=20"),
        *_in_orders("random", "v1 function", ["plain", "outside"], "--last=20"),
        *_in_orders("random", "GradScaler, v1 eager", ["plain"], "--last=20"),
        *_in_orders("random", "keras2 fit", ["plain", "outside"], "--last=20"),
        *_in_orders("random", _LOOP, ["plain"]),
        *_in_orders("random", _LOOP, ["inside", "float16"], "--last=40"),
        *_in_orders("random", _LOOP, ["plain"], "--by=tape", "--last=20"),
        *_in_orders("random", _LOOP, ["plain", "outside"], "--by=minimize", "--last=20"),
        *_in_orders("random", _LEGACY, ["plain", "inside", "float16"], "--last=20"),
        *_in_orders("random", _LEGACY, ["plain"], "--by=tape", "--last=20"),
        *_in_orders("random", _LEGACY, ["outside"], "--by=minimize", "--last=20"),
        *_in_orders("random", "Estimator", ["plain", "outside"], "--last=20"),
        # By `get_updates`, which Estimator's heads call.
        *_in_orders("random", "keras2 legacy graph", ["plain", "inside"], "--last=20"),
        # These gradients would be 0 in float16 if they were not scaled.
        *_in_orders("random", _LOOP, ["float16"], f"--factor={2.0**-28}", "--last=4"),
        *_in_orders("spikes of sums", _GRAPH, ["plain", "inside", "outside"]),
        *_in_orders("spikes of sums", _LOOP, ["outside"]),
        *_in_orders("spikes of sums", _LEGACY, ["plain"]),
        *_in_orders("spikes of sums", "GradScaler, v1 eager", ["plain"]),
        *_in_orders("spikes of sums", "GradScaler, keras2 function", ["plain"]),
        *(_in_orders("clipped", host, ["plain"])[0] for host in (_GRAPH, _LOOP, "GradScaler, v1 eager")),
        *_in_orders("window dropped", _GRAPH, ["plain"]),
        *_in_orders("micro-batch dropped", _GRAPH),
    ],
    # Without a check for overflow, the flag that the workers exchange is a constant too.
    "constants": [f"constants/{order} --last=4" for order in ("plain", "float16", "unchecked")],
    "alone": [_in_orders("random", host, ["alone"], "--last=3")[0] for host in (_GRAPH, "v1 eager")],
    "missing": [_in_orders("uneven", host, ["plain"])[0] for host in (_GRAPH, _LOOP)],
    "strategy": ["'one device/plain'"],
    "ranges": ["ranges/plain"],
    # The last ones: TensorFlow 1's behavior cannot be turned off again.
    "v1 behavior": [
        *_in_orders(
            "random", "v1 graph, reference variables", ["plain", "outside", "npu"], "--v1-behavior", "--last=40"
        ),
        *_in_orders("spikes of sums", "v1 graph, reference variables", ["plain"], "--v1-behavior"),
    ],
    "ranges with v1 behavior": ["ranges/plain --v1-behavior"],
}

#: The trainings of another launch, which records the collective operations. That keeps a core busy, so they are few:
#: a function has the operations of eager code.
_RECORDED = {
    # Workers know the norm of the mean without asking each other.
    "steps": [
        *_in_orders("random", _GRAPH, _ORDERS, "--last=2"),
        # Horovod's own optimizer does not average constants correctly, so these orders are without it.
        *(f"constants/{order} --last=2" for order in ("plain", "float16")),
        *_in_orders("random", "keras2 fit", ["inside"], "--last=2"),
        *_in_orders("random", _LOOP, ["plain", "outside", "float16"], "--last=2"),
        *_in_orders("random", _LOOP, ["outside"], "--by=minimize", "--last=2"),
        *_in_orders("random", _LOOP, ["float16"], "--by=tape", "--last=2"),
        *_in_orders("random", _LEGACY, ["plain", "inside"], "--last=2"),
        *_in_orders("random", _LEGACY, ["inside"], "--by=minimize", "--last=2"),
        *_in_orders("random", _LEGACY, ["plain"], "--by=tape", "--last=2"),
    ],
    "windows": [*_in_orders("window dropped", _GRAPH, ["plain"]), *_in_orders("micro-batch dropped", _GRAPH)],
}


class _Printed(NamedTuple):
    """The lines that the workers of a launch printed, and its exit status, which is None if it had to be killed."""

    status: int | None
    log: str

    def lines(self, title: str, rank: int, training: str) -> list[Any]:
        printed = re.findall(rf"{title} {rank} {re.escape(training)}: (.*)$", self.log, re.MULTILINE)
        return [json.loads(line) for line in printed]

    def states(self, rank: int, training: str) -> list[State]:
        return list(map(from_json, self.lines("STATE", rank, training)))


def _launch(arguments: Sequence[str], directory: Path, *, ends: bool = True) -> _Printed:
    program = [sys.executable, worker_training.__file__, *arguments]
    # If a worker waits for ever, the time-out ends the launch.
    finished = replica_processes.run(replica_processes.under_horovod(program), directory, 120)
    assert finished.codes[0] == 0 or not ends, finished.logs[0]
    return _Printed(finished.codes[0], finished.logs[0])


class _Died(NamedTuple):
    """A launch in which a worker died; for each host the steps before its last checkpoint, and the run from there."""

    printed: _Printed
    taken: dict[str, int]
    resumed: dict[str, str]


@pytest.fixture(scope="module")
def died(tmp_path_factory: pytest.TempPathFactory) -> _Died:
    # The session ends before the worker dies. A death costs a launch.
    saved = {host: tmp_path_factory.mktemp("saved") for host in (_GRAPH, _LOOP)}
    session, loop = (f'random/plain --host="{host}" --save={directory}' for host, directory in saved.items())
    printed = _launch(
        [f"{session} --last=20", f"{loop} --last=40 --die=20"], tmp_path_factory.mktemp("workers"), ends=False
    )
    taken, resumed = {}, {}
    for host, directory in saved.items():
        taken[host] = max(int(each.name) for each in (directory / "0").iterdir() if tf.train.latest_checkpoint(each))
        restore = directory / "0" / str(taken[host])
        resumed[host] = f'random/plain --host="{host}" --first={taken[host]} --last=40 --restore={restore}'
    return _Died(printed, taken, resumed)


@pytest.fixture(scope="module")
def printed(died: _Died, tmp_path_factory: pytest.TempPathFactory) -> _Printed:
    """Run those that go on after a worker died, and all of `_TRAININGS`, and return what the workers printed."""
    trainings = [*died.resumed.values(), *itertools.chain(*_TRAININGS.values())]
    return _launch(trainings, tmp_path_factory.mktemp("workers"))


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> _Printed:
    """Run all of `_RECORDED`, and return what the workers printed."""
    return _launch([*itertools.chain(*_RECORDED.values()), "--record"], tmp_path_factory.mktemp("workers"))


def _parsed(training: str) -> argparse.Namespace:
    return worker_training.options_of(training)


def _plain(host: str, settings: Callable[[], Any] = dict) -> Any:
    return hosts()[host.replace("reference", "resource")].make_plain(STRUCTURE, None, settings)


def _from_the_start(plain: Any, states: Sequence[State]) -> list[State]:
    """Return the state before the first step, in the types of JSON, and the others."""
    return [*(from_json(as_json(state)) for state in checks.train(plain, [])), *states]


def _course(training: str, ranks: Sequence[int] = (0, 1)) -> Course:
    """Return what the workers must do together, or one of them if it is alone."""
    options = _parsed(training)
    scenario = worker_training.of_mean(SCENARIOS[options.fed])
    # The mean of two gradients is the sum of their halves.
    parts = [
        [combined(STRUCTURE, [feds[rank]], options.factor / len(ranks)) for rank in ranks]
        for feds in scenario.steps()[: options.last]
    ]
    if scenario.window and options.order in {"inside", "outside"}:
        # Horovod averages each micro-batch, so that an overflow on one worker reaches the other.
        parts = [[combined(STRUCTURE, feds)] for feds in parts]
    return dataclasses.replace(scenario, fed=parts).course()


@pytest.mark.promise(8, 9, 10, 11, 14)
def test_workers_do_together_what_the_oracle_says(printed: _Printed) -> None:
    for training in [*_TRAININGS["scenarios"], *_TRAININGS["v1 behavior"]]:
        options = _parsed(training)
        clips, is_float16 = options.fed == "clipped", options.order == "float16"
        plain = _plain(options.host, SCENARIOS[options.fed].plain_settings)
        for rank in range(2):
            states = _from_the_start(plain, printed.states(rank, training))
            # Keras averages the gradients after the script has clipped them, which one device cannot do.
            other = None if clips and options.host.startswith("keras") else plain
            # The slots tell what such small gradients do.
            rtol = 0 if options.factor < 1 else 1e-3 if is_float16 and "batch" in options.fed else 1e-5
            assert checks.violations(_course(training), states, other, rtol=rtol) == [], training


def test_gradients_are_averaged_once_and_sparse_gradients_stay_sparse(recorded: _Printed) -> None:
    for training in _RECORDED["steps"]:
        options = _parsed(training)
        # Horovod's optimizer averages gradients in `compute_gradients`, and Horovod's tape averages them too. In all
        # other cases tfmp does, after one more sum by which the workers compare which gradients they have.
        is_loop = options.host in {_LOOP, _LEGACY} and not options.by
        asks = is_loop or (options.by != "tape" and options.order in {"plain", "float16"})
        # One sum is that of the dense gradient, and one that of the flag. Of a sparse gradient the values and the row
        # indices are gathered.
        collectives = {"ALLREDUCE": 2 + asks, "ALLGATHER": 2}
        assert recorded.lines("COLLECTIVES", 0, training) == [collectives], training


def test_windows_are_averaged_once_over_all_micro_batches_kept(recorded: _Printed) -> None:
    for training in _RECORDED["windows"]:
        # Three sums in each window of two micro-batches: the number of micro-batches kept, the flag, and the counts
        # of overflows. Two more sums and two gathers, if tfmp averages the window: which gradients there are, and the
        # gradients. Horovod's own optimizer has a sum and two gathers for each micro-batch in their place.
        each = _parsed(training).order in {"inside", "outside"}
        collectives = {"ALLREDUCE": (3 + 2) / 2, "ALLGATHER": 2 if each else 2 / 2}
        assert recorded.lines("COLLECTIVES", 0, training) == [collectives], training


def test_constant_gradients_are_averaged_at_every_step(printed: _Printed) -> None:
    for training in _TRAININGS["constants"]:
        step = 0.125 if "float16" in training else 0.125 + 2**-15
        for rank in range(2):
            assert printed.lines("STATE", rank, training) == [1 - step * taken for taken in range(1, 5)], training


def test_one_warning_is_given_if_nothing_averages_gradients(printed: _Printed) -> None:
    warning = "Horovod runs 2 processes, and nothing averages the gradients over them: pass is_distributed=True"
    for rank in range(2):
        for training in itertools.chain(*_TRAININGS.values()):
            warned = printed.lines("WARNED", rank, training)
            assert [warning in message for message in warned] == [True] * (training in _TRAININGS["alone"]), warned
        for training in _TRAININGS["alone"]:
            plain = _plain(_parsed(training).host)
            states = _from_the_start(plain, printed.states(rank, training))
            assert checks.violations(_course(training, [rank]), states, plain) == [], training


def test_gradient_that_one_worker_lacks_is_an_error_in_both(printed: _Printed) -> None:
    message = r"differ in whether the gradients of these are None, or sparse:.*\bfirst:0"
    for training, rank in itertools.product(_TRAININGS["missing"], range(2)):
        [refused] = printed.lines("REFUSED", rank, training)
        assert re.search(message, refused), refused


def test_ranges_are_those_of_the_sum_over_the_workers(printed: _Printed) -> None:
    # The gradients are the mean of 4 and 8 on both workers, before and after they are scaled.
    of_hook = {
        "step": 2,
        "loss_scale": 16,
        "gradients": {"w": {"2": 2, "zero": 2}},
        "weights": {"w": {"0": 2, "1": 2}},
        "activations": {"product": {"2": 1, "3": 1, "zero": 2}},
        "activation_gradients": {"product": {"0": 4}},
    }
    for training, rank in itertools.product(["ranges/plain", "ranges/plain --v1-behavior"], range(2)):
        assert printed.lines("STATE", rank, training) == [[{"0": 3, "1": 1}, {}], of_hook]


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
        (lambda hvd, opt, ours: ours(hvd.DistributedOptimizer(opt), aggregation_dtype="float16"), _FLOAT16_REFUSED),
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
    for training in [*_in_orders("random", _GRAPH), *_in_orders("random", "v1 eager")]:
        options, scenario = _parsed(training), SCENARIOS["random"]
        host = worker_training.make_host(horovod_of_one, options.order, options, scenario)
        states = checks.train(host, [feds[:1] for feds in scenario.steps()])
        assert checks.violations(_course(training, [0]), states, _plain(options.host)) == [], training


def test_worker_that_dies_ends_the_other_and_the_run_resumes(died: _Died, printed: _Printed) -> None:
    assert died.printed.status not in {0, None}, died.printed.log
    assert "Process name: 1\nExit code: 3" in died.printed.log
    assert set(died.taken.values()) <= {19, 20}
    for host, rank in itertools.product(died.resumed, range(2)):
        whole = printed.states(rank, _in_orders("random", host, ["plain"])[0])
        resumed = printed.states(rank, died.resumed[host])
        expected = whole[died.taken[host] : 40]
        assert list(map(checks.saved, resumed)) == list(map(checks.saved, expected))
        assert len(expected) in {20, 21}
