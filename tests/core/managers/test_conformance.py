"""Tests that every manager must pass, with every setting. For a new manager, add a row to the tables below."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import tfmp
from tfmp.core.managers.step_counters import LossScaleStatus


class _Legacy(tfmp.LossScaleManager):
    """A manager as scripts wrote them for tf.contrib, where a subclass need not call the base class' constructor."""

    def __init__(self) -> None:
        self.seen: list[tf.Tensor] = []

    def get_loss_scale(self) -> tf.Tensor:
        return tf.constant(8.0)

    def update_loss_scale(self, finite_grads: tf.Tensor) -> tf.Operation:
        self.seen = [*self.seen, finite_grads]
        return tf.no_op()


def _exponential(**settings: Any) -> Callable[[], tfmp.LossScaleManager]:
    return lambda: tfmp.ExponentialUpdateLossScaleManager(8, 3, 2, 4, 0.25, **settings)


_WITH_STATE: dict[str, Callable[[], tfmp.LossScaleManager]] = {
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


def _each(managers: dict[str, Callable[[], tfmp.LossScaleManager]]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("make_manager", managers.values(), ids=managers)


def _max_abs(manager: tfmp.LossScaleManager, finite: Any) -> list[tf.Tensor]:
    """Return the further arguments of an update: none, or `max_abs`, which is 1 if finite and otherwise infinity."""
    return [tf.where(finite, 1.0, math.inf)] if manager.needs_max_abs else []


def _update(manager: tfmp.LossScaleManager, finite: Any) -> tf.Operation:
    return tf.group(manager.update_loss_scale(tf.convert_to_tensor(finite), *_max_abs(manager, finite)))


def _state(manager: tfmp.LossScaleManager) -> list[float]:
    return [field.numpy().item() for field in manager.state.read()]


@_each(_MANAGERS)
def test_loss_scale_of_every_manager_is_a_float32_scalar(make_manager: Callable[[], tfmp.LossScaleManager]) -> None:
    scale = make_manager().get_loss_scale()
    assert (scale.dtype, scale.shape, float(scale)) == (tf.float32, [], 8)


@_each(_MANAGERS)
def test_every_manager_counts_steps(make_manager: Callable[[], tfmp.LossScaleManager]) -> None:
    manager = make_manager()
    for finite in [True, False, True, False, False]:
        manager.note_step(tf.constant(finite))
    status = manager.get_status()
    assert status == LossScaleStatus(
        loss_scale=8,
        last_step_applied=False,
        last_step_finite=False,
        attempted_steps=5,
        applied_steps=2,
        skipped_steps=3,
        consecutive_skipped_steps=2,
    )
    assert [field.dtype for field in status[1:]] == [tf.bool, tf.bool, *[tf.int64] * 4]


@_each(_MANAGERS)
def test_every_manager_tells_a_dropped_micro_batch_from_a_skipped_step(
    make_manager: Callable[[], tfmp.LossScaleManager],
) -> None:
    manager, told = make_manager(), []
    for applied, finite in [(False, None), (True, False), (True, None), (True, True), (False, False)]:
        manager.note_step(tf.constant(applied), None if finite is None else tf.constant(finite))
        status = manager.get_status()
        told.append((bool(status.last_step_applied), bool(status.last_step_finite)))
    assert told == [(False, False), (True, False), (True, True), (True, True), (False, False)]


@_each(_MANAGERS)
def test_status_of_every_manager_is_current_in_eager_mode_and_functions(
    make_manager: Callable[[], tfmp.LossScaleManager],
) -> None:
    manager = make_manager()
    asked_in_function = tf.function(manager.get_status)
    for finite in [True, False, False]:
        manager.note_step(tf.constant(finite))
        assert manager.get_status() == asked_in_function()
    assert manager.get_status() == LossScaleStatus(
        loss_scale=8,
        last_step_applied=False,
        last_step_finite=False,
        attempted_steps=3,
        applied_steps=1,
        skipped_steps=2,
        consecutive_skipped_steps=2,
    )


@pytest.mark.graph
@_each(_MANAGERS)
def test_repeated_get_status_does_not_grow_a_graph(
    make_manager: Callable[[], tfmp.LossScaleManager],
) -> None:
    manager = make_manager()
    with tf.Graph().as_default() as graph, tf.compat.v1.Session() as session:
        step = manager.note_step(tf.constant(False))
        status = manager.get_status()
        with tf.control_dependencies([step]):
            after = manager.get_status()
        graph.finalize()
        assert all(again is tensor for again, tensor in zip(manager.get_status(), status, strict=True))
        assert session.run(after.attempted_steps) == 1
        assert session.run(status.attempted_steps) == 1


@_each(_WITH_STATE)
def test_scale_falls_to_lowest_loss_scale(make_manager: Callable[[], tfmp.LossScaleManager]) -> None:
    manager = make_manager()
    for _ in range(25):
        _update(manager, False)
    assert float(manager.get_loss_scale()) == manager.lowest_loss_scale < 8


#: The managers for which `skips_per_backoff` is known.
_SAYING = {name: make for name, make in _WITH_STATE.items() if name not in {"tolerance", "all settings"}}


@_each(_SAYING)
def test_scale_shrinks_after_skips_per_backoff_skipped_steps(
    make_manager: Callable[[], tfmp.LossScaleManager],
) -> None:
    manager = make_manager()
    assert manager.skips_per_backoff is not None
    for _ in range(manager.skips_per_backoff - 1):
        _update(manager, False)
        assert float(manager.get_loss_scale()) == 8
    _update(manager, False)
    assert float(manager.get_loss_scale()) < 8


@_each({name: make for name, make in _MANAGERS.items() if name not in _SAYING})
def test_skips_per_backoff_is_none_if_it_is_unknown(
    make_manager: Callable[[], tfmp.LossScaleManager],
) -> None:
    assert make_manager().skips_per_backoff is None


@pytest.mark.graph
@_each(_MANAGERS)
def test_every_manager_works_in_a_graph_other_than_its_own(make_manager: Callable[[], tfmp.LossScaleManager]) -> None:
    manager = make_manager()
    for _ in range(2):
        with tf.Graph().as_default(), tf.compat.v1.Session() as session:
            finite = tf.compat.v1.placeholder(tf.bool, [])
            step = [_update(manager, finite), manager.note_step(finite, finite)]
            watched = list(manager.get_status())
            session.run(tf.compat.v1.global_variables_initializer())
            assert session.run(watched) == [8, True, True, 0, 0, 0, 0]
            session.run(step, {finite: True})
            session.run(step, {finite: False})
            assert session.run(watched)[1:] == [False, False, 2, 1, 1, 1]


@pytest.mark.graph
@_each(_WITH_STATE)
def test_each_update_in_a_graph_takes_the_name_of_a_conditional(
    make_manager: Callable[[], tfmp.LossScaleManager],
) -> None:
    manager = make_manager()
    with tf.Graph().as_default():
        _update(manager, tf.constant(True))
        _update(manager, tf.constant(True))
        names = {variable.op.name.removesuffix("/value") for variable in tf.compat.v1.global_variables()}
        # The names of variables that are made later, and so the keys of old checkpoints, depend on it.
        with tf.compat.v1.name_scope("cond") as scope:
            assert scope == "cond_2/"
    assert names == set(manager.state.read()._fields)


_STEPS = [False, True, False, False, True, True, True, False, False, True, *[False] * 8]


@_each(_WITH_STATE)
def test_state_evolves_alike_in_functions_and_eager_mode(make_manager: Callable[[], tfmp.LossScaleManager]) -> None:
    eager, traced = make_manager(), make_manager()

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
def test_variables_of_a_graph_follow_next_state(
    make_manager: Callable[[], tfmp.LossScaleManager], session: tf.compat.v1.Session
) -> None:
    manager = make_manager()
    finite = tf.compat.v1.placeholder(tf.bool, [])
    with tf.control_dependencies([_update(manager, finite)]):
        after = manager.state.read()
    before = type(after)(*(tf.compat.v1.placeholder(field.dtype, []) for field in after))
    by_rule = manager.next_state(before, finite, *_max_abs(manager, finite))
    session.run(tf.compat.v1.global_variables_initializer())
    state = session.run(manager.state.read())
    scales = []
    for outcome in _STEPS:
        state = session.run(by_rule, {finite: outcome, **dict(zip(before, state, strict=True))})
        assert session.run(after, {finite: outcome}) == state
        scales.append(float(state.loss_scale))
    assert min(scales) < max(scales)


@_each(_WITH_STATE)
def test_checkpoint_saves_and_restores_the_eager_state(
    make_manager: Callable[[], tfmp.LossScaleManager], tmp_path: Path
) -> None:
    manager, restored = make_manager(), make_manager()
    for finite in _STEPS[:3]:
        _update(manager, finite)
        manager.note_step(tf.constant(finite), tf.constant(finite))
    assert _state(manager) != _state(restored)
    path = tf.train.Checkpoint(manager=manager).save(tmp_path / "checkpoint")
    tf.train.Checkpoint(manager=restored).restore(path).assert_consumed()
    assert {name for name, _ in tf.train.list_variables(path) if name.startswith("manager")} == {
        f"manager/state/values/{field}/.ATTRIBUTES/VARIABLE_VALUE" for field in manager.state.read()._fields
    }
    assert _state(restored) == _state(manager)


@_each(_WITH_STATE)
def test_state_dict_moves_the_state_to_another_manager(make_manager: Callable[[], tfmp.LossScaleManager]) -> None:
    manager, restored = make_manager(), make_manager()
    for finite in _STEPS[:5]:
        _update(manager, finite)
    assert manager.state_dict() == dict(zip(manager.state.read()._fields, _state(manager), strict=True))
    restored.load_state_dict(manager.state_dict())
    assert _state(restored) == _state(manager) != _state(make_manager())


@pytest.mark.graph
@_each(_WITH_STATE)
def test_saver_saves_the_state_of_a_graph(
    make_manager: Callable[[], tfmp.LossScaleManager], session: tf.compat.v1.Session, tmp_path: Path
) -> None:
    manager = make_manager()
    steps = [_update(manager, False), manager.note_step(tf.constant(False), tf.constant(False))]
    session.run(tf.compat.v1.global_variables_initializer())
    session.run(steps)
    path = tf.compat.v1.train.Saver().save(session, str(tmp_path / "model.ckpt"))
    saved = dict(zip(manager.state.read()._fields, session.run(manager.state.read()), strict=True))
    assert {name: tf.train.load_variable(path, name) for name, _ in tf.train.list_variables(path)} == saved


@_each(_WITH_STATE)
def test_store_in_moves_the_current_state_into_new_variables(make_manager: Callable[[], tfmp.LossScaleManager]) -> None:
    manager = make_manager()
    _update(manager, False)
    manager.note_step(tf.constant(False))
    made = {}

    def add_variable(name: str, initial_value: np.generic) -> tf.Variable:
        made[name] = tf.Variable(initial_value, trainable=False)
        return made[name]

    before = manager.state.read()._asdict()
    manager.store_in(add_variable)
    assert {name: variable.numpy().item() for name, variable in made.items()} == {
        **{name: value.numpy().item() for name, value in before.items()},
        **{"applied_steps": 0, "skipped_steps": 1, "consecutive_skipped_steps": 1, "last_step_applied": False},
    }
    for _ in range(4):
        _update(manager, False)
    assert float(made["loss_scale"]) == float(manager.get_loss_scale()) < 8


@_each(_WITH_STATE)
@pytest.mark.parametrize("restored", [0.0, math.inf, math.nan])
@pytest.mark.parametrize("finite", [True, False])
def test_invalid_restored_scale_is_corrected_by_the_next_step(
    make_manager: Callable[[], tfmp.LossScaleManager], restored: float, finite: bool
) -> None:
    manager = make_manager()
    manager.state.create().loss_scale.assign(restored)
    _update(manager, finite)
    highest = manager.get_config()["max_loss_scale"] or float(np.finfo(np.float32).max)
    assert manager.lowest_loss_scale <= float(manager.get_loss_scale()) <= highest


def test_missing_get_config_raises_an_error() -> None:
    with pytest.raises(NotImplementedError, match="_Legacy has no get_config, which saving a model needs"):
        _Legacy().get_config()


@_each(_WITH_CONFIG)
def test_from_config_of_get_config_makes_the_same_manager(make_manager: Callable[[], tfmp.LossScaleManager]) -> None:
    manager = make_manager()
    again = type(manager).from_config(manager.get_config())
    assert again.get_config() == manager.get_config()
    if not isinstance(manager, tfmp.FixedLossScaleManager):
        for finite in _STEPS:
            _update(manager, finite)
            _update(again, finite)
        assert _state(again) == _state(manager)


@_each(_WITH_CONFIG)
def test_settings_can_be_read_and_not_be_changed(make_manager: Callable[[], tfmp.LossScaleManager]) -> None:
    manager = make_manager()
    config = manager.get_config()
    assert {name: getattr(manager, name) for name in config} == config
    for name in config:
        with pytest.raises(
            AttributeError, match=rf"^{name} of this \w+ cannot be changed, .*: make a new manager for {name}=5.5"
        ):
            setattr(manager, name, 5.5)
    assert manager.get_config() == config


@_each(_WITH_CONFIG)
def test_misspelled_setting_is_refused_and_methods_can_be_replaced(
    make_manager: Callable[[], tfmp.LossScaleManager],
) -> None:
    manager = make_manager()
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
