"""The rule of tf.contrib and its extensions, compared with reference implementations in plain Python."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

import tfmp
from tfmp.core.managers.exponential import LossScaleState, TolerantLossScaleState

tf1 = tf.compat.v1

_LARGEST = float(np.finfo(np.float32).max)

# For each example of settings, this many sequences of outcomes run at once, each of this many steps.
_SEQUENCES, _STEPS = 24, 40


def _manager(init_loss_scale: float = 1024, **settings: Any) -> tfmp.ExponentialUpdateLossScaleManager:
    defaults = {"incr_every_n_steps": 3, "decr_every_n_nan_or_inf": 1, "decr_ratio": 0.5}
    return tfmp.ExponentialUpdateLossScaleManager(init_loss_scale, **defaults | settings)


def _states(manager: tfmp.ExponentialUpdateLossScaleManager, outcomes: np.ndarray) -> list[list[np.ndarray]]:
    """Return the state after each step. The first axis of `outcomes` is the step; further axes are sequences."""
    shape = outcomes.shape[1:]
    state = manager.state.read()
    state = type(state)(*(tf.fill(shape, field) for field in state))
    after = []
    for finite in outcomes:
        state = manager.next_state(state, tf.constant(finite))
        after.append([field.numpy() for field in state])
    return after


def _scales(manager: tfmp.ExponentialUpdateLossScaleManager, outcomes: list[bool]) -> list[float]:
    return [float(scale) for scale, *_ in _states(manager, np.array(outcomes))]


def _documented_step(state: list[Any], finite: bool, rule: dict[str, Any]) -> list[Any]:
    """Return the state after a step by the rule in the class docstring, computed with NumPy in float32."""
    scale, good, bad, steps = state
    forgiving = 1 - rule["hysteresis"]
    steps += 1
    if finite:
        good += 1
        bad = forgiving if rule["consecutive_hysteresis"] else bad
        if good >= rule["incr_every_n_steps"]:
            with np.errstate(over="ignore"):
                grown = scale * np.float32(rule["incr_ratio"])
            if rule["max_loss_scale"] is not None:
                scale = min(grown, np.float32(rule["max_loss_scale"]))
            elif np.isfinite(grown):
                scale = grown
            return [scale, 0, forgiving, 0]
        return [scale, good, bad, steps]
    bad += 1
    if bad >= rule["decr_every_n_nan_or_inf"] and bad / steps >= rule["tolerance"]:
        return [max(np.float32(rule["min_loss_scale"]), scale * np.float32(rule["decr_ratio"])), 0, 0, 0]
    return [scale, 0, bad, steps]


@st.composite
def _rules(draw: st.DrawFn) -> dict[str, Any]:
    lowest, first, highest = sorted(draw(st.floats(2.0**-126, _LARGEST, width=32)) for _ in range(3))
    if draw(st.booleans()):
        lowest, first = min(lowest, 1.0), max(first, 1.0)
    return {
        "init_loss_scale": first,
        "min_loss_scale": lowest,
        "max_loss_scale": draw(st.sampled_from([None, max(first, highest)])),
        "incr_every_n_steps": draw(st.integers(1, 4)),
        "decr_every_n_nan_or_inf": draw(st.integers(1, 3)),
        "incr_ratio": draw(st.floats(1.0625, 1e6, width=32)),
        "decr_ratio": draw(st.floats(2.0**-20, 0.9375, width=32)),
        "hysteresis": draw(st.integers(1, 3)),
        "consecutive_hysteresis": draw(st.booleans()),
        "tolerance": draw(st.sampled_from([0, 0, 0.05, 1 / 3, 0.5, 0.9])),
    }


@settings(max_examples=50)
@given(rule=_rules(), seed=st.integers(0, 2**32 - 1))
def test_rule_is_that_of_the_docstring(rule: dict[str, Any], seed: int) -> None:
    rng = np.random.default_rng(seed)
    outcomes = rng.random([_STEPS, _SEQUENCES]) < rng.random(_SEQUENCES)
    first = [np.float32(rule["init_loss_scale"]), 0, 1 - rule["hysteresis"], 0]
    expected = [first] * _SEQUENCES
    for finite, state in zip(outcomes, _states(tfmp.ExponentialUpdateLossScaleManager(**rule), outcomes), strict=True):
        expected = [_documented_step(*each, rule) for each in zip(expected, finite, strict=True)]
        assert np.array_equal(state, np.array(expected, np.float64).T[: len(state)])
        highest = _LARGEST if rule["max_loss_scale"] is None else rule["max_loss_scale"]
        assert np.all((rule["min_loss_scale"] <= state[0]) & (state[0] <= highest))


def _deepspeed(outcomes: np.ndarray, window: int, hysteresis: int, consecutive: bool) -> list[float]:
    """Return the scales of DeepSpeed's rule, which starts from 1024, doubles and halves, and never goes below 1.

    If it is not consecutive, it is Megatron's rule too.
    """
    scale, left, last_overflow, scales = 1024.0, hysteresis, -1, []
    for step, finite in enumerate(outcomes):
        if not finite:
            last_overflow = step
            if left == 1:
                scale = max(scale / 2, 1.0)
            else:
                left -= 1
        else:
            grows = (step - last_overflow) % window == 0
            left = hysteresis if consecutive or grows else left
            scale = scale * 2 if grows else scale
        scales.append(scale)
    return scales


@pytest.mark.parametrize("window", [1, 3])
@pytest.mark.parametrize("hysteresis", [1, 2, 4])
def test_hysteresis_gives_the_scales_of_deepspeed_and_megatron(window: int, hysteresis: int) -> None:
    rng = np.random.default_rng(window)
    outcomes = rng.random([60, 100]) < np.linspace(0.05, 0.95, 100)
    for consecutive in (False, True):
        manager = _manager(incr_every_n_steps=window, hysteresis=hysteresis, consecutive_hysteresis=consecutive)
        ours = np.array([scale for scale, *_ in _states(manager, outcomes)]).T
        theirs = [_deepspeed(sequence, window, hysteresis, consecutive) for sequence in outcomes.T]
        assert np.array_equal(ours, theirs)


def _fairseq(outcomes: np.ndarray, window: int, tolerance: float) -> list[float]:
    """Return the scales of fairseq's rule, which starts from 1024, doubles and halves, and never goes below 1.

    There is one difference: when the scale grows, fairseq resets only the count of steps. Here, as in tfmp, growth
    resets the count of overflows too.
    """
    scale, last_overflow, last_rescale, overflows, scales = 1024.0, -1, -1, 0, []
    for step, finite in enumerate(outcomes):
        if not finite:
            last_overflow, overflows = step, overflows + 1
            if overflows / (step - last_rescale) >= tolerance:
                scale, last_rescale, overflows = max(scale / 2, 1.0), step, 0
        elif (step - last_overflow) % window == 0:
            scale, last_rescale, overflows = scale * 2, step, 0
        scales.append(scale)
    return scales


@pytest.mark.parametrize("tolerance", [0.05, 0.25, 0.5])
def test_tolerance_gives_the_scales_of_fairseq(tolerance: float) -> None:
    # Shares of finite steps from 0.3 to 0.98: with a window of 8 steps, the scale both grows and shrinks.
    outcomes = np.random.default_rng(1).random([80, 100]) < np.linspace(0.3, 0.98, 100)
    ours = [scale for scale, *_ in _states(_manager(incr_every_n_steps=8, tolerance=tolerance), outcomes)]
    theirs = [_fairseq(sequence, 8, tolerance) for sequence in outcomes.T]
    assert np.array_equal(np.array(ours).T, theirs)
    assert len(np.unique(theirs)) > 4


def test_overflow_share_equal_to_the_tolerance_lowers_the_scale() -> None:
    manager = _manager(incr_every_n_steps=1000, tolerance=0.05)
    assert _scales(manager, [True] * 19 + [False])[-1] == 512
    assert _scales(manager, [True] * 20 + [False])[-1] == 1024


@pytest.mark.graph
@pytest.mark.parametrize("tolerance", [0, 0.5])
def test_only_a_tolerance_makes_a_fourth_variable(session: tf1.Session, tolerance: float) -> None:
    _manager(hysteresis=2, min_loss_scale=0.5, tolerance=tolerance)
    names = {variable.op.name.removesuffix("/value") for variable in tf1.global_variables()}
    fields = TolerantLossScaleState._fields if tolerance else LossScaleState._fields
    assert names == set(fields)
    session.run(tf1.global_variables_initializer())
    assert session.run(["loss_scale:0", "bad_steps:0"]) == [1024, -1]


def test_scale_stops_at_its_bounds() -> None:
    assert _scales(_manager(4, decr_ratio=0.3), [False] * 3)[1:] == [1, 1]
    assert _scales(_manager(1, min_loss_scale=0.25), [False] * 4) == [0.5, 0.25, 0.25, 0.25]
    rising = {"incr_every_n_steps": 1, "incr_ratio": 4}
    assert _scales(_manager(2.0**126, **rising), [True] * 3) == [2.0**126] * 3
    assert _scales(_manager(max_loss_scale=6000, **rising), [True] * 2) == [4096, 6000]


_MEANT = {0.0: 2, -math.inf: 2, math.nan: 1024, math.inf: 4096, 1.0: 2, 1e39: 4096, 512.0: 512}


@pytest.mark.parametrize("tolerance", [0, 0.5])
def test_restored_scale_and_that_of_another_program_are_brought_within_the_bounds(tolerance: float) -> None:
    manager = _manager(min_loss_scale=2, max_loss_scale=4096, tolerance=tolerance)
    for loss_scale, meant in _MEANT.items():
        manager.state.create().loss_scale.assign(math.inf if loss_scale > _LARGEST else loss_scale)
        manager.update_loss_scale(tf.constant(True))
        assert float(manager.get_loss_scale()) == meant
        assert manager.continue_from(loss_scale, good_steps=1) is None
        assert [int(field) for field in manager.state.read()] == [meant, 1, 0, *[0] * bool(tolerance)]


@pytest.mark.graph
@pytest.mark.parametrize("bad_steps", [-1, 0, 1])
def test_continue_from_returns_an_op_in_a_graph(session: tf1.Session, bad_steps: int) -> None:
    manager = _manager(hysteresis=2, tolerance=0.5)
    set_state = manager.continue_from(math.nan, good_steps=1, bad_steps=bad_steps)
    session.run(tf1.global_variables_initializer())
    session.run(manager.update_loss_scale(tf.constant(False)))
    session.run(set_state)
    assert list(session.run(manager.state.read())) == [1024, 1, bad_steps, 0]


#: Makes of a number what may be passed as a scale.
_FORMS: dict[str, Callable[[float], Any]] = {
    "float": float,
    "numpy": np.float64,
    "array": lambda number: np.array([number]),
    "tensor": tf.constant,
    "float64 tensor": lambda number: tf.constant(number, tf.float64),
}


@pytest.mark.parametrize("form", _FORMS.values(), ids=_FORMS)
def test_scale_within_the_bounds_is_set_and_the_counts_stay(form: Callable[[float], Any]) -> None:
    manager = _manager(min_loss_scale=2, max_loss_scale=4096, hysteresis=2)
    manager.update_loss_scale(tf.constant(True))
    for loss_scale in (2.0, 3.0, 4096.0):
        assert manager.set_loss_scale(form(loss_scale)) is None
        assert [float(field) for field in manager.state.read()] == [loss_scale, 1, -1]
    for bad, message in {
        1.5: r"loss_scale must be a float32 number of at least 2, got 1\.5",
        4097.0: r"loss_scale must not be greater than max_loss_scale, got 4097\.0\.",
        math.inf: r"loss_scale must be finite, got inf\.",
        math.nan: r"loss_scale must be finite, got nan\.",
    }.items():
        with pytest.raises(ValueError, match=f"^{message}"):
            manager.set_loss_scale(form(bad))
    assert float(manager.get_loss_scale()) == 4096


@pytest.mark.graph
def test_scale_that_a_graph_computes_is_checked_when_it_is_known(session: tf1.Session) -> None:
    manager = _manager(min_loss_scale=2, max_loss_scale=4096)
    given = tf1.placeholder(tf.float64, [])
    set_scale = manager.set_loss_scale(given)
    session.run(tf1.global_variables_initializer())
    for loss_scale in (2, 3, 4096):
        session.run(set_scale, {given: loss_scale})
        assert session.run(manager.get_loss_scale()) == loss_scale
    for bad in (1.5, 4097, math.inf, math.nan):
        with pytest.raises(tf.errors.InvalidArgumentError, match=r"\[the new loss scale is not within the manager"):
            session.run(set_scale, {given: bad})
    assert session.run(manager.get_loss_scale()) == 4096


@pytest.mark.graph
@pytest.mark.parametrize("form", [float, tf.constant], ids=["number", "tensor"])
def test_scale_is_set_after_what_it_depends_on(form: Callable[[float], Any], session: tf1.Session) -> None:
    manager = _manager()
    before = tf1.get_variable("before", initializer=0, use_resource=True)
    with tf.control_dependencies([before.assign(1)]):
        set_scale = manager.set_loss_scale(form(16.0))
    session.run(tf1.global_variables_initializer())
    session.run(set_scale)
    assert session.run([before, manager.get_loss_scale()]) == [1, 16]
