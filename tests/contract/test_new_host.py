"""What a new host costs: the optimizer of a toy, and the 40 lines with which it runs every scenario and every fault."""

from collections.abc import Iterable
from functools import cache
from typing import Any

import pytest
import tensorflow as tf
from faults import FAULTS, course_of
from kit import checks
from kit.hosts import State, state_of, told_by
from kit.oracle import Rule
from kit.scaler_hosts import Scaler
from kit.structures import STRUCTURES
from scenarios import SCENARIOS, STRUCTURE, Scenario

import tfmp


class _Descent:
    """The optimizer of another library: momentum for variables, of which it knows nothing but `assign`."""

    def __init__(self) -> None:
        self.momenta: dict[int, tf.Variable] = {}
        self.steps = tf.Variable(0)

    def apply_gradients(self, grads_and_vars: Iterable[Any]) -> None:
        self.steps.assign_add(1)
        for grad, weight in grads_and_vars:
            if grad is None:
                continue
            with tf.init_scope():
                self.momenta.setdefault(id(weight), tf.Variable(tf.zeros_like(weight)))
            momentum = self.momenta[id(weight)]
            weight.assign_sub(0.5 * momentum.assign(0.5 * momentum + tf.cast(tf.convert_to_tensor(grad), weight.dtype)))


class _Toy(Scaler):
    """The toy in a loop with `tfmp.GradScaler`, which without a rule does nothing."""

    def _make(self) -> None:
        self._weights = {name: tf.Variable(value) for name, value in self.structure.initial.items()}
        self._inner, self.accumulator = _Descent(), None
        if self.rule is not None:
            self._set_up()
        else:
            self.scaler = tfmp.GradScaler(enabled=False)

    def _apply(self, grads: Any) -> None:
        self.scaler.step(self._inner, zip(grads, self._weights.values(), strict=True))
        self.scaler.update()

    def _state(self) -> State:
        zeros = {id(weight): tf.zeros_like(weight) for weight in self._weights.values()}
        moving = [*self._weights.values(), *(zeros | self._inner.momenta).values()]
        return state_of(moving, self._inner.steps, told_by(self.scaler) if self.rule else {})


@cache
def _bare(structure: str, clips: bool = False) -> _Toy:
    return _Toy(STRUCTURES[structure], None, Scenario([], (), clips=clips).plain_settings)


@pytest.mark.promise(1, 2, 3, 4, 5, 6)
@pytest.mark.parametrize("scenario", SCENARIOS.values(), ids=SCENARIOS)
def test_toy_does_what_the_oracle_says(scenario: Scenario) -> None:
    states = checks.train(_Toy(STRUCTURE, scenario.rule, scenario.settings), scenario.steps())
    plain = _bare("all forms", scenario.clips)
    assert checks.violations(scenario.course(), states, plain, rtol=scenario.rtol) == []


@pytest.mark.promise(1, 2, 3, 4, 5, 6)
@pytest.mark.parametrize("name", FAULTS)
def test_toy_skips_faulty_steps(name: str) -> None:
    fault = FAULTS[name]
    states = checks.train(_Toy(STRUCTURES[fault.structure], Rule()), fault.steps)
    assert checks.violations(course_of(fault), states, _bare(fault.structure)) == []
