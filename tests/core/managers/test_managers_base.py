"""What the base classes give a manager, whatever its rule; also the fixed one, which has no rule."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import tfmp
from tfmp.core.managers import validated_manager

tf1 = tf.compat.v1


class _AlwaysEight(tfmp.LossScaleManager):
    """A manager as scripts wrote them for tf.contrib: it does not call the base class' constructor."""

    def __init__(self) -> None:
        self.updates = 0

    def get_loss_scale(self) -> tf.Tensor:
        return tf.constant(8.0)

    def update_loss_scale(self, finite_grads: tf.Tensor) -> tf.Operation:
        del finite_grads
        self.updates += 1
        return tf.no_op()

    @tf.function(input_signature=[tf.TensorSpec([], tf.bool)] * 2)
    def step(self, applied: tf.Tensor, finite: tf.Tensor) -> dict[str, tf.Tensor]:
        """Count a step: the function with which the manager is exported."""
        self.note_step(applied, finite)
        return self.get_status()._asdict()


def test_manager_that_knows_no_bounds_promises_none() -> None:
    manager = _AlwaysEight()
    assert (manager.lowest_loss_scale, manager.skips_per_backoff, manager.needs_max_abs) == (0, None, False)
    with pytest.raises(NotImplementedError, match="the scale of a _AlwaysEight cannot be set"):
        manager.set_loss_scale(4.0)
    with pytest.raises(NotImplementedError, match="_AlwaysEight has no get_config, which saving a model needs"):
        manager.get_config()


def test_manager_without_a_state_saves_and_takes_nothing() -> None:
    manager = _AlwaysEight()
    assert manager.state_dict() == {}
    manager.load_state_dict({})
    with pytest.raises(ValueError, match="a _AlwaysEight keeps nothing, got loss_scale"):
        manager.load_state_dict({"loss_scale": 8.0})


def test_exported_manager_counts_steps_and_dropped_micro_batches(tmp_path: Path) -> None:
    tf.saved_model.save(_AlwaysEight(), str(tmp_path))
    loaded = tf.saved_model.load(str(tmp_path))
    loaded.step(tf.constant(False), tf.constant(False))
    status = loaded.step(tf.constant(True), tf.constant(False))
    assert {name: value.numpy().item() for name, value in status.items()} == {
        **{"loss_scale": 8, "last_step_applied": True, "last_step_finite": False, "attempted_steps": 2},
        **{"applied_steps": 1, "skipped_steps": 1, "consecutive_skipped_steps": 0},
    }


def test_what_is_no_manager_is_refused_by_the_name_of_its_argument() -> None:
    manager = _AlwaysEight()
    assert validated_manager(manager) is manager
    with pytest.raises(TypeError, match=r"manager must be a tfmp\.LossScaleManager, got 1024 of type int: .*Fixed"):
        validated_manager(1024, "manager")


@pytest.mark.graph
def test_manager_shows_its_settings_and_in_eager_programs_its_state() -> None:
    assert repr(_AlwaysEight()) == "<_AlwaysEight()>"
    with tf.Graph().as_default():
        manager = tfmp.ExponentialUpdateLossScaleManager(8, incr_every_n_steps=2)
        assert repr(manager) == "<ExponentialUpdateLossScaleManager(init_loss_scale=8.0, incr_every_n_steps=2)>"


def test_manager_shows_its_state_while_a_function_is_traced_too() -> None:
    manager, shown = tfmp.ExponentialUpdateLossScaleManager(8, incr_every_n_steps=2), []
    tf.function(lambda: shown.append(repr(manager)))()
    assert {repr(manager), *shown} == {
        "<ExponentialUpdateLossScaleManager(init_loss_scale=8.0, incr_every_n_steps=2): "
        "loss_scale=8.0, good_steps=0, bad_steps=0>"
    }


@pytest.mark.graph
def test_fixed_manager_has_one_constant_in_a_graph_and_no_variable(session: tf1.Session) -> None:
    manager = tfmp.FixedLossScaleManager(8)
    assert manager.get_loss_scale() is manager.get_loss_scale()
    assert session.run([manager.get_loss_scale(), manager.update_loss_scale(tf.constant(False))]) == [8, None]
    assert tf1.global_variables() == []
    assert manager.lowest_loss_scale == 8


def _halving(init_loss_scale: float = 8) -> tfmp.ExponentialUpdateLossScaleManager:
    return tfmp.ExponentialUpdateLossScaleManager(init_loss_scale, 100, 1, decr_ratio=0.5, min_loss_scale=2)


@pytest.mark.graph
def test_variables_are_made_after_the_settings_are_checked(session: tf1.Session) -> None:
    del session
    with pytest.raises(ValueError, match=r"^init_loss_scale must be a float32 number of at least 2, got 1: "):
        _halving(1)
    assert tf1.global_variables() == []
    _halving()
    # Those of resource variables end in /value, those of reference variables do not.
    names = [variable.op.name.removesuffix("/value") for variable in tf1.global_variables()]
    assert names == ["loss_scale", "good_steps", "bad_steps"]


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "function"])
def test_what_was_read_does_not_change_with_a_later_step(compiled: bool) -> None:
    manager = _halving()
    status = manager.get_status()

    def step() -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        before = manager.get_loss_scale()
        manager.update_loss_scale(tf.constant(False))
        manager.note_step(tf.constant(False))
        return before, manager.state.read().loss_scale, manager.state.get("good_steps")

    scales = [[float(each) for each in (tf.function(step) if compiled else step)()] for _ in range(2)]
    assert scales == [[8, 4, 0], [4, 2, 0]]
    assert (float(status.loss_scale), int(status.attempted_steps)) == (8, 0)


def test_host_of_a_state_that_was_not_used_makes_all_its_variables() -> None:
    manager = _halving()
    made: list[str] = []

    def add_variable(name: str, value: np.generic) -> tf.Variable:
        return tf.Variable(value, name=f"of_host_{name}")

    def note(make: Callable[..., tf.Variable], **settings: Any) -> tf.Variable:
        made.append(settings["name"])
        return make(**settings)

    with tf.variable_creator_scope(note):
        manager.store_in(add_variable)
    # The counters of steps are not made a first time, only to be copied.
    counters = ["applied_steps", "skipped_steps", "consecutive_skipped_steps", "last_step_applied"]
    assert made == [f"of_host_{name}" for name in ("loss_scale", "good_steps", "bad_steps", *counters)]
    assert list(manager.state_dict().values()) == [8, 0, 0]
    assert int(manager.get_status().attempted_steps) == 0
