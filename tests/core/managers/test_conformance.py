"""Tests that every manager must pass, with every setting. For a new manager, add a row to the tables below."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pytest
import tensorflow as tf

import tfmp
from tfmp.core.managers.step_counters import LossScaleStatus

tf1 = tf.compat.v1

Make: TypeAlias = Callable[[], tfmp.LossScaleManager]


class _Legacy(tfmp.LossScaleManager):
    """A manager as scripts wrote them for tf.contrib, where a subclass need not call the base class' constructor."""

    def __init__(self) -> None:
        self.seen: list[tf.Tensor] = []

    def get_loss_scale(self) -> tf.Tensor:
        return tf.constant(8.0)

    def update_loss_scale(self, finite_grads: tf.Tensor) -> tf.Operation:
        self.seen = [*self.seen, finite_grads]
        return tf.no_op()


def _exponential(**settings: Any) -> Make:
    return lambda: tfmp.ExponentialUpdateLossScaleManager(8, 3, 2, 4, 0.25, **settings)


_WITH_STATE: dict[str, Make] = {
    "exponential": _exponential(),
    "bounds": _exponential(min_loss_scale=0.125, max_loss_scale=64),
    "hysteresis": _exponential(hysteresis=2),
    "consecutive": _exponential(hysteresis=2, consecutive_hysteresis=True),
    "tolerance": _exponential(tolerance=0.25),
    "log max": lambda: tfmp.LogMaxLossScaleManager(init_loss_scale=8, limit=1000, incr_every_n_steps=2),
    "log max, bounds": lambda: tfmp.LogMaxLossScaleManager(init_loss_scale=8, min_loss_scale=0.25, max_loss_scale=16),
    "all settings": _exponential(min_loss_scale=2, hysteresis=3, consecutive_hysteresis=True, tolerance=0.5),
}
_WITH_CONFIG = {"fixed": lambda: tfmp.FixedLossScaleManager(8)} | _WITH_STATE
_MANAGERS = _WITH_CONFIG | {"legacy": _Legacy}
#: The managers for which the number of skips that lower the scale is not known.
_UNKNOWN_BACKOFF = ("fixed", "tolerance", "all settings", "legacy")

_STEPS = [False, True, False, False, True, True, True, False, False, True, *[False] * 8]


def _each(managers: dict[str, Make]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("make", managers.values(), ids=managers)


def _max_abs(manager: tfmp.LossScaleManager, finite: Any) -> list[tf.Tensor]:
    """Return the further arguments of an update: none, or `max_abs`, which is 1 if finite and otherwise infinity."""
    return [tf.where(finite, 1.0, math.inf)] if manager.needs_max_abs else []


def _update(manager: tfmp.LossScaleManager, finite: Any) -> tf.Operation:
    return tf.group(manager.update_loss_scale(tf.convert_to_tensor(finite), *_max_abs(manager, finite)))


def _state(manager: tfmp.LossScaleManager) -> list[float]:
    return [field.numpy().item() for field in manager.state.read()]


@_each(_MANAGERS)
def test_every_manager_counts_steps_and_tells_a_dropped_micro_batch_from_a_skipped_step(make: Make) -> None:
    manager, counts = make(), {"applied_steps": 0, "skipped_steps": 0, "consecutive_skipped_steps": 0}
    status_in_function = tf.function(manager.get_status)
    for applied, finite in [(True, None), (False, None), (True, False), (True, None), (True, True), (False, False)]:
        manager.note_step(tf.constant(applied), None if finite is None else tf.constant(finite))
        counts["applied_steps" if applied else "skipped_steps"] += 1
        counts["consecutive_skipped_steps"] = 0 if applied else counts["consecutive_skipped_steps"] + 1
        status = manager.get_status()
        assert status == status_in_function()
        assert status == LossScaleStatus(
            loss_scale=8,
            last_step_applied=applied,
            last_step_finite=applied if finite is None else finite,
            attempted_steps=counts["applied_steps"] + counts["skipped_steps"],
            **counts,
        )
    assert [field.dtype for field in status] == [tf.float32, *[tf.bool] * 2, *[tf.int64] * 4]
    assert status.loss_scale.shape == []


@pytest.mark.graph
@_each(_MANAGERS)
def test_status_of_a_graph_is_read_once_and_anew_after_a_step(make: Make) -> None:
    manager = make()
    with tf.Graph().as_default() as graph, tf1.Session() as session:
        step = manager.note_step(tf.constant(False))
        status = manager.get_status()
        with tf.control_dependencies([step]):
            after = manager.get_status()
        graph.finalize()
        assert all(again is tensor for again, tensor in zip(manager.get_status(), status, strict=True))
        assert session.run(after.attempted_steps) == 1
        assert session.run(status.attempted_steps) == 1


@_each(_MANAGERS)
def test_scale_shrinks_after_skips_per_backoff_skipped_steps_down_to_the_lowest(
    make: Make, request: pytest.FixtureRequest
) -> None:
    manager, name, scales = make(), request.node.callspec.id, []
    for _ in range(25):
        _update(manager, False)
        scales.append(float(manager.get_loss_scale()))
    if name in _WITH_STATE:
        assert scales[-1] == manager.lowest_loss_scale < 8
    if name in _UNKNOWN_BACKOFF:
        assert manager.skips_per_backoff is None
    else:
        assert manager.skips_per_backoff == next(count for count, scale in enumerate(scales, 1) if scale < 8)


@pytest.mark.graph
@_each(_MANAGERS)
def test_every_manager_works_in_a_graph_other_than_its_own(make: Make) -> None:
    manager = make()
    for _ in range(2):
        with tf.Graph().as_default(), tf1.Session() as session:
            finite = tf1.placeholder(tf.bool, [])
            step = [_update(manager, finite), manager.note_step(finite, finite)]
            watched = list(manager.get_status())
            session.run(tf1.global_variables_initializer())
            assert session.run(watched) == [8, True, True, 0, 0, 0, 0]
            session.run(step, {finite: True})
            session.run(step, {finite: False})
            assert session.run(watched)[1:] == [False, False, 2, 1, 1, 1]


@pytest.mark.graph
@_each(_WITH_STATE)
def test_each_update_in_a_graph_takes_the_name_of_a_conditional(make: Make) -> None:
    manager = make()
    with tf.Graph().as_default():
        _update(manager, tf.constant(True))
        _update(manager, tf.constant(True))
        names = {variable.op.name.removesuffix("/value") for variable in tf1.global_variables()}
        # The names of variables that are made later, and so the keys of old checkpoints, depend on it.
        with tf1.name_scope("cond") as scope:
            assert scope == "cond_2/"
    assert names == set(manager.state.read()._fields)


@_each(_WITH_STATE)
def test_state_evolves_alike_in_functions_and_eager_mode(make: Make) -> None:
    eager, traced = make(), make()

    @tf.function
    def update(finite: tf.Tensor) -> None:
        _update(traced, finite)

    scales = []
    for finite in _STEPS:
        _update(eager, finite)
        update(tf.constant(finite))
        assert _state(traced) == _state(eager)
        scales.append(float(eager.get_loss_scale()))
    assert min(scales) < max(scales)


@pytest.mark.graph
@_each(_WITH_STATE)
def test_variables_of_a_graph_follow_next_state_and_a_saver_saves_them(
    make: Make, session: tf1.Session, tmp_path: Path
) -> None:
    manager = make()
    finite = tf1.placeholder(tf.bool, [])
    with tf.control_dependencies([_update(manager, finite), manager.note_step(finite, finite)]):
        after = manager.state.read()
    before = type(after)(*(tf1.placeholder(field.dtype, []) for field in after))
    by_rule = manager.next_state(before, finite, *_max_abs(manager, finite))
    session.run(tf1.global_variables_initializer())
    state = session.run(manager.state.read())
    scales = []
    for outcome in _STEPS:
        state = session.run(by_rule, {finite: outcome, **dict(zip(before, state, strict=True))})
        assert session.run(after, {finite: outcome}) == state
        scales.append(float(state.loss_scale))
    assert min(scales) < max(scales)
    path = tf1.train.Saver().save(session, str(tmp_path / "model.ckpt"))
    assert {name: tf.train.load_variable(path, name) for name, _ in tf.train.list_variables(path)} == state._asdict()


@_each(_WITH_STATE)
def test_checkpoint_and_state_dict_move_the_state_of_eager_code(make: Make, tmp_path: Path) -> None:
    manager, restored, loaded = make(), make(), make()
    for finite in _STEPS[:5]:
        _update(manager, finite)
        manager.note_step(tf.constant(finite), tf.constant(finite))
    assert _state(manager) != _state(restored)
    path = tf.train.Checkpoint(manager=manager).save(tmp_path / "checkpoint")
    tf.train.Checkpoint(manager=restored).restore(path).assert_consumed()
    fields = manager.state.read()._fields
    assert {name for name, _ in tf.train.list_variables(path) if name.startswith("manager")} == {
        f"manager/state/values/{field}/.ATTRIBUTES/VARIABLE_VALUE" for field in fields
    }
    assert manager.state_dict() == dict(zip(fields, _state(manager), strict=True))
    loaded.load_state_dict(manager.state_dict())
    assert _state(restored) == _state(loaded) == _state(manager)


@_each(_WITH_STATE)
def test_store_in_moves_the_current_state_into_new_variables(make: Make) -> None:
    manager = make()
    _update(manager, False)
    manager.note_step(tf.constant(False))
    made = {}

    def add_variable(name: str, initial_value: np.generic) -> tf.Variable:
        made[name] = tf.Variable(initial_value, trainable=False)
        return made[name]

    before = manager.state_dict()
    manager.store_in(add_variable)
    assert {name: variable.numpy().item() for name, variable in made.items()} == {
        **before,
        **{"applied_steps": 0, "skipped_steps": 1, "consecutive_skipped_steps": 1, "last_step_applied": False},
    }
    for _ in range(4):
        _update(manager, False)
        manager.note_step(tf.constant(False))
    assert float(made["loss_scale"]) == float(manager.get_loss_scale()) < 8
    assert int(made["skipped_steps"]) == int(manager.get_status().skipped_steps) == 5


@_each(_WITH_STATE)
@pytest.mark.parametrize("restored", [0.0, math.inf, math.nan])
@pytest.mark.parametrize("finite", [True, False])
def test_invalid_restored_scale_is_corrected_by_the_next_step(make: Make, restored: float, finite: bool) -> None:
    manager = make()
    manager.state.create().loss_scale.assign(restored)
    _update(manager, finite)
    highest = manager.get_config()["max_loss_scale"] or float(np.finfo(np.float32).max)
    assert manager.lowest_loss_scale <= float(manager.get_loss_scale()) <= highest


@_each(_WITH_CONFIG)
def test_from_config_of_get_config_makes_the_same_manager(make: Make) -> None:
    manager = make()
    again = type(manager).from_config(manager.get_config())
    assert again.get_config() == manager.get_config()
    for finite in _STEPS:
        _update(manager, finite)
        _update(again, finite)
    assert again.state_dict() == manager.state_dict()
    assert again.get_loss_scale() == manager.get_loss_scale()


@_each(_WITH_CONFIG)
def test_settings_can_be_read_and_neither_changed_nor_misspelled_and_methods_can_be_replaced(make: Make) -> None:
    manager = make()
    config = manager.get_config()
    assert {name: getattr(manager, name) for name in config} == config
    for name in config:
        message = rf"^{name} of this \w+ cannot be changed, .*: make a new manager for {name}=5.5"
        with pytest.raises(AttributeError, match=message):
            setattr(manager, name, 5.5)
    assert manager.get_config() == config
    with pytest.raises(AttributeError, match=r"has no incr_every_n_step, got 3: its settings are arguments of the"):
        manager.incr_every_n_step = 3
    assert not hasattr(manager, "incr_every_n_step")
    manager.get_loss_scale = lambda: tf.constant(2.0)  # type: ignore[method-assign]
    assert float(manager.get_loss_scale()) == 2


@pytest.mark.parametrize("base", [tfmp.ExponentialUpdateLossScaleManager, tfmp.FixedLossScaleManager])
def test_subclass_of_the_user_has_attributes_of_its_own(base: Any) -> None:
    class Own(base):
        def __init__(self, halving: int) -> None:
            super().__init__(8, **({} if base is tfmp.FixedLossScaleManager else {"incr_every_n_steps": 3}))
            self.halving = halving

        def get_config(self) -> dict[str, Any]:
            return {"halving": self.halving}

    manager = Own(5)
    manager.halving = 6
    assert manager.get_config() == {"halving": 6}
    if base is not tfmp.FixedLossScaleManager:
        assert (manager.incr_every_n_steps, manager.init_loss_scale) == (3, 8)
