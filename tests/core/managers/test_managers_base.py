"""What every manager has of the base class, also one that was written for tf.contrib."""

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


def test_manager_shows_its_settings_and_its_state() -> None:
    assert repr(_AlwaysEight()) == "<_AlwaysEight()>"
    manager = tfmp.ExponentialUpdateLossScaleManager(8, incr_every_n_steps=2)
    assert repr(manager).endswith(": loss_scale=8.0, good_steps=0, bad_steps=0>")


@pytest.mark.graph
def test_name_of_an_earlier_release_is_deprecated() -> None:
    with tf.Graph().as_default(), pytest.warns(DeprecationWarning, match="call get_status"):
        assert _AlwaysEight().get_step_outcomes()._fields == tfmp.FixedLossScaleManager(8).get_status()._fields


def test_what_is_no_manager_is_refused_by_the_name_of_its_argument() -> None:
    manager = _AlwaysEight()
    assert validated_manager(manager) is manager
    with pytest.raises(TypeError, match=r"manager must be a tfmp\.LossScaleManager, got 1024 of type int: .*Fixed"):
        validated_manager(1024, "manager")
