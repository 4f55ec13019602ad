"""The wrapper around optimizers on two workers, in two processes that must make the same decisions."""

import dataclasses
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, TypeAlias

import pytest
import replica_processes
import tensorflow as tf
import worker_training
from kerases import for_every_keras, installed
from kit import checks
from kit.hosts import from_json
from kit.installed import replicated_hosts
from replica_training import SCENARIOS, FitOnReplicas, inputs
from scenarios import STRUCTURE

#: A step of two workers takes long.
_STEPS = 20


def _trainings() -> list[str]:
    """Return the scenarios of each host of workers; each takes a second or two."""
    found = []
    for name in worker_training.hosts_of_workers():
        # Two workers are slow in eager code.
        found += [("random", name)] * name.startswith(("keras", "tf_keras"))
        # All that are compiled run the same steps, and tf_keras those of Keras 2.15.
        if "compiled" not in name and "tf_keras" not in name:
            found += [("spikes of sums", name), ("micro-batch dropped", name)]
    return [_training(*each) for each in found if SCENARIOS[each[0]].runs_on(each[1])]


def _training(scenario: str, host: str) -> str:
    return f"'{scenario}/strategy' --host='{host}' --last={_STEPS}"


def _uneven() -> list[str]:
    """Return trainings in which one worker has a gradient that the other lacks."""
    of_one_class = ("compiled", "GradScaler")
    names = [name for name in worker_training.hosts_of_workers() if not any(each in name for each in of_one_class)]
    return [f"uneven/strategy --host='{name}'" for name in names]


def _run(trainings: Sequence[str], directory: Path, *, outlive: bool = False) -> replica_processes.Finished:
    program = [sys.executable, worker_training.__file__, *trainings]
    return replica_processes.run(program, directory, 120, replica_processes.two_workers(), outlive=outlive)


def _states(finished: replica_processes.Finished, training: str) -> list[list[Any]]:
    """Return the states that each worker printed."""
    return finished.states(rf"\d {re.escape(training)}:")


#: A launch in which the second worker died in the last training, and the directory of that one's checkpoints.
_Died: TypeAlias = tuple[replica_processes.Finished, Path]


def _loop() -> str:
    """Return the name of the loop in which a worker dies: what follows in TensorFlow's runtime is the same in each."""
    return next(iter(installed()))


@pytest.fixture(scope="module")
def died(tmp_path_factory: pytest.TempPathFactory) -> _Died:
    """Train with every Keras in one launch: starting the workers takes longer than most of their steps."""
    directory = tmp_path_factory.mktemp("workers")
    fits = [f"fit/strategy --host={name} --last={_STEPS}" for name in installed()]
    last = f"random/strategy --host={_loop()} --save={directory} --die=10"
    finished = _run([*_trainings(), *fits, *_uneven(), last], directory, outlive=True)
    assert finished.codes[1] == 3, str(finished)
    return finished, directory / "0"


@for_every_keras()
def test_two_workers_hold_equal_states_in_fit_through_random_overflows(keras: ModuleType, died: _Died) -> None:
    name = next(name for name, each in installed().items() if each is keras)
    first, second = _states(died[0], f"fit/strategy --host={name} --last={_STEPS}")
    assert first == second
    assert first == FitOnReplicas(keras, tf.distribute.get_strategy()).train(inputs()[:_STEPS])


@pytest.mark.promise(8, 10, 11, 14)
@pytest.mark.filterwarnings("ignore:Gradients do not exist for variables:UserWarning")
@pytest.mark.parametrize("training", _trainings())
def test_workers_do_together_what_the_oracle_says(training: str, died: _Died) -> None:
    options = worker_training.options_of(training)
    scenario, of_plain = SCENARIOS[options.fed], options.host.replace(" compiled update", "")
    scenario = dataclasses.replace(scenario, fed=scenario.fed[:_STEPS])
    for states in _states(died[0], training):
        plain = replicated_hosts()[of_plain].make_plain(STRUCTURE, None)
        before = [from_json(state) for state in map(worker_training.as_json, checks.train(plain, []))]
        found = [*before, *map(from_json, states)]
        assert checks.violations(scenario.course(), found, plain, rtol=scenario.rtol or 1e-6) == []


@pytest.mark.parametrize("training", _uneven())
def test_gradient_that_one_worker_lacks_is_an_error_in_both(training: str, died: _Died) -> None:
    """Adding them up would mix gradients of two variables."""
    for log in died[0].logs:
        [refused] = re.findall(rf"REFUSED \d {re.escape(training)}: (.*)", log)
        assert "differ in whether the gradients of these are None, or sparse:] [first" in refused


def test_worker_that_dies_ends_the_other_and_the_run_resumes(died: _Died, tmp_path: Path) -> None:
    finished, saved = died
    assert finished.codes[0] not in {0, None}, str(finished)
    # TensorFlow's runtime notices it by a connection that is reset in the midst of a sum, or else within 10 seconds,
    # since it asks for heartbeats.
    assert re.search(r"UnavailableError: .*task:1", finished.logs[0], re.DOTALL), str(finished)
    expected, _ = _states(finished, _training("random", _loop()))
    taken = max(int(each.name) for each in saved.iterdir() if tf.train.latest_checkpoint(each))
    assert taken in {9, 10}
    training = f"{_training('random', _loop())} --first={taken} --restore={saved / str(taken)}"
    resumed = _run([training], tmp_path)
    assert resumed.codes == [0, 0], str(resumed)
    for states in _states(resumed, training):
        pairs = [list(map(checks.saved, map(from_json, each))) for each in (states, expected[taken:])]
        assert pairs[0] == pairs[1]
        assert len(states) == _STEPS - taken
