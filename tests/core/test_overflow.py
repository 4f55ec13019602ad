import math

import pytest
import tensorflow as tf

import tfmp
from tfmp.core.overflow import OverflowDetector

_SCALE = 1024.0
_DETECTORS = {
    "non-finite": tfmp.NonFiniteDetector(),
    "saturation": tfmp.SaturationDetector(),
}


@pytest.fixture(params=_DETECTORS.values(), ids=_DETECTORS)
def detector(request: pytest.FixtureRequest) -> OverflowDetector:
    return request.param


def _finite(detector: OverflowDetector, *values: float) -> bool:
    grads = [tf.constant([1.0]), None, tf.IndexedSlices(tf.constant(values), tf.range(len(values)))]
    flag = detector.all_finite(grads, tf.constant(_SCALE))
    assert flag.dtype == tf.bool
    assert flag.shape == []
    return bool(flag)


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_every_detector_sees_non_finite_values(detector: OverflowDetector, bad: float) -> None:
    assert not _finite(detector, 0.0, bad)


def test_every_detector_passes_ordinary_values(detector: OverflowDetector) -> None:
    assert _finite(detector, 0.0, -60000.0 / _SCALE)


def test_every_detector_passes_no_gradient_at_all(detector: OverflowDetector) -> None:
    assert bool(detector.all_finite([None], tf.constant(_SCALE)))


def test_saturated_values_are_told_by_their_scaled_magnitude() -> None:
    assert not _finite(tfmp.SaturationDetector(), -65504.0 / _SCALE)
    assert _finite(tfmp.NonFiniteDetector(), -65504.0 / _SCALE)


@pytest.mark.parametrize("scale", [3.0, 1000.0, 12345.678, 2.0**40])
def test_saturation_is_seen_through_a_scale_that_rounds(scale: float) -> None:
    scale = tf.constant(scale)
    assert not bool(tfmp.SaturationDetector().all_finite([65504 * tf.math.reciprocal(scale)], scale))
    assert bool(tfmp.SaturationDetector().all_finite([65472 * tf.math.reciprocal(scale)], scale))


def test_limit_of_another_type_can_be_given() -> None:
    assert _finite(tfmp.SaturationDetector(limit=1e30), 65504.0)


@pytest.mark.parametrize("limit", [0.0, -1.0, math.inf, math.nan])
def test_limit_out_of_range_is_refused(limit: float) -> None:
    with pytest.raises(ValueError, match=f"limit must be .*, got {limit}"):
        tfmp.SaturationDetector(limit)
