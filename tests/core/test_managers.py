import math
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

import tfmp
from tfmp.core.managers import LossScaleState
from tfmp.core.outcomes import LossScaleStatus, StepOutcomes


class _Legacy(tfmp.LossScaleManager):
    """As scripts wrote them for tf.contrib: no call of the base class' constructor."""

    def __init__(self) -> None:
        self.seen: list[tf.Tensor] = []

    def get_loss_scale(self) -> tf.Tensor:
        return tf.constant(8.0)

    def update_loss_scale(self, finite_grads: tf.Tensor) -> tf.Operation:
        self.seen = [*self.seen, finite_grads]
        return tf.no_op()


_MANAGERS: dict[str, Callable[[], tfmp.LossScaleManager]] = {
    "fixed": lambda: tfmp.FixedLossScaleManager(8),
    "exponential": lambda: tfmp.ExponentialUpdateLossScaleManager(8, 100),
    "legacy": _Legacy,
}


@pytest.fixture(params=_MANAGERS.values(), ids=_MANAGERS)
def manager(request: pytest.FixtureRequest) -> tfmp.LossScaleManager:
    return request.param()


def test_every_manager_gives_a_float32_scalar(manager: tfmp.LossScaleManager) -> None:
    scale = manager.get_loss_scale()
    assert (scale.dtype, scale.shape, float(scale)) == (tf.float32, [], 8)


def test_every_manager_counts_steps(manager: tfmp.LossScaleManager) -> None:
    for finite in [True, False, True, False, False]:
        manager.update_loss_scale(tf.constant(finite))
        manager.note_step(tf.constant(finite))
    outcomes = manager.get_step_outcomes()
    assert outcomes == StepOutcomes(
        applied_steps=2, skipped_steps=3, consecutive_skipped_steps=2, last_step_finite=False
    )
    assert [field.dtype for field in outcomes] == [tf.int64, tf.int64, tf.int64, tf.bool]


@pytest.mark.graph
@pytest.mark.parametrize("make_manager", _MANAGERS.values(), ids=_MANAGERS)
def test_every_manager_works_in_a_graph_it_was_not_made_in(make_manager: Callable[[], tfmp.LossScaleManager]) -> None:
    manager = make_manager()
    for _ in range(2):
        with tf.Graph().as_default(), tf.compat.v1.Session() as session:
            finite = tf.compat.v1.placeholder(tf.bool, [])
            step = [manager.update_loss_scale(finite), manager.note_step(finite)]
            watched = [manager.get_loss_scale(), *manager.get_step_outcomes()]
            session.run(tf.compat.v1.global_variables_initializer())
            assert session.run(watched) == [8, 0, 0, 0, True]
            session.run(step, {finite: True})
            session.run(step, {finite: False})
            assert session.run(watched) == [8, 1, 1, 1, False]


def test_every_manager_tells_its_status_anew_in_eager_code_and_in_functions(manager: tfmp.LossScaleManager) -> None:
    asked_in_function = tf.function(manager.get_status)
    for finite in [True, False, False]:
        manager.note_step(tf.constant(finite))
        assert manager.get_status() == asked_in_function()
    assert manager.get_status() == LossScaleStatus(
        loss_scale=8,
        last_step_finite=False,
        attempted_steps=3,
        applied_steps=1,
        skipped_steps=2,
        consecutive_skipped_steps=2,
    )


@pytest.mark.graph
@pytest.mark.parametrize("make_manager", _MANAGERS.values(), ids=_MANAGERS)
def test_asking_a_graph_for_the_status_again_does_not_grow_it(
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


def _reference(state: tuple[np.float32, int, int], finite: bool, rule: dict[str, Any]) -> tuple[np.float32, int, int]:
    """The rule of the docstring, in NumPy's float32."""
    scale, good, bad = state
    if finite:
        good += 1
        if good >= rule["incr_every_n_steps"]:
            with np.errstate(over="ignore"):
                grown = scale * np.float32(rule["incr_ratio"])
            return (grown if np.isfinite(grown) else scale), 0, 0
        return scale, good, bad
    bad += 1
    if bad >= rule["decr_every_n_nan_or_inf"]:
        return max(np.float32(1), scale * np.float32(rule["decr_ratio"])), 0, 0
    return scale, 0, bad


_RULES = st.fixed_dictionaries(
    {
        "init_loss_scale": st.floats(1, float(np.finfo(np.float32).max), width=32),
        "incr_every_n_steps": st.integers(1, 4),
        "decr_every_n_nan_or_inf": st.integers(1, 3),
        "incr_ratio": st.floats(1.0625, 1e6, width=32),
        "decr_ratio": st.floats(2.0**-20, 0.9375, width=32),
    }
)


@settings(max_examples=60, deadline=None)
@given(rule=_RULES, steps=st.lists(st.booleans(), max_size=30))
def test_exponential_rule_is_the_documented_one(rule: dict[str, Any], steps: list[bool]) -> None:
    manager = tfmp.ExponentialUpdateLossScaleManager(**rule)
    expected = np.float32(rule["init_loss_scale"]), 0, 0
    state = LossScaleState(*map(tf.constant, expected))
    for finite in steps:
        expected = _reference(expected, finite, rule)
        state = manager.next_state(state, tf.constant(finite))
        assert tuple(field.numpy() for field in state) == expected
        assert 1 <= float(state.loss_scale) < math.inf


def test_bad_steps_are_not_reset_by_finite_ones() -> None:
    manager = tfmp.ExponentialUpdateLossScaleManager(1024, 1000, decr_every_n_nan_or_inf=2, decr_ratio=0.5)
    for finite in [False, True, True, False]:
        manager.update_loss_scale(tf.constant(finite))
    assert float(manager.get_loss_scale()) == 512


def test_scale_stays_at_its_floor_and_below_infinity() -> None:
    sinking = tfmp.ExponentialUpdateLossScaleManager(4, 1, decr_every_n_nan_or_inf=1, decr_ratio=0.3)
    rising = tfmp.ExponentialUpdateLossScaleManager(2.0**126, 1, incr_ratio=4)
    for _ in range(5):
        sinking.update_loss_scale(tf.constant(False))
        rising.update_loss_scale(tf.constant(True))
    assert float(sinking.get_loss_scale()) == 1
    assert float(rising.get_loss_scale()) == 2.0**126


def test_eager_state_is_saved_by_a_checkpoint(tmp_path: Any) -> None:
    manager = tfmp.ExponentialUpdateLossScaleManager(1024, 1000, decr_every_n_nan_or_inf=2, decr_ratio=0.5)
    for _ in range(3):
        manager.update_loss_scale(tf.constant(False))
    path = tf.train.Checkpoint(manager=manager).save(tmp_path / "checkpoint")
    restored = tfmp.ExponentialUpdateLossScaleManager(1024, 1000, decr_every_n_nan_or_inf=2, decr_ratio=0.5)
    tf.train.Checkpoint(manager=restored).restore(path).assert_consumed()
    assert {name for name, _ in tf.train.list_variables(path) if name.startswith("manager")} == {
        f"manager/state/values/{field}/.ATTRIBUTES/VARIABLE_VALUE" for field in LossScaleState._fields
    }
    assert [int(field) for field in restored.state.read()] == [512, 0, 1]


@pytest.mark.graph
@pytest.mark.parametrize("bad", [0, 0.5, -8, math.inf, math.nan, 1e39])
def test_scale_out_of_range_is_refused(bad: float) -> None:
    with pytest.raises(ValueError, match=rf"^loss_scale must be .*got {re.escape(repr(bad))}\.$"):
        tfmp.FixedLossScaleManager(bad)
    with pytest.raises(ValueError, match=rf"^init_loss_scale must be .*got {re.escape(repr(bad))}\.$"):
        tfmp.ExponentialUpdateLossScaleManager(bad, 10)


@pytest.mark.graph
@pytest.mark.parametrize(
    ("name", "bad", "message"),
    [
        ("incr_every_n_steps", 0, "a whole number from 1 to .*, got 0"),
        ("incr_every_n_steps", 2.5, "a whole number from 1 to .*, got 2.5"),
        ("incr_every_n_steps", 2**31, "a whole number from 1 to .*, got 2147483648"),
        ("decr_every_n_nan_or_inf", -1, "a whole number from 1 to .*, got -1"),
        ("incr_ratio", 1, "greater than 1, got 1"),
        ("incr_ratio", 0.5, "greater than 1, got 0.5"),
        ("incr_ratio", math.inf, "finite, got inf"),
        ("decr_ratio", 1, "between 0 and 1, got 1"),
        ("decr_ratio", 0, "between 0 and 1, got 0"),
        ("decr_ratio", 2, "between 0 and 1, got 2"),
        ("decr_ratio", math.nan, "finite, got nan"),
    ],
)
def test_setting_out_of_range_is_refused(name: str, bad: float, message: str) -> None:
    with pytest.raises(ValueError, match=rf"^{name} must (be|lie) {message}"):
        tfmp.ExponentialUpdateLossScaleManager(**{"init_loss_scale": 8, "incr_every_n_steps": 10, name: bad})


@pytest.mark.graph
@pytest.mark.parametrize("bad", [None, "8", True, [8]])
def test_setting_that_is_no_number_is_refused(bad: Any) -> None:
    with pytest.raises(TypeError, match=r"^loss_scale must be a number, got .* of type "):
        tfmp.FixedLossScaleManager(bad)


def test_numpy_numbers_are_numbers() -> None:
    manager = tfmp.ExponentialUpdateLossScaleManager(np.float32(8), np.int64(10), incr_ratio=np.float64(4))
    assert float(manager.get_loss_scale()) == 8


def test_host_takes_over_the_present_state() -> None:
    manager = tfmp.ExponentialUpdateLossScaleManager(1024, 1000, decr_every_n_nan_or_inf=1, decr_ratio=0.5)
    manager.update_loss_scale(tf.constant(False))
    manager.note_step(tf.constant(False))
    made = {}

    def add_variable(name: str, initial_value: np.generic) -> tf.Variable:
        made[name] = tf.Variable(initial_value, trainable=False)
        return made[name]

    manager.store_in(add_variable)
    assert {name: variable.numpy().item() for name, variable in made.items()} == {
        **{"loss_scale": 512, "good_steps": 0, "bad_steps": 0},
        **{"applied_steps": 0, "skipped_steps": 1, "consecutive_skipped_steps": 1, "last_step_finite": False},
    }
    manager.update_loss_scale(tf.constant(False))
    assert float(made["loss_scale"]) == float(manager.get_loss_scale()) == 256


def test_manager_that_cannot_be_saved_says_so() -> None:
    with pytest.raises(NotImplementedError, match="_Legacy has no get_config, which saving a model needs"):
        _Legacy().get_config()


@pytest.mark.parametrize(
    "manager",
    [tfmp.FixedLossScaleManager(8), tfmp.ExponentialUpdateLossScaleManager(8, 10, 3, 4, 0.25)],
    ids=["fixed", "exponential"],
)
def test_config_makes_the_same_manager_again(manager: tfmp.LossScaleManager) -> None:
    again = type(manager).from_config(manager.get_config())
    assert again.get_config() == manager.get_config()
