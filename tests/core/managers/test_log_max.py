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
    ("max_abs", "given_", "field", "expected"),
    [
        # Of a constant magnitude, the scale is the limit divided by it.
        ([0.75] * 3, {}, "loss_scale", [1024] * 3),
        ([2**-10], {}, "loss_scale", [2**20]),
        ([2**-10] * 2, {"max_loss_scale": 2**12}, "loss_scale", [2**12] * 2),
        ([2**20] * 2, {}, "loss_scale", [1] * 2),
        ([2**20] * 2, {"min_loss_scale": 2**-6}, "loss_scale", [2**-6] * 2),
        ([2**20] * 2, {"min_loss_scale": 2**-12}, "loss_scale", [2**-10] * 2),
        # What an overflow takes away is subtracted from the bound, although the magnitude would allow 2**30.
        ([2**-20, math.inf, 2**-20], {"max_loss_scale": 2**12}, "loss_scale", [2**12, 2**11, 2**11]),
        # Overflows before the first finite step leave nothing to take away.
        ([*[math.inf] * 10, 1], {}, "loss_scale", [4, 2, *[1] * 8, 1024]),
        # Each overflow halves the scale until enough finite steps follow, down to the lowest.
        (
            [1, 1, math.inf, math.inf, *[1] * 7, math.inf],
            {"incr_every_n_steps": 3},
            "margin",
            [0, 0, 1, 2, 2, 2, 1, 1, 1, 0, 0, 1],
        ),
        (
            [1, 1, math.inf, math.inf, 1, 1, 1],
            {"incr_every_n_steps": 3},
            "loss_scale",
            [1024, 1024, 512, *[256] * 3, 512],
        ),
        ([1, *[math.inf] * 9], {"min_loss_scale": 2**8, "init_loss_scale": 256}, "margin", [0, 1, *[2] * 8]),
        ([1, *[math.inf] * 9], {"min_loss_scale": 2**8, "init_loss_scale": 256}, "loss_scale", [1024, 512, *[256] * 8]),
        # The mean and the variance are plain at first, and moving later.
        ([2**4, *[2**8] * 3], {"mean_decay": 0.5, "deviation_decay": 0.75}, "log_mean", [4, 6, 7, 7.5]),
        # The differences between x and the mean before it are 4, 2 and 1.
        ([2**4, *[2**8] * 3], {"mean_decay": 0.5, "deviation_decay": 0.75}, "log_variance", [0, 16, 20 / 2, 21 / 3]),
    ],
)
def test_state_follows_the_magnitude(max_abs: list[float], given_: Any, field: str, expected: Any) -> None:
    states = _run(tfmp.LogMaxLossScaleManager(**_KILO | given_), max_abs)
    np.testing.assert_allclose(
        [getattr(state, field) for state in states], expected, rtol=1e-6 if "log" in field else 0
    )


def test_scale_leaves_room_for_the_deviation() -> None:
    magnitudes = [2.0**4, 2.0**8] * 100
    room = [1024 / (float(scale) * 2**8) for scale in _scales(magnitudes, min_loss_scale=2**-20, **_KILO)[100:]]
    assert min(room) >= 4
    assert max(room) <= 64
    # Without room for deviations, the scale is the limit divided by 2**mean, rounded down; the mean is just above 6.
    assert _scales(magnitudes, deviations=0, min_loss_scale=2**-20, **_KILO)[-1] == 2**3


@pytest.mark.parametrize("nothing", [0.0, 1e-42, math.inf, math.nan])
def test_magnitude_of_a_finite_step_without_a_logarithm_is_not_observed(nothing: float) -> None:
    manager = tfmp.LogMaxLossScaleManager(**_KILO)
    (before,) = _run(manager, [1])
    for state in (before, manager.state.read()):
        after = manager.next_state(LogMaxState(*map(tf.constant, state)), tf.constant(True), tf.constant(nothing))
        assert [float(field) for field in after] == [float(each) for each in (*state[:5], state.good_steps + 1)]


@pytest.mark.parametrize("max_abs", [2.0**-126, 0.75, 1.0, 3.0, 65504.0])
def test_logarithm_of_the_magnitude_is_observed(max_abs: float) -> None:
    (state,) = _run(tfmp.LogMaxLossScaleManager(**_KILO), [max_abs])
    np.testing.assert_allclose(state.log_mean, math.log2(max_abs), rtol=1e-6)
    assert state.observations == 1


def test_scale_recovers_from_an_overflow_that_pins_openseq2seq_at_its_minimum() -> None:
    scales = _scales([*[0.01] * 100, math.nan, *[0.01] * 1100])
    assert scales[99:1101] == [2**22, *[2**21] * 1000, 2**22]


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


def _restored(**state: float) -> LogMaxState:
    return LogMaxState(*map(tf.convert_to_tensor, tfmp.LogMaxLossScaleManager(**_KILO).state.read()._replace(**state)))


@pytest.mark.parametrize("wrong", [{"log_mean": math.nan}, {"log_variance": math.inf}, {"log_variance": -1.0}], ids=str)
def test_invalid_restored_statistics_are_forgotten(wrong: dict[str, float]) -> None:
    state = _restored(**{"log_mean": 3.0, "log_variance": 4.0, "observations": 5} | wrong)
    found = [each[1:4] for each in _run(tfmp.LogMaxLossScaleManager(**_KILO), [math.inf, 16], state)]
    assert found == [(0, 0, 0), (4, 0, 1)]


@pytest.mark.parametrize("name", ["log_mean", "log_variance"])
def test_huge_restored_statistics_leave_the_scale_within_its_bounds(name: str) -> None:
    for after in _run(tfmp.LogMaxLossScaleManager(**_KILO), [0, 1], _restored(observations=5, **{name: 3e38})):
        assert math.frexp(after.loss_scale)[0] == 0.5
        assert 1 <= after.loss_scale <= 2**24


@pytest.mark.parametrize(
    ("restored", "least", "meant"), [(-7, 1, 0), (3, 1, 3), (24, 1, 24), (99, 1, 24), (99, 4, 22), (99, 2**-6, 30)]
)
def test_restored_margin_is_brought_within_what_the_bounds_allow(restored: int, least: float, meant: int) -> None:
    manager = tfmp.LogMaxLossScaleManager(min_loss_scale=least, **_KILO)
    assert [int(after.margin) for after in _run(manager, [0.0], _restored(margin=restored))] == [meant]


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
