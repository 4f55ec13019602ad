"""The rule by which steps are spikes, its settings and its state."""

import json
import math
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import tfmp
from tfmp.core.spikes.detector import SpikeState


def _run(detector: tfmp.SpikeDetector, norms: list[float]) -> list[bool]:
    """Feed the detector the norms of steps, of which infinities overflowed; return which are skipped as spikes."""
    stored, skipped = detector.state_of(0), []
    for norm in norms:
        state, tensor = stored.read(), tf.constant(norm, tf.float64)
        finite = tf.math.is_finite(tensor)
        is_above = tf.logical_and(finite, tensor > detector.bound(state))
        is_skipped = tf.logical_and(finite, detector.is_skipped(state, is_above))
        skipped.append(bool(is_skipped))
        stored.assign(detector.next_state(state, tensor, finite, is_above, is_skipped))
    return skipped


def _state(detector: tfmp.SpikeDetector) -> dict[str, Any]:
    return detector.state_dict()["states"][0]


@pytest.mark.parametrize("window", [127, 128])
def test_bound_is_that_of_the_rule(window: int) -> None:
    rng = np.random.default_rng(0)
    norms = np.exp(rng.normal(size=window))
    detector = tfmp.SpikeDetector(window, max_consecutive_skips=1)
    _run(detector, norms.tolist())
    logarithms = np.log(norms)
    deviation = 1.4826 * np.median(np.abs(logarithms - np.median(logarithms)))
    expected = np.exp(np.median(logarithms) + 4 * deviation)
    np.testing.assert_allclose(detector.bound(detector.state_of(0).read()), expected, rtol=1e-12)


def test_spikes_are_at_least_min_factor_times_the_median() -> None:
    for norm in (9.9, 10.1):
        assert _run(tfmp.SpikeDetector(window=4, min_factor=5), [*[2.0] * 4, norm])[-1] is (norm > 10)


def test_nothing_is_a_spike_before_the_window_is_full() -> None:
    detector = tfmp.SpikeDetector(window=3)
    assert _run(detector, [1.0, 1e6, math.inf, 1.0]) == [False] * 4
    assert _state(detector)["spike_window_count"] == 3
    assert _run(detector, [1e6]) == [True]


def test_overflows_zeros_and_spikes_do_not_enter_the_window() -> None:
    detector = tfmp.SpikeDetector(window=2)
    _run(detector, [0.0, 1.0, math.inf, 1.0, 0.0, 100.0, math.nan])
    assert _state(detector)["spike_window"] == [1.0, 1.0]


def test_spikes_that_entered_the_window_while_it_was_not_full_do_not_hide_later_ones() -> None:
    detector = tfmp.SpikeDetector(window=32)
    norms = ([1.0, 1.1, 0.9] * 3 + [50.0]) * 8
    assert sum(_run(detector, norms)) == 5


def test_old_norms_leave_the_window() -> None:
    detector = tfmp.SpikeDetector(window=3)
    _run(detector, [1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6, 1.7])
    state = _state(detector)
    assert sorted(state["spike_window"]) == [1.5, 1.6, 1.7]
    # The count starts again before it is too large for its type.
    assert state["spike_window_count"] == 5


def test_lasting_change_is_accepted_after_a_number_of_skips() -> None:
    detector = tfmp.SpikeDetector(window=4, max_consecutive_skips=3)
    skipped = _run(detector, [1.0] * 4 + [50.0] * 8 + [1.0] * 5)
    # Three are skipped, and the others enter the window.
    assert skipped == [False] * 4 + [True] * 3 + [False] * 10
    assert int(detector.lasting_changes) == 1


def test_norm_within_the_bound_begins_to_count_anew() -> None:
    detector = tfmp.SpikeDetector(window=64, max_consecutive_skips=2)
    skipped = _run(detector, [1.0] * 64 + [50.0, math.inf, 50.0, 50.0, 1.0, 50.0])
    # An overflow between two spikes changes nothing.
    assert skipped == [False] * 64 + [True, False, True, False, False, True]


def test_fixed_bound_needs_no_window() -> None:
    detector = tfmp.SpikeDetector(max_norm=5)
    assert _run(detector, [4.9, 5.1, math.inf, 5.0]) == [False, True, False, False]
    # Nobody reads the last norm, which is kept because TensorFlow cannot keep nothing.
    assert _state(detector)["spike_window"] == [5.0]
    both = tfmp.SpikeDetector(window=2, max_norm=5)
    assert _run(both, [1.0, 6.0, 1.0, 4.0]) == [False, True, False, True]


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"window": 1}, ValueError, "window must be a whole number from 2 to"),
        ({"window": 2.5}, ValueError, "window must be a whole number"),
        ({"window": "128"}, TypeError, "window must be a number"),
        ({"deviations": 0}, ValueError, "deviations must be greater than 0"),
        ({"deviations": math.nan}, ValueError, "deviations must be finite"),
        ({"min_factor": 1}, ValueError, "min_factor must be greater than 1, got 1"),
        ({"max_norm": -1}, ValueError, "max_norm must be greater than 0, got -1"),
        ({"max_norm": math.nan}, ValueError, "max_norm must be finite, got nan"),
        ({"max_consecutive_skips": 0}, ValueError, "max_consecutive_skips must be a whole number from 1"),
    ],
)
def test_settings_out_of_range_are_refused(settings: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        tfmp.SpikeDetector(**settings)


@pytest.mark.parametrize(
    "settings", [{}, {"max_norm": 3.0}, {"window": 8, "deviations": 5.0, "min_factor": 2.0, "max_norm": 9.0}]
)
def test_detector_is_made_again_from_its_configuration(settings: dict[str, Any]) -> None:
    config = tfmp.SpikeDetector(**settings).get_config()
    again = tfmp.SpikeDetector.from_config(config)
    assert again.get_config() == config
    assert (again._window is None) == (settings == {"max_norm": 3.0})


def test_repr_shows_the_settings() -> None:
    assert repr(tfmp.SpikeDetector(window=8, max_norm=3)) == (
        "SpikeDetector(window=8, deviations=4.0, min_factor=3.0, max_norm=3.0)"
    )
    assert repr(tfmp.SpikeDetector(max_norm=3)) == "SpikeDetector(max_norm=3.0)"


def test_state_as_json_resumes_exactly() -> None:
    norms = [*np.linspace(1, 2, 6), 40.0, 1.0, 50.0, 60.0, 70.0, 1.5, 90.0]
    for cut in range(len(norms)):
        whole, first, second = (tfmp.SpikeDetector(window=4, max_consecutive_skips=3) for _ in range(3))
        expected = _run(whole, norms)
        before = _run(first, norms[:cut])
        second.load_state_dict(json.loads(json.dumps(first.state_dict())))
        assert before + _run(second, norms[cut:]) == expected
        assert second.state_dict() == whole.state_dict()


def test_earlier_state_replaces_all_of_the_present_one() -> None:
    detector = tfmp.SpikeDetector(window=2)
    _run(detector, [1.0, 2.0])
    detector.load_state_dict({"states": []})
    assert detector.state_dict() == {"states": [dict.fromkeys(SpikeState._fields, 0) | {"spike_window": [0.0, 0.0]}]}


def test_state_that_does_not_fit_is_refused_and_changes_nothing() -> None:
    detector = tfmp.SpikeDetector(window=2)
    _run(detector, [1.0, 2.0, 30.0])
    before = detector.state_dict()
    good = before["states"][0]
    for state, error, message in [
        ({"norms": []}, TypeError, "must be what state_dict"),
        ([], TypeError, "must be what state_dict"),
        ({"states": [{}]}, TypeError, "must have the entries spike_window"),
        ({"states": [good, {**good, "spike_window": [1.0]}]}, ValueError, "must have 2 norms, got 1"),
        ({"states": [good, {**good, "spike_window": [1.0, -1.0]}]}, ValueError, "spike_window must be at least 0"),
        ({"states": [good, {**good, "consecutive_spikes": -1}]}, ValueError, "consecutive_spikes must be"),
    ]:
        with pytest.raises(error, match=message):
            detector.load_state_dict(state)
    assert detector.state_dict() == before


def test_rule_is_the_same_in_a_function_and_in_xla() -> None:
    detector = tfmp.SpikeDetector(window=4)
    state = SpikeState(tf.constant([1.0, 2.0, 3.0, 4.0], tf.float64), tf.constant(5), tf.constant(1), tf.constant(0))
    norm = tf.constant(100.0, tf.float64)

    def run() -> list[tf.Tensor]:
        true = tf.constant(True)
        return [detector.bound(state), *detector.next_state(state, norm, true, true, true)]

    for compiled in (tf.function(run), tf.function(run, jit_compile=True)):
        for one, other in zip(run(), compiled(), strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-12)


def test_detector_that_is_stored_in_an_optimizer_is_refused_by_another() -> None:
    detector = tfmp.SpikeDetector()
    detector.store_in(lambda name, value: tf.Variable(value, name=name))
    with pytest.raises(ValueError, match="in another Keras optimizer already: make a detector for each"):
        detector.store_in(lambda name, value: tf.Variable(value, name=name))
