"""What the base class gives a manager, whatever its rule; `test_conformance.py` tests the managers that users get."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import tensorflow as tf

import tfmp
from tfmp.core.managers.stateful import StatefulManager


class _State(NamedTuple):
    loss_scale: tf.Tensor
    steps: tf.Tensor


class Halving(StatefulManager[_State]):
    """Halves the scale at each overflow."""

    def __init__(self, init_loss_scale: float = 8, starts: bool = True) -> None:
        super().__init__(init_loss_scale, 2, 16)
        if starts:
            self._start_from(_State(self._init_loss_scale, np.int32(0)))

    def update_loss_scale(self, finite_grads: tf.Tensor) -> tf.Operation:
        def rule(state: _State) -> _State:
            scale = self._scale_within_bounds(state.loss_scale)
            return _State(tf.where(finite_grads, scale, tf.maximum(2.0, scale / 2)), state.steps + 1)

        return self._update(rule)

    def restart(self, loss_scale: float) -> tf.Operation:
        return self._restart_with(loss_scale=loss_scale)


def test_rule_sees_the_state_that_it_has_left() -> None:
    manager = Halving()
    for finite, scale in [(True, 8), (False, 4), (False, 2), (False, 2)]:
        manager.update_loss_scale(tf.constant(finite))
        assert float(manager.get_loss_scale()) == scale
    assert manager.state_dict() == {"loss_scale": 2.0, "steps": 4}
    assert manager.lowest_loss_scale == 2


@pytest.mark.parametrize(("restored", "meant"), [(4.0, 4), (0.0, 2), (1e30, 16), (math.inf, 16), (math.nan, 8)])
def test_restored_scale_comes_within_the_bounds(restored: float, meant: float) -> None:
    manager = Halving()
    manager.state.create().loss_scale.assign(restored)
    manager.update_loss_scale(tf.constant(True))
    assert float(manager.get_loss_scale()) == meant


def test_restart_keeps_nothing_but_what_it_is_given() -> None:
    manager = Halving()
    manager.update_loss_scale(tf.constant(True))
    manager.restart(4.0)
    assert manager.state_dict() == {"loss_scale": 4.0, "steps": 0}


@pytest.mark.graph
def test_variables_are_made_after_the_settings_are_checked(session: tf.compat.v1.Session) -> None:
    with pytest.raises(ValueError, match=r"^init_loss_scale must be a float32 number of at least 2, got 1: "):
        Halving(1)
    Halving(starts=False)
    assert tf.compat.v1.global_variables() == []
    Halving()
    # Those of resource variables end in /value, those of reference variables do not.
    names = [variable.op.name.removesuffix("/value") for variable in tf.compat.v1.global_variables()]
    assert names == ["loss_scale", "steps"]


def test_step_in_eager_code_changes_the_variables_that_have_the_state_now() -> None:
    manager = tfmp.ExponentialUpdateLossScaleManager(8, 1)

    def take_step() -> None:
        manager.update_loss_scale(tf.constant(True))
        manager.note_step(tf.constant(True))

    take_step()
    hosted: list[tf.Variable] = []

    def add_variable(name: str, value: np.generic) -> tf.Variable:
        hosted.append(tf.Variable(value, name=name))
        return hosted[-1]

    manager.store_in(add_variable)
    take_step()
    assert float(manager.get_loss_scale()) == 32
    assert [variable.numpy().item() for variable in hosted if variable.name == "loss_scale:0"] == [32]
    assert int(manager.get_status().applied_steps) == 2


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "function"])
def test_what_was_read_does_not_change_with_a_later_step(compiled: bool) -> None:
    manager = Halving()
    status = manager.get_status()

    def step() -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        before = manager.get_loss_scale()
        manager.update_loss_scale(tf.constant(False))
        manager.note_step(tf.constant(False))
        return before, manager.state.read().loss_scale, manager.state.get("steps")

    scales = [[float(each) for each in (tf.function(step) if compiled else step)()] for _ in range(2)]
    assert scales == [[8, 4, 1], [4, 2, 2]]
    assert (float(status.loss_scale), int(status.attempted_steps)) == (8, 0)


def test_host_of_a_state_that_was_not_used_makes_all_its_variables() -> None:
    manager = Halving()
    made: list[str] = []

    def add_variable(name: str, value: np.generic) -> tf.Variable:
        return tf.Variable(value, name=f"of_host_{name}")

    def note(make: Callable[..., tf.Variable], **settings: Any) -> tf.Variable:
        made.append(settings["name"])
        return make(**settings)

    with tf.variable_creator_scope(note):
        manager.store_in(add_variable)
    # The counters of steps are not made a first time, only to be copied.
    names = ["loss_scale", "steps", "applied_steps", "skipped_steps", "consecutive_skipped_steps", "last_step_applied"]
    assert made == [f"of_host_{name}" for name in names]
    assert (manager.state_dict(), int(manager.get_status().attempted_steps)) == ({"loss_scale": 8, "steps": 0}, 0)
