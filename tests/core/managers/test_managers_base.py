"""What every manager has of the base class, also one that was written for tf.contrib."""

import math
import re
from pathlib import Path
from typing import Any

import pytest
import tensorflow as tf

import tfmp
from tfmp.core.managers import validated_manager


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


def test_manager_that_calls_no_constructor_counts_its_steps() -> None:
    manager = _AlwaysEight()
    for applied in (True, False, False):
        manager.note_step(tf.constant(applied))
    status = {name: value.numpy().item() for name, value in manager.get_status()._asdict().items()}
    assert status == {
        "loss_scale": 8,
        "last_step_applied": False,
        "last_step_finite": False,
        "attempted_steps": 3,
        "applied_steps": 1,
        "skipped_steps": 2,
        "consecutive_skipped_steps": 2,
    }


def test_step_that_was_applied_without_a_micro_batch_is_not_finite_until_the_next() -> None:
    manager, found = _AlwaysEight(), []
    for finite in (False, True):
        manager.note_step(tf.constant(True), tf.constant(finite))
        status = manager.get_status()
        found.append((bool(status.last_step_applied), bool(status.last_step_finite)))
    assert found == [(True, False), (True, True)]


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


@pytest.mark.parametrize(
    ("state", "error", "message"),
    [
        (8.0, TypeError, "state_dict must be a mapping from names to numbers"),
        ({"loss_scale": 4.0}, ValueError, "keeps loss_scale, good_steps, bad_steps, got loss_scale: pass"),
        ({"loss_scale": "large", "good_steps": 1, "bad_steps": 0}, (TypeError, ValueError), "loss_scale"),
    ],
)
def test_state_that_is_not_a_managers_is_refused_whole(state: Any, error: Any, message: str) -> None:
    manager = tfmp.ExponentialUpdateLossScaleManager(8, incr_every_n_steps=2)
    with pytest.raises(error, match=message):
        manager.load_state_dict(state)
    assert manager.state_dict() == {"loss_scale": 8, "good_steps": 0, "bad_steps": 0}


#: A state that each kind of manager takes, with the least values.
_EXPONENTIAL = {"loss_scale": 2.0, "good_steps": 0, "bad_steps": -1, "steps_since_change": 0}
_LOG_MAX = {
    **{"loss_scale": 2.0**-126, "log_mean": -3.5, "log_variance": 0.0},
    **{"observations": 0, "margin": 0, "good_steps": 0},
}


def _managers() -> dict[str, tfmp.LossScaleManager]:
    bounds = {"min_loss_scale": 2, "max_loss_scale": 16}
    return {
        "exponential": tfmp.ExponentialUpdateLossScaleManager(8, 2, hysteresis=2, tolerance=0.5, **bounds),
        "log max": tfmp.LogMaxLossScaleManager(init_loss_scale=8, **bounds),
    }


@pytest.mark.parametrize(
    ("kind", "state"),
    [
        ("exponential", _EXPONENTIAL),
        ("exponential", {"loss_scale": 16.0, "good_steps": 1, "bad_steps": 1, "steps_since_change": 3}),
        # A scale out of bounds is corrected by the next step.
        ("log max", _LOG_MAX),
    ],
)
def test_state_at_the_limits_is_taken(kind: str, state: dict[str, float]) -> None:
    manager = _managers()[kind]
    manager.load_state_dict(state)
    assert manager.state_dict() == state


@pytest.mark.parametrize(
    ("kind", "wrong", "message"),
    [
        ("exponential", {"loss_scale": 1.5}, "loss_scale must be a float32 number of at least 2, got 1.5"),
        ("exponential", {"loss_scale": 17.0}, "loss_scale must not be greater than max_loss_scale, got 17.0."),
        ("exponential", {"good_steps": -1}, "good_steps must be a whole number from 0 to 2**31 - 1, got -1."),
        ("exponential", {"bad_steps": -2}, "bad_steps must be a whole number from -1 to 2**31 - 1, got -2."),
        ("exponential", {"steps_since_change": -1}, "steps_since_change must be a whole number from 0 to 2**31 - 1, "),
        ("log max", {"loss_scale": 0.0}, "loss_scale must be a float32 number of at least 1.17549e-38, got 0.0"),
        ("log max", {"log_mean": math.inf}, "log_mean must be finite, got inf."),
        ("log max", {"log_variance": math.nan}, "log_variance must be finite, got nan."),
        ("log max", {"observations": -1}, "observations must be a whole number from 0 to 2**31 - 1, got -1."),
        ("log max", {"margin": 0.5}, "margin must be a whole number from 0 to 2**31 - 1, got 0.5."),
        ("log max", {"good_steps": -1}, "good_steps must be a whole number from 0 to 2**31 - 1, got -1."),
    ],
)
def test_state_that_the_rule_cannot_continue_from_is_refused(kind: str, wrong: dict[str, float], message: str) -> None:
    manager = _managers()[kind]
    before = manager.state_dict()
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        manager.load_state_dict((_EXPONENTIAL if kind == "exponential" else _LOG_MAX) | wrong)
    assert manager.state_dict() == before


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


class _Exported(_AlwaysEight):
    """A manager that is exported with a function that counts a step."""

    @tf.function(input_signature=[tf.TensorSpec([], tf.bool)] * 2)
    def step(self, applied: tf.Tensor, finite: tf.Tensor) -> dict[str, tf.Tensor]:
        self.note_step(applied, finite)
        return self.get_status()._asdict()


def test_exported_manager_counts_steps_and_dropped_micro_batches(tmp_path: Path) -> None:
    tf.saved_model.save(_Exported(), str(tmp_path))
    loaded = tf.saved_model.load(str(tmp_path))
    loaded.step(tf.constant(False), tf.constant(False))
    status = loaded.step(tf.constant(True), tf.constant(False))
    assert {name: value.numpy().item() for name, value in status.items()} == {
        "loss_scale": 8,
        "last_step_applied": True,
        "last_step_finite": False,
        "attempted_steps": 2,
        "applied_steps": 1,
        "skipped_steps": 1,
        "consecutive_skipped_steps": 0,
    }


def test_what_is_no_manager_is_refused_by_the_name_of_its_argument() -> None:
    manager = _AlwaysEight()
    assert validated_manager(manager) is manager
    with pytest.raises(TypeError, match=r"manager must be a tfmp\.LossScaleManager, got 1024 of type int: .*Fixed"):
        validated_manager(1024, "manager")
