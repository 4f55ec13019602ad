"""The rule of `LogMaxLossScaleManager`, which follows the magnitude of gradients."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

import tfmp
from tfmp.core.managers.log_max import LogMaxState

tf1 = tf.compat.v1

# For each example of settings, this many sequences run at once, each of this many steps.
_SEQUENCES, _STEPS = 64, 40


def _run(manager: tfmp.LogMaxLossScaleManager, max_abs: Any, state: LogMaxState | None = None) -> list[LogMaxState]:
    """Return the state after each step; a magnitude that is infinite or NaN is an overflow.

    The first axis of `max_abs` is the step; a second axis may hold many sequences.
    """
    max_abs = np.array(max_abs, np.float32)
    if state is None:
        state = LogMaxState(*(tf.fill(max_abs.shape[1:], field) for field in manager.state.read()))
    # Tracing takes as long as several hundred eager steps, so it only pays for many steps.
    next_state = tf.function(manager.next_state) if len(max_abs) > 500 else manager.next_state
    states = []
    for magnitude in max_abs:
        state = next_state(state, tf.constant(np.isfinite(magnitude)), tf.constant(magnitude))
        states.append(LogMaxState(*(field.numpy() for field in state)))
    return states


def _scales(max_abs: Sequence[float], **settings: Any) -> list[float]:
    return [float(state.loss_scale) for state in _run(tfmp.LogMaxLossScaleManager(**settings), max_abs)]


# The scale starts at 8. If the largest gradient is 1, it rises to 1024.
_KILO: dict[str, Any] = {"init_loss_scale": 8, "limit": 1024}


@pytest.mark.parametrize(
    ("max_abs", "bounds", "scales"),
    [
        # Of a constant magnitude, the scale is the limit divided by it.
        ([1, 1, 1], {}, [1024] * 3),
        ([0.75] * 3, {}, [1024] * 3),
        ([2**-10], {}, [2**20]),
        ([2**-10] * 2, {"max_loss_scale": 2**12}, [2**12] * 2),
        ([2**20] * 2, {}, [1] * 2),
        ([2**20] * 2, {"min_loss_scale": 2**-6}, [2**-6] * 2),
        ([2**20] * 2, {"min_loss_scale": 2**-12}, [2**-10] * 2),
        # What an overflow takes away is subtracted from the bound, although the magnitude would allow 2**30.
        ([2**-20, math.inf, 2**-20], {"max_loss_scale": 2**12}, [2**12, 2**11, 2**11]),
        # Overflows before the first finite step leave nothing to take away.
        ([*[math.inf] * 10, 1], {}, [4, 2, *[1] * 8, 1024]),
    ],
)
def test_scale_follows_the_magnitude_within_its_bounds(
    max_abs: list[float], bounds: dict[str, float], scales: list[float]
) -> None:
    assert _scales(max_abs, **bounds, **_KILO) == scales


def test_mean_and_variance_are_plain_at_first_and_moving_later() -> None:
    manager = tfmp.LogMaxLossScaleManager(mean_decay=0.5, deviation_decay=0.75)
    states = _run(manager, [2**4, 2**8, 2**8, 2**8])
    assert [float(state.log_mean) for state in states] == [4, 6, 7, 7.5]
    # The differences between x and the mean before it are 4, 2 and 1.
    np.testing.assert_allclose([state.log_variance for state in states], [0, 16, (16 + 4) / 2, (16 + 4 + 1) / 3])


def test_scale_leaves_room_for_the_deviation() -> None:
    magnitudes = [2.0**4, 2.0**8] * 100
    room = [1024 / (float(scale) * 2**8) for scale in _scales(magnitudes, min_loss_scale=2**-20, **_KILO)[100:]]
    assert min(room) >= 4
    assert max(room) <= 64
    # Without room for deviations, the scale is the limit divided by 2**mean, rounded down; the mean is just above 6.
    assert _scales(magnitudes, deviations=0, min_loss_scale=2**-20, **_KILO)[-1] == 2**3


def test_overflow_halves_the_scale_until_enough_finite_steps() -> None:
    magnitudes = [1, 1, math.inf, math.inf, *[1] * 6, 1, math.inf]
    states = _run(tfmp.LogMaxLossScaleManager(incr_every_n_steps=3, **_KILO), magnitudes)
    assert [int(state.margin) for state in states] == [0, 0, 1, 2, 2, 2, 1, 1, 1, 0, 0, 1]
    assert [int(state.loss_scale) for state in states] == [1024 / 2 ** int(state.margin) for state in states]


def test_margin_is_no_larger_than_the_bounds_allow() -> None:
    manager = tfmp.LogMaxLossScaleManager(min_loss_scale=2**8, **_KILO | {"init_loss_scale": 256})
    low = _run(manager, [1, *[math.inf] * 9])
    assert [(int(state.loss_scale), int(state.margin)) for state in low[-2:]] == [(256, 2)] * 2


@pytest.mark.parametrize("nothing", [0.0, 1e-42])
def test_zero_or_denormal_gradients_are_not_observed(nothing: float) -> None:
    manager = tfmp.LogMaxLossScaleManager(**_KILO)
    assert _scales([nothing, nothing], **_KILO) == [8, 8]
    before, *after = _run(manager, [1, nothing, nothing])
    assert [state[:4] for state in after] == [before[:4]] * 2
    assert [int(state.good_steps) for state in after] == [2, 3]


@pytest.mark.parametrize("max_abs", [2.0**-126, 0.75, 1.0, 3.0, 65504.0])
def test_logarithm_of_the_magnitude_is_observed(max_abs: float) -> None:
    (state,) = _run(tfmp.LogMaxLossScaleManager(**_KILO), [max_abs])
    np.testing.assert_allclose(state.log_mean, math.log2(max_abs), rtol=1e-6)
    assert state.observations == 1


def test_infinite_or_nan_magnitude_of_a_finite_step_is_not_observed() -> None:
    manager = tfmp.LogMaxLossScaleManager(**_KILO)
    state = manager.state.read()
    for magnitude in (math.inf, math.nan):
        after = manager.next_state(state, tf.constant(True), tf.constant(magnitude))
        assert [float(field) for field in after] == [8, 0, 0, 0, 0, 1]


def test_scale_recovers_from_an_overflow_that_pins_openseq2seq_at_its_minimum() -> None:
    scales = _scales([*[0.01] * 100, math.nan, *[0.01] * 1100])
    assert scales[99] == 2**22
    assert scales[100:1100] == [2**21] * 1000
    assert scales[1100] == 2**22


_MAGNITUDES = np.float32([0, 1e-45, 2.0**-126, 1e-30, 1e-4, 1, 7, 65504, 1e30, 3.4e38, math.inf, math.nan])


@st.composite
def _settings(draw: st.DrawFn) -> dict[str, Any]:
    lowest, first, highest = sorted(draw(st.integers(-126, 127)) for _ in range(3))
    return {
        "init_loss_scale": 2.0**first,
        "min_loss_scale": 2.0**lowest,
        "max_loss_scale": 2.0**highest,
        "limit": draw(st.floats(1e-300, 1e300)),
        "deviations": draw(st.floats(0, 1000)),
        "mean_decay": draw(st.floats(0, 1, exclude_max=True)),
        "deviation_decay": draw(st.floats(0, 1, exclude_max=True)),
        "incr_every_n_steps": draw(st.integers(1, 4)),
    }


@settings(max_examples=25)
@given(rule=_settings(), seed=st.integers(0, 2**32 - 1))
def test_scale_is_a_power_of_two_within_its_bounds_whatever_happens(rule: dict[str, Any], seed: int) -> None:
    rng = np.random.default_rng(seed)
    magnitudes = rng.choice(_MAGNITUDES, [_STEPS, _SEQUENCES])
    highest_margin = math.log2(rule["max_loss_scale"]) - math.log2(rule["min_loss_scale"])
    for state in _run(tfmp.LogMaxLossScaleManager(**rule), magnitudes):
        assert np.all((rule["min_loss_scale"] <= state.loss_scale) & (state.loss_scale <= rule["max_loss_scale"]))
        assert np.all(np.frexp(state.loss_scale)[0] == 0.5)
        assert np.all(np.isfinite(state.log_mean) & np.isfinite(state.log_variance) & (state.log_variance >= 0))
        assert np.all((state.margin >= 0) & (state.margin <= highest_margin))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, -1.0, 3e38])
def test_invalid_restored_statistics_do_not_break_the_scale(bad: float) -> None:
    manager = tfmp.LogMaxLossScaleManager(**_KILO)
    for field in ("log_mean", "log_variance"):
        state = manager.state.read()._replace(observations=tf.constant(5), margin=tf.constant(-7), **{field: bad})
        state = LogMaxState(*map(tf.convert_to_tensor, state))
        for magnitudes in ([1, 1], [math.inf, 1], [0, 0]):
            for after in _run(manager, magnitudes, state):
                assert 1 <= after.loss_scale <= 2**24
                assert math.frexp(after.loss_scale)[0] == 0.5


@pytest.mark.parametrize("wrong", [{"log_mean": math.nan}, {"log_variance": math.inf}, {"log_variance": -1.0}], ids=str)
def test_invalid_restored_statistics_are_forgotten(wrong: dict[str, float]) -> None:
    manager = tfmp.LogMaxLossScaleManager(**_KILO)
    state = {"log_mean": 3.0, "log_variance": 4.0, "observations": 5} | wrong
    restored = LogMaxState(*map(tf.convert_to_tensor, manager.state.read()._replace(**state)))
    statistics = [
        (each.log_mean, each.log_variance, each.observations) for each in _run(manager, [math.inf, 16], restored)
    ]
    assert statistics == [(0, 0, 0), (4, 0, 1)]


@pytest.mark.parametrize(
    ("restored", "least", "meant"), [(-7, 1, 0), (3, 1, 3), (24, 1, 24), (99, 1, 24), (99, 4, 22), (99, 2**-6, 30)]
)
def test_restored_margin_is_brought_within_the_powers_of_two_between_the_bounds(
    restored: int, least: float, meant: int
) -> None:
    manager = tfmp.LogMaxLossScaleManager(min_loss_scale=least, **_KILO)
    state = manager.state.read()._replace(margin=tf.constant(restored))
    assert [int(after.margin) for after in _run(manager, [0.0], state)] == [meant]


@pytest.mark.parametrize(("restored", "meant"), {1000.0: 512, -8.0: 1, 3e38: 2**24, 1e-42: 1}.items())
def test_restored_scale_is_rounded_down_to_a_power_of_two_within_the_bounds(restored: float, meant: float) -> None:
    manager = tfmp.LogMaxLossScaleManager(**_KILO)
    manager.state.create().loss_scale.assign(restored)
    manager.update_loss_scale(tf.constant(True), tf.constant(0.0))
    assert float(manager.get_loss_scale()) == meant


@pytest.mark.parametrize(
    ("loss_scale", "meant"),
    {
        **{512: 512, 511: 512, 600: 512, 768: 512, 769: 1024, 1000: 1024, 3.5: 4, 4095: 4096, 0.5: 2, 1e39: 4096},
        **{0.0: 2, -8.0: 2, -math.inf: 2, math.inf: 4096, math.nan: 8},
    }.items(),
)
def test_continue_from_rounds_to_the_nearest_power_of_two_within_the_bounds(loss_scale: float, meant: float) -> None:
    manager = tfmp.LogMaxLossScaleManager(min_loss_scale=2, max_loss_scale=4096, **_KILO)
    for max_abs in (1.0, math.inf):
        manager.update_loss_scale(tf.math.is_finite(max_abs), tf.constant(max_abs))
    assert manager.continue_from(loss_scale, good_steps=2, bad_steps=1) is None
    assert [float(field) for field in manager.state.read()] == [meant, 0, 0, 0, 0, 0]
    manager.update_loss_scale(tf.constant(False), tf.constant(math.inf))
    assert float(manager.get_loss_scale()) == max(2, meant / 2)
    manager.update_loss_scale(tf.constant(True), tf.constant(1.0))
    assert float(manager.get_loss_scale()) == 1024


@pytest.mark.graph
def test_continue_from_returns_an_op_in_a_graph(session: tf1.Session) -> None:
    manager = tfmp.LogMaxLossScaleManager(**_KILO)
    set_state = manager.continue_from(100)
    session.run(tf1.global_variables_initializer())
    session.run(set_state)
    assert list(session.run(manager.state.read())) == [128, 0, 0, 0, 0, 0]
