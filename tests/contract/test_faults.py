"""Every fault on every host: a skipped step changes nothing, and training goes on as if it had not happened."""

from functools import cache
from typing import Any

import pytest
import tensorflow as tf
from faults import FAULTS, LARGE_FAULTS, REPLICA_FAULTS, Fault, course_of, faults_of, replica_faults_of
from kit import checks
from kit.installed import Pair, hosts, replicated_hosts, rows
from kit.oracle import Rule
from kit.structures import STRUCTURES

pytestmark = [
    # Keras 3 warns about the variable that the loss does not depend on.
    pytest.mark.filterwarnings("ignore:Gradients do not exist for variables:UserWarning")
]

_HOSTS = hosts()
_REPLICATED = replicated_hosts()


class _Pair:
    """A host, and that of the same optimizer without tfmp; each is built and traced once for each structure."""

    def __init__(self, name: str, hosts: Pair, **settings: Any) -> None:
        self.name = name
        self.wrapped = cache(lambda structure: hosts.make(STRUCTURES[structure], Rule(), **settings))
        self._plain = cache(lambda structure: hosts.make_plain(STRUCTURES[structure], None))

    def violations(self, fault: Fault) -> list[str]:
        states = checks.train(self.wrapped(fault.structure), fault.steps)
        return checks.violations(course_of(fault), states, self._plain(fault.structure))


@pytest.fixture(scope="module")
def pair(request: pytest.FixtureRequest) -> _Pair:
    return _Pair(request.param, _HOSTS[request.param])


@pytest.mark.promise(1, 2, 3, 6, 5, 4)
@pytest.mark.parametrize("pair", rows(_HOSTS), indirect=True, scope="module")
@pytest.mark.parametrize("fault_name", FAULTS)
def test_faulty_steps_are_skipped_and_change_nothing(pair: _Pair, fault_name: str) -> None:
    assert pair.violations(faults_of(pair.name)[fault_name]) == []


#: The hosts that have the faults with large variables. The program that prints the table runs all of them.
_FED_LARGE = [name for name in _HOSTS if LARGE_FAULTS.items() <= faults_of(name).items()]


# Each takes seconds, so only one host runs them here: the `tf.function` of the first Keras, or a session with
# TensorFlow 1's behaviour.
@pytest.mark.promise(2)
@pytest.mark.parametrize("pair", rows(_FED_LARGE[:2][-1:]), indirect=True, scope="module")
@pytest.mark.parametrize("fault", LARGE_FAULTS.values(), ids=LARGE_FAULTS)
def test_one_of_many_values_is_seen(pair: _Pair, fault: Fault) -> None:
    assert pair.violations(fault) == []


@pytest.fixture(scope="module")
def replicated_pair(request: pytest.FixtureRequest, strategy: tf.distribute.MirroredStrategy) -> _Pair:
    return _Pair(request.param, _REPLICATED[request.param], strategy=strategy)


@pytest.mark.promise(14)
@pytest.mark.parametrize("replicated_pair", rows(_REPLICATED), indirect=True, scope="module")
@pytest.mark.parametrize("fault_name", REPLICA_FAULTS)
def test_replicas_skip_together_whichever_has_the_fault(replicated_pair: _Pair, fault_name: str) -> None:
    assert replicated_pair.violations(replica_faults_of(replicated_pair.name)[fault_name]) == []
