"""The rule by which steps are spikes, its settings and its state, who has a detector, and what is kept of a spike."""

import copy
import dataclasses
import gc
import json
import math
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import example, given, settings
from hypothesis import strategies as st
from kit import oracle

import tfmp
from tfmp.core.spikes.detector import SpikeState
from tfmp.core.spikes.watch import SpikeWatch

tf1 = tf.compat.v1


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


_NORMS = st.lists(st.sampled_from([0.0, 0.9, 1.0, 1.1, 1.2, 2.0, 2.9, 3.1, 50.0, 1e6, math.inf, math.nan]), max_size=40)


@settings(max_examples=60)
@given(
    st.builds(oracle.Spikes, st.sampled_from([None, 2, 3, 4, 8]), max_norm=st.sampled_from([5.0, math.inf])).filter(
        lambda rule: rule != oracle.Spikes(None)
    ),
    st.integers(1, 4),
    _NORMS,
)
# Spikes that entered the window while it was not full do not hide later ones.
@example(oracle.Spikes(32), 10, ([1.0, 1.1, 0.9] * 3 + [50.0]) * 8)
# A lasting change is accepted after a number of skips, and an overflow between two spikes changes nothing.
@example(oracle.Spikes(4), 3, [1.0] * 4 + [50.0] * 8 + [1.0] * 5)
@example(oracle.Spikes(64), 2, [1.0] * 64 + [50.0, math.inf, 50.0, 50.0, 1.0, 50.0])
# The least factor above the median, and a fixed bound at its value.
@example(oracle.Spikes(4, min_factor=5), 1, [*[2.0] * 4, 9.9, 10.1])
@example(oracle.Spikes(max_norm=5.0), 1, [4.9, 5.1, math.inf, 5.0])
def test_spikes_are_those_of_the_rule(rule: oracle.Spikes, skips: int, norms: list[float]) -> None:
    rule = dataclasses.replace(rule, max_consecutive_skips=skips)
    arguments = dataclasses.asdict(rule) | {"max_norm": None if rule.max_norm == math.inf else rule.max_norm}
    if rule.window is None:
        arguments = {name: arguments[name] for name in ("max_norm", "max_consecutive_skips")}
    detector = tfmp.SpikeDetector(**arguments)
    expected = oracle.spikes(norms, rule)
    assert _run(detector, norms) == expected
    if rule.window is not None:
        # Overflows, zeros and spikes do not enter the window, and old norms leave it.
        entered = [
            norm for norm, spike in zip(norms, expected, strict=True) if norm > 0 and norm < math.inf and not spike
        ]
        assert sorted(filter(None, _state(detector)["spike_window"])) == sorted(entered[-rule.window :])


@pytest.mark.parametrize("window", [127, 128])
def test_bound_is_that_of_the_rule(window: int) -> None:
    norms = np.exp(np.random.default_rng(0).normal(size=window))
    detector = tfmp.SpikeDetector(window, max_consecutive_skips=1)
    _run(detector, norms.tolist())
    logarithms = np.log(norms)
    deviation = 1.4826 * np.median(np.abs(logarithms - np.median(logarithms)))
    expected = np.exp(np.median(logarithms) + 4 * deviation)
    np.testing.assert_allclose(detector.bound(detector.state_of(0).read()), expected, rtol=1e-12)


def test_counts_and_what_is_kept_are_as_small_as_they_can_be() -> None:
    detector, fixed = tfmp.SpikeDetector(window=3), tfmp.SpikeDetector(max_norm=5)
    changed = tfmp.SpikeDetector(window=4, max_consecutive_skips=3)
    _run(changed, [1.0] * 4 + [50.0] * 8)
    assert int(changed.lasting_changes) == 1
    _run(detector, [1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6, 1.7])
    # The count starts again before it is too large for its type.
    assert _state(detector)["spike_window_count"] == 5
    _run(fixed, [4.9, 5.0])
    # Nobody reads the last norm, which is kept because TensorFlow cannot keep nothing.
    assert _state(fixed)["spike_window"] == [5.0]


@pytest.mark.parametrize(
    ("given_", "error", "message"),
    [
        ({"window": 1}, ValueError, "window must be a whole number from 2 to"),
        ({"window": "128"}, TypeError, "window must be a number"),
        ({"deviations": 0}, ValueError, "deviations must be greater than 0"),
        ({"deviations": math.nan}, ValueError, "deviations must be finite"),
        ({"min_factor": 1}, ValueError, "min_factor must be greater than 1, got 1"),
        ({"max_norm": -1}, ValueError, "max_norm must be greater than 0, got -1"),
        ({"max_norm": math.nan}, ValueError, "max_norm must be finite, got nan"),
        ({"max_consecutive_skips": 0}, ValueError, "max_consecutive_skips must be a whole number from 1"),
    ],
)
def test_settings_out_of_range_are_refused(given_: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        tfmp.SpikeDetector(**given_)


@pytest.mark.parametrize(
    ("given_", "shown"),
    [
        ({}, "window=128, deviations=4.0, min_factor=3.0"),
        ({"max_norm": 3}, "max_norm=3.0"),
        (
            {"window": 8, "deviations": 5, "min_factor": 2, "max_norm": 9},
            "window=8, deviations=5.0, min_factor=2.0, max_norm=9.0",
        ),
    ],
)
def test_detector_shows_its_settings_and_is_made_again_from_them(given_: dict[str, Any], shown: str) -> None:
    config = tfmp.SpikeDetector(**given_).get_config()
    again = tfmp.SpikeDetector.from_config(config)
    assert (again.get_config(), repr(again)) == (config, f"SpikeDetector({shown})")


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


def _norm(value: float) -> tf.Tensor:
    return tf.constant(value, tf.float64)


def test_detector_of_another_optimizer_is_refused_until_that_is_gone() -> None:
    detector = tfmp.SpikeDetector()
    first = SpikeWatch(detector)
    with pytest.raises(
        ValueError, match=r"SpikeDetector is used by another optimizer or .* already.*make a detector for"
    ):
        SpikeWatch(detector)
    assert first.detector is detector
    # A copy is nobody's yet.
    assert SpikeWatch(copy.deepcopy(detector)).detector is not detector
    del first
    gc.collect()
    assert SpikeWatch(detector).detector is detector
    detector.store_in(lambda name, value: tf.Variable(value, name=name))
    with pytest.raises(ValueError, match="in another Keras optimizer already: make a detector for each"):
        detector.store_in(lambda name, value: tf.Variable(value, name=name))


@pytest.mark.graph
def test_detector_of_another_optimizer_in_the_graph_is_refused() -> None:
    detector = tfmp.SpikeDetector()
    for _ in range(2):
        # A script may make its detector once, and the optimizer again in each graph, as Estimator does.
        with tf.Graph().as_default():
            watch = SpikeWatch(detector)
            watch.look(["adam"], _norm(1.0))
            watch.look(["adam"], _norm(1.0))
            with pytest.raises(ValueError, match="used by another optimizer or scaler already"):
                SpikeWatch(detector).look(["sgd"], _norm(1.0))


def test_optimizers_have_windows_of_their_own() -> None:
    detector, one, two = tfmp.SpikeDetector(), object(), object()
    watch = SpikeWatch(detector)
    stored = [watch.look(optimizers, _norm(1.0)).stored for optimizers in ([one], [two], [one, two], [two])]
    assert stored == [detector.states[index] for index in (0, 1, 2, 1)]
