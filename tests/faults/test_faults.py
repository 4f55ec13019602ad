"""Every fault on every front-end: a skipped step changes nothing, and training goes on as if it had not happened."""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import checks
import lanes
import pytest
import tensorflow as tf
from faults import FAULTS, LARGE_FAULTS, REPLICA_FAULTS, Fault, Rule, scales
from front_ends import FrontEnd, State
from structures import STRUCTURES

pytestmark = [
    # Keras 3 warns about the variable that the loss does not depend on.
    pytest.mark.filterwarnings("ignore:Gradients do not exist for variables:UserWarning"),
]

_FRONT_ENDS = lanes.front_ends()
_REPLICATED = lanes.replicated_front_ends()


def _rows(names: Any) -> list[Any]:
    marks = {"v1 graph": [pytest.mark.graph], "Estimator": [pytest.mark.graph], "v1 eager": [pytest.mark.home("tf215")]}
    # Where tf_keras is installed, its legacy optimizers are trained too: Keras 2.15 has others.
    marks |= {name: [pytest.mark.home("tf221")] for name in names if name.startswith("tf_keras legacy")}
    return [pytest.param(name, marks=marks.get(name.partition(",")[0], [])) for name in names]


class _Pair:
    """A front-end, and the same optimizer without a wrapper; each is built and traced once for each structure."""

    def __init__(self, name: str, make: Callable[[str], FrontEnd], make_plain: Callable[[str], FrontEnd]) -> None:
        self.name = name
        self.wrapped = cache(make)
        self._plain = cache(make_plain)

    def plain_states(self, fault: Fault) -> list[State]:
        return checks.train_without_wrapper(self._plain(fault.structure), fault)


@pytest.fixture(scope="module")
def pair(request: pytest.FixtureRequest) -> _Pair:
    make, make_plain = _FRONT_ENDS[request.param]
    return _Pair(
        request.param,
        lambda structure: make(STRUCTURES[structure], Rule()),
        lambda structure: make_plain(STRUCTURES[structure], None),
    )


@pytest.mark.parametrize("pair", _rows(_FRONT_ENDS), indirect=True, scope="module")
@pytest.mark.parametrize("fault_name", FAULTS)
def test_faulty_steps_are_skipped_and_change_nothing(pair: _Pair, fault_name: str) -> None:
    fault = lanes.faults_of(pair.name)[fault_name]
    states = checks.train(pair.wrapped(fault.structure), fault)
    assert checks.violations(fault, states, pair.plain_states(fault)) == []


#: The front-ends that have the faults with large variables. The program that prints the table runs all of them.
_FED_LARGE = [name for name in _FRONT_ENDS if LARGE_FAULTS.items() <= lanes.faults_of(name).items()]


# Each takes seconds, so only one front-end runs them here: the `tf.function` of the first Keras, or a session with
# TensorFlow 1's behaviour.
@pytest.mark.parametrize("pair", _rows(_FED_LARGE[:2][-1:]), indirect=True, scope="module")
@pytest.mark.parametrize("fault", LARGE_FAULTS.values(), ids=LARGE_FAULTS)
def test_one_of_many_values_is_seen(pair: _Pair, fault: Fault) -> None:
    states = checks.train(pair.wrapped(fault.structure), fault)
    assert checks.violations(fault, states, pair.plain_states(fault)) == []


@pytest.mark.parametrize("pair", _rows(_FRONT_ENDS), indirect=True, scope="module")
def test_checkpoint_at_an_overflow_resumes(pair: _Pair, tmp_path: Path) -> None:
    front_end = pair.wrapped("all forms")
    steps = FAULTS["inf on every other step"].steps
    front_end.begin()
    # The last step before the checkpoint overflows.
    front_end.train(steps[:7])
    front_end.save(tmp_path)
    expected = front_end.train(steps[7:] * 2)
    front_end.restore(tmp_path)
    resumed = front_end.train(steps[7:] * 2)
    # The outcomes are not compared: in graphs the counts of steps start at 0 in each session.
    assert [_but_outcomes(state) for state in resumed[1:]] == [_but_outcomes(state) for state in expected[1:]]
    assert resumed[-1].loss_scale == 2 * 64


def _but_outcomes(state: State) -> tuple[Any, ...]:
    return [value.tolist() for value in state.moving], state.steps, state.loss_scale


@pytest.fixture(scope="module")
def strategy() -> tf.distribute.MirroredStrategy:
    # The default, collective ops, fails when one process makes a second strategy.
    return tf.distribute.MirroredStrategy(["cpu:0", "cpu:1"], cross_device_ops=tf.distribute.ReductionToOneDevice())


@pytest.fixture(scope="module")
def replicated_pair(request: pytest.FixtureRequest, strategy: tf.distribute.MirroredStrategy) -> _Pair:
    make = _REPLICATED[request.param]
    return _Pair(
        request.param,
        lambda structure: make(STRUCTURES[structure], Rule(), strategy=strategy),
        lambda structure: make(STRUCTURES[structure], None),
    )


@pytest.mark.parametrize("replicated_pair", _rows(_REPLICATED), indirect=True, scope="module")
@pytest.mark.parametrize("fault_name", REPLICA_FAULTS)
def test_replicas_skip_together_whichever_has_the_fault(replicated_pair: _Pair, fault_name: str) -> None:
    fault = lanes.replica_faults_of(replicated_pair.name)[fault_name]
    states = checks.train(replicated_pair.wrapped(fault.structure), fault)
    assert checks.violations(fault, states, replicated_pair.plain_states(fault)) == []


@pytest.mark.graph
def test_checks_see_an_overflow_that_is_applied() -> None:
    make, make_plain = _FRONT_ENDS["v1 graph, resource variables"]
    fault = FAULTS["inf"]
    unprotected, plain = (each(STRUCTURES[fault.structure], None) for each in (make, make_plain))
    found = checks.violations(fault, checks.train(unprotected, fault), checks.train_without_wrapper(plain, fault))
    assert "step 1 must be skipped, and something moved" in found
    assert "after step 4 weights or slots are not those without a wrapper" in found


@pytest.mark.graph
def test_rule_of_the_scale_is_the_documented_one() -> None:
    assert scales([False, False, False, True, True, False], Rule()) == [1024, 1024, 1024, 2048, 1024, 512, 512]
    assert scales([True] * 12, Rule())[-4:] == [2, 1, 1, 1]
    # Finite steps do not reset the count of bad steps.
    assert scales([True, False, True], Rule(1024, 3, 2)) == [1024, 1024, 1024, 512]
