"""Tests that every manager must pass, with every setting, and what the base class gives one that has no rule.

For a new manager, add a row to the tables below.
"""

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


@_each(_MANAGERS)
def test_scale_shrinks_after_skips_per_backoff_down_to_the_lowest(make: Make, request: pytest.FixtureRequest) -> None:
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
def test_every_manager_works_in_graphs_other_than_its_own_and_its_status_is_read_once(make: Make) -> None:
    manager = make()
    for _ in range(2):
        with tf.Graph().as_default() as graph, tf1.Session() as session:
            finite, watched = tf1.placeholder(tf.bool, []), list(manager.get_status())
            step = [_update(manager, finite), manager.note_step(finite, finite)]
            with tf.control_dependencies(step):
                after = manager.get_status()
            session.run(tf1.global_variables_initializer())
            graph.finalize()
            assert all(again is tensor for again, tensor in zip(manager.get_status(), watched, strict=True))
            assert session.run(watched) == [8, True, True, 0, 0, 0, 0]
            assert session.run(after, {finite: True}).attempted_steps == 1
            session.run(step, {finite: False})
            assert session.run(watched)[1:] == [False, False, 2, 1, 1, 1]


@_each(_WITH_STATE)
def test_state_evolves_alike_in_functions_and_eager_mode(make: Make) -> None:
    eager, traced, scales = make(), make(), []

    @tf.function
    def update(finite: tf.Tensor) -> None:
        _update(traced, finite)

    for finite in _STEPS:
        _update(eager, finite)
        update(tf.constant(finite))
        assert _state(traced) == _state(eager)
        scales.append(float(eager.get_loss_scale()))
    assert min(scales) < max(scales)


@pytest.mark.graph
@_each(_WITH_STATE)
def test_variables_of_a_graph_follow_next_state_and_are_saved(make: Make, session: tf1.Session, tmp_path: Path) -> None:
    manager = make()
    finite = tf1.placeholder(tf.bool, [])
    _, update = [_update(manager, finite) for _ in range(2)]
    # Each update takes the name of a conditional: the names of variables that are made later depend on it, and so the
    # keys of old checkpoints.
    with tf1.name_scope("cond") as scope:
        assert scope == "cond_2/"
    with tf.control_dependencies([update, manager.note_step(finite, finite)]):
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
@pytest.mark.parametrize("skips", [0, 1])
def test_store_in_moves_the_current_state_into_new_variables(make: Make, skips: int) -> None:
    manager, made = make(), {}

    def skip() -> None:
        _update(manager, False)
        manager.note_step(tf.constant(False))

    def add_variable(name: str, initial_value: np.generic) -> tf.Variable:
        made[name] = tf.Variable(initial_value, trainable=False)
        return made[name]

    for _ in range(skips):
        skip()
    before = manager.state_dict()
    manager.store_in(add_variable)
    counts = {"applied_steps": 0, "skipped_steps": skips, "consecutive_skipped_steps": skips}
    found = {name: variable.numpy().item() for name, variable in made.items()}
    assert list(found.items()) == [*before.items(), *counts.items(), ("last_step_applied", not skips)]
    for _ in range(4):
        skip()
    assert float(made["loss_scale"]) == float(manager.get_loss_scale()) < 8
    assert int(made["skipped_steps"]) == int(manager.get_status().skipped_steps) == 4 + skips


@_each(_WITH_CONFIG)
def test_from_config_of_get_config_makes_the_same_manager_whose_settings_cannot_be_changed(make: Make) -> None:
    manager = make()
    config = manager.get_config()
    again = type(manager).from_config(config)
    assert again.get_config() == config == {name: getattr(manager, name) for name in config}
    for finite in _STEPS:
        _update(manager, finite)
        _update(again, finite)
    assert (again.state_dict(), again.get_loss_scale()) == (manager.state_dict(), manager.get_loss_scale())
    for name in config:
        message = rf"^{name} of this \w+ cannot be changed, .*: make a new manager for {name}=5.5"
        with pytest.raises(AttributeError, match=message):
            setattr(manager, name, 5.5)
    assert manager.get_config() == config
    with pytest.raises(AttributeError, match=r"has no incr_every_n_step, got 3: its settings are arguments of the"):
        manager.incr_every_n_step = 3
    # Methods can be replaced.
    manager.get_loss_scale = lambda: tf.constant(2.0)  # type: ignore[method-assign]
    assert float(manager.get_loss_scale()) == 2


@pytest.mark.graph
@pytest.mark.parametrize(
    ("make", "given", "state"),
    [
        (_exponential(tolerance=0.25, hysteresis=2), {"loss_scale": math.nan, "good_steps": 1}, [8, 1, 0, 0]),
        (_exponential(hysteresis=2), {"loss_scale": 16, "bad_steps": -1}, [16, 0, -1]),
        (_WITH_STATE["log max"], {"loss_scale": 100}, [128, 0, 0, 0, 0, 0]),
    ],
)
def test_continue_from_is_an_op_in_a_graph(session: tf1.Session, make: Make, given: Any, state: list[float]) -> None:
    manager = make()
    set_state = manager.continue_from(**given)
    session.run(tf1.global_variables_initializer())
    session.run(_update(manager, False))
    session.run(set_state)
    assert list(session.run(manager.state.read())) == state


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


def test_manager_that_knows_no_bounds_and_has_no_state_promises_and_saves_nothing() -> None:
    manager = _Legacy()
    assert (manager.lowest_loss_scale, manager.skips_per_backoff, manager.needs_max_abs) == (0, None, False)
    assert manager.state_dict() == {}
    manager.load_state_dict({})
    for call, error, message in [
        (lambda: manager.set_loss_scale(4.0), NotImplementedError, "the scale of a _Legacy cannot be set"),
        (manager.get_config, NotImplementedError, "_Legacy has no get_config, which saving a model needs"),
        (lambda: manager.load_state_dict({"loss_scale": 8.0}), ValueError, "a _Legacy keeps nothing, got loss_scale"),
    ]:
        with pytest.raises(error, match=message):
            call()


def test_exported_manager_counts_steps_and_dropped_micro_batches(tmp_path: Path) -> None:
    tf.saved_model.save(_Legacy(), str(tmp_path))
    loaded = tf.saved_model.load(str(tmp_path))
    loaded.step(tf.constant(False), tf.constant(False))
    status = loaded.step(tf.constant(True), tf.constant(False))
    assert LossScaleStatus(**{name: value.numpy().item() for name, value in status.items()}) == (8, 1, 0, 2, 1, 1, 0)


@pytest.mark.graph
def test_manager_shows_its_settings_and_in_eager_programs_its_state_also_while_a_function_is_traced() -> None:
    def make() -> tfmp.LossScaleManager:
        return tfmp.ExponentialUpdateLossScaleManager(8, incr_every_n_steps=2)

    assert repr(_Legacy()) == "<_Legacy()>"
    settings, shown = "<ExponentialUpdateLossScaleManager(init_loss_scale=8.0, incr_every_n_steps=2)", []
    with tf.Graph().as_default():
        assert repr(make()) == settings + ">"
    if tf1.executing_eagerly():
        manager = make()
        tf.function(lambda: shown.append(repr(manager)))()
        assert {repr(manager), *shown} == {settings + ": loss_scale=8.0, good_steps=0, bad_steps=0>"}


@pytest.mark.graph
def test_variables_are_made_after_the_settings_are_checked_and_none_for_a_constant(session: tf1.Session) -> None:
    manager = tfmp.FixedLossScaleManager(8)
    assert manager.get_loss_scale() is manager.get_loss_scale()
    assert session.run([manager.get_loss_scale(), manager.update_loss_scale(tf.constant(False))]) == [8, None]
    assert manager.lowest_loss_scale == 8
    with pytest.raises(ValueError, match=r"^init_loss_scale must be a float32 number of at least 10, got 8: "):
        _exponential(min_loss_scale=10)()
    assert tf1.global_variables() == []
    _exponential()()
    # Those of resource variables end in /value, those of reference variables do not.
    names = [variable.op.name.removesuffix("/value") for variable in tf1.global_variables()]
    assert names == ["loss_scale", "good_steps", "bad_steps"]


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "function"])
def test_what_was_read_does_not_change_with_a_later_step(compiled: bool) -> None:
    manager = tfmp.ExponentialUpdateLossScaleManager(8, 100, 1, decr_ratio=0.5, min_loss_scale=2)
    status = manager.get_status()

    def step() -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        before = manager.get_loss_scale()
        manager.update_loss_scale(tf.constant(False))
        manager.note_step(tf.constant(False))
        return before, manager.state.read().loss_scale, manager.state.get("good_steps")

    scales = [[float(each) for each in (tf.function(step) if compiled else step)()] for _ in range(2)]
    assert scales == [[8, 4, 0], [4, 2, 0]]
    assert (float(status.loss_scale), int(status.attempted_steps)) == (8, 0)
