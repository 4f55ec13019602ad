"""The rule of tf.contrib and its extensions, compared with the oracle and with the rules of other systems."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st
from kit import oracle
from kit.strategies import RULES

import tfmp

tf1 = tf.compat.v1

_LARGEST = float(np.finfo(np.float32).max)


def _manager(init_loss_scale: float = 1024, **settings: Any) -> tfmp.ExponentialUpdateLossScaleManager:
    defaults = {"incr_every_n_steps": 3, "decr_every_n_nan_or_inf": 1, "decr_ratio": 0.5}
    return tfmp.ExponentialUpdateLossScaleManager(init_loss_scale, **defaults | settings)


def _scales(manager: tfmp.ExponentialUpdateLossScaleManager, outcomes: np.ndarray | Sequence[bool]) -> np.ndarray:
    """Return the scale after each step. The first axis of `outcomes` is the step; further axes are sequences."""
    outcomes, state = np.array(outcomes), manager.state.read()
    state = type(state)(*(tf.fill(outcomes.shape[1:], field) for field in state))
    scales = []
    for finite in outcomes:
        state = manager.next_state(state, tf.constant(finite))
        scales.append(state.loss_scale.numpy())
    return np.array(scales)


@settings(max_examples=50)
@given(rule=RULES, seed=st.integers(0, 2**32 - 1))
def test_rule_is_that_of_the_oracle(rule: oracle.Rule, seed: int) -> None:
    rng = np.random.default_rng(seed)
    outcomes = rng.random([40, 24]) < rng.random(24)
    expected = [oracle.scales(~sequence, rule)[1:] for sequence in outcomes.T]
    assert np.array_equal(_scales(tfmp.ExponentialUpdateLossScaleManager(**rule._asdict()), outcomes).T, expected)


def _of_deepspeed(
    outcomes: np.ndarray, incr_every_n_steps: int, hysteresis: int, consecutive_hysteresis: bool
) -> list[float]:
    """Return the scales of DeepSpeed's rule; if the hysteresis is not consecutive, it is Megatron's rule too."""
    scale, left, last_overflow, scales = 1024.0, hysteresis, -1, []
    for step, finite in enumerate(outcomes):
        if not finite:
            last_overflow = step
            if left == 1:
                scale = max(scale / 2, 1.0)
            else:
                left -= 1
        else:
            grows = (step - last_overflow) % incr_every_n_steps == 0
            left = hysteresis if consecutive_hysteresis or grows else left
            scale = scale * 2 if grows else scale
        scales.append(scale)
    return scales


def _of_fairseq(outcomes: np.ndarray, incr_every_n_steps: int, tolerance: float) -> list[float]:
    """Return the scales of fairseq's rule.

    There is one difference: when the scale grows, fairseq resets only the count of steps. Here, as in tfmp, growth
    resets the count of overflows too.
    """
    scale, last_overflow, last_rescale, overflows, scales = 1024.0, -1, -1, 0, []
    for step, finite in enumerate(outcomes):
        if not finite:
            last_overflow, overflows = step, overflows + 1
            if overflows / (step - last_rescale) >= tolerance:
                scale, last_rescale, overflows = max(scale / 2, 1.0), step, 0
        elif (step - last_overflow) % incr_every_n_steps == 0:
            scale, last_rescale, overflows = scale * 2, step, 0
        scales.append(scale)
    return scales


@pytest.mark.parametrize(
    ("theirs", "given_"),
    [
        *(
            (_of_deepspeed, {"incr_every_n_steps": window, "hysteresis": steps, "consecutive_hysteresis": consecutive})
            for window in (1, 3)
            for steps in (1, 2, 4)
            for consecutive in (False, True)
        ),
        *((_of_fairseq, {"incr_every_n_steps": 8, "tolerance": tolerance}) for tolerance in (0.05, 0.25, 0.5)),
    ],
)
def test_scales_are_those_of_other_systems(theirs: Callable[..., list[float]], given_: dict[str, Any]) -> None:
    # The share of finite steps grows from sequence to sequence: the scale both grows and shrinks.
    outcomes = np.random.default_rng(1).random([80, 100]) < np.linspace(0.05, 0.98, 100)
    expected = [theirs(sequence, **given_) for sequence in outcomes.T]
    assert np.array_equal(_scales(_manager(**given_), outcomes).T, expected)
    assert len(np.unique(expected)) > 4


_RISING = {"incr_every_n_steps": 1, "incr_ratio": 4}


@pytest.mark.parametrize(
    ("first", "given_", "outcomes", "expected"),
    [
        # A share of overflows that equals the tolerance lowers the scale.
        (1024, {"incr_every_n_steps": 1000, "tolerance": 0.05}, [True] * 19 + [False], [512]),
        (1024, {"incr_every_n_steps": 1000, "tolerance": 0.05}, [True] * 20 + [False], [1024]),
        # The scale is computed in float32, and stops at its bounds.
        (4, {"decr_ratio": 0.3}, [False] * 3, [np.float32(4) * np.float32(0.3), 1, 1]),
        (1, {"min_loss_scale": 0.25}, [False] * 4, [0.5, 0.25, 0.25, 0.25]),
        (2.0**126, _RISING, [True] * 3, [2.0**126] * 3),
        (1024, {"max_loss_scale": 6000, **_RISING}, [True] * 2, [4096, 6000]),
    ],
)
def test_scale_is_exact_at_the_edges(first: float, given_: dict[str, Any], outcomes: Any, expected: Any) -> None:
    assert _scales(_manager(first, **given_), outcomes)[-len(expected) :].tolist() == expected


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


#: Makes of a number what may be passed as a scale.
_FORMS: dict[str, Callable[[float], Any]] = {
    "float": float,
    "numpy": np.float64,
    "array": lambda number: np.array([number]),
    "tensor": tf.constant,
    "float64 tensor": lambda number: tf.constant(number, tf.float64),
}
_REFUSED = {
    1.5: r"loss_scale must be a float32 number of at least 2, got 1\.5",
    4097.0: r"loss_scale must not be greater than max_loss_scale, got 4097\.0\.",
    math.inf: r"loss_scale must be finite, got inf\.",
    math.nan: r"loss_scale must be finite, got nan\.",
}


@pytest.mark.parametrize("form", _FORMS.values(), ids=_FORMS)
def test_scale_within_the_bounds_is_set_and_the_counts_stay(form: Callable[[float], Any]) -> None:
    manager = _manager(min_loss_scale=2, max_loss_scale=4096, hysteresis=2)
    manager.update_loss_scale(tf.constant(True))
    for loss_scale in (2.0, 3.0, 4096.0):
        assert manager.set_loss_scale(form(loss_scale)) is None
        assert [float(field) for field in manager.state.read()] == [loss_scale, 1, -1]
    for bad, message in _REFUSED.items():
        with pytest.raises(ValueError, match=f"^{message}"):
            manager.set_loss_scale(form(bad))
    assert float(manager.get_loss_scale()) == 4096


@pytest.mark.graph
@pytest.mark.parametrize("form", [float, tf.constant, None], ids=["number", "tensor", "fed"])
def test_scale_of_a_graph_is_set_and_checked_when_it_is_known(form: Any, session: tf1.Session) -> None:
    manager, fed = _manager(min_loss_scale=2, max_loss_scale=4096), tf1.placeholder(tf.float64, [])
    before = tf1.get_variable("before", initializer=0, use_resource=True)
    with tf.control_dependencies([before.assign(1)]):
        set_scale = manager.set_loss_scale(fed if form is None else form(16.0))
    session.run(tf1.global_variables_initializer())
    for loss_scale in (2, 3, 4096, 16):
        session.run(set_scale, {fed: loss_scale})
        assert session.run([before, manager.get_loss_scale()]) == [1, loss_scale if form is None else 16]
    for bad in _REFUSED if form is None else ():
        with pytest.raises(tf.errors.InvalidArgumentError, match=r"\[the new loss scale is not within the manager"):
            session.run(set_scale, {fed: bad})
    assert session.run(manager.get_loss_scale()) == 16
