import math

import numpy as np
import pytest
import tensorflow as tf

import tfmp
from tfmp.core.gradients import arithmetic
from tfmp.core.overflow.detectors import OverflowDetector, validated_detector
from tfmp.types import Gradients

_SCALE = 1024.0


class _OfTheUsers(tfmp.OverflowDetector):
    def all_finite(self, grads: Gradients, loss_scale: tf.Tensor) -> tf.Tensor:
        return tf.reduce_all([tf.reduce_all(tf.math.is_finite(values)) for values in arithmetic.values_of(grads)])


_DETECTORS = {
    "non-finite": tfmp.NonFiniteDetector(),
    "saturation": tfmp.SaturationDetector(),
    "saturation of bfloat16": tfmp.SaturationDetector(dtype="bfloat16"),
    "user's own": _OfTheUsers(),
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


def test_every_detector_accepts_ordinary_values(detector: OverflowDetector) -> None:
    assert _finite(detector, 0.0, -60000.0 / _SCALE)


def test_every_detector_accepts_a_list_without_gradients(detector: OverflowDetector) -> None:
    assert bool(detector.all_finite([None], tf.constant(_SCALE)))


def test_every_detector_counts_infinities_and_nan_separately(detector: OverflowDetector) -> None:
    rows = tf.IndexedSlices(tf.constant([[math.nan, math.nan], [1.0, -math.inf]]), tf.constant([2, 0]))
    grads = [tf.constant([1.0, 2.0]), None, rows, tf.zeros([0, 3]), tf.constant(math.inf, tf.float16)]
    counts = detector.counts(grads, tf.constant(_SCALE))
    assert counts.dtype == tf.int64
    assert counts.numpy().tolist() == [[0, 0, 0], [0, 0, 0], [1, 2, 0], [0, 0, 0], [1, 0, 0]]


@pytest.mark.graph
@pytest.mark.parametrize("shape", [None, [None], [None, 2], [2, None]])
def test_gradients_of_unknown_shape_are_counted(session: tf.compat.v1.Session, shape: list[int | None] | None) -> None:
    fed = np.full([2, 2] if shape is None or len(shape) == 2 else [4], math.inf, np.float32)
    grad = tf.compat.v1.placeholder(tf.float32, shape)
    counts = tfmp.NonFiniteDetector().counts([grad, None], tf.constant(_SCALE))
    assert session.run(counts, {grad: fed}).tolist() == [[4, 0, 0], [0, 0, 0]]


def test_saturated_values_are_counted_separately() -> None:
    grads = [tf.constant([-65504.0, 65504.0, math.inf, 60000.0]) / _SCALE]
    assert tfmp.SaturationDetector().counts(grads, tf.constant(_SCALE)).numpy().tolist() == [[1, 0, 2]]


@pytest.mark.parametrize(
    ("dtype", "largest", "limit", "next_largest"),
    [
        ("float16", 65504.0, 65488.0, 65472.0),
        ("bfloat16", 255 * 2.0**120, 254.5 * 2.0**120, 254 * 2.0**120),
        # No number of float32 lies between these.
        ("float32", (2**24 - 1) * 2.0**104, (2**24 - 1) * 2.0**104, (2**24 - 2) * 2.0**104),
        ("float8_e4m3fn", 448.0, 432.0, 416.0),
        ("float8_e5m2", 57344.0, 53248.0, 49152.0),
    ],
)
def test_values_above_the_middle_of_the_two_largest_values_of_a_type_are_saturated(
    dtype: str, largest: float, limit: float, next_largest: float
) -> None:
    detector = tfmp.SaturationDetector(dtype=dtype)
    for sign in (1, -1):
        for value, saturated in [
            (largest, True),
            (limit, True),
            (float(np.nextafter(np.float32(limit), np.float32(0))), False),
            (next_largest, False),
        ]:
            grads = [tf.constant([sign * value])]
            assert bool(detector.all_finite(grads, tf.constant(1.0))) is not saturated
            assert detector.counts(grads, tf.constant(1.0)).numpy().tolist() == [[0, 0, int(saturated)]]


@pytest.mark.parametrize("dtype", ["int32", "float11"])
def test_type_that_cannot_saturate_is_refused(dtype: str) -> None:
    with pytest.raises(TypeError, match=f"dtype must be a floating-point type .*, got '{dtype}'"):
        tfmp.SaturationDetector(dtype=dtype)


def test_limit_and_type_exclude_each_other() -> None:
    with pytest.raises(ValueError, match=r"pass limit or dtype, not both, got limit=8.0 and dtype='float16'"):
        tfmp.SaturationDetector(8.0, dtype="float16")


def test_value_is_saturated_if_its_scaled_magnitude_reaches_the_limit() -> None:
    assert not _finite(tfmp.SaturationDetector(), -65504.0 / _SCALE)
    assert _finite(tfmp.NonFiniteDetector(), -65504.0 / _SCALE)


@pytest.mark.parametrize("scale", [3.0, 1000.0, 12345.678, 2.0**40])
def test_saturation_is_detected_although_unscaling_rounds(scale: float) -> None:
    scale = tf.constant(scale)
    assert not bool(tfmp.SaturationDetector().all_finite([65504 * tf.math.reciprocal(scale)], scale))
    assert bool(tfmp.SaturationDetector().all_finite([65472 * tf.math.reciprocal(scale)], scale))


def test_limit_can_be_given_as_a_number() -> None:
    assert _finite(tfmp.SaturationDetector(limit=1e30), 65504.0)


@pytest.mark.parametrize("limit", [0.0, -1.0, math.inf, math.nan])
def test_limit_out_of_range_is_refused(limit: float) -> None:
    with pytest.raises(ValueError, match=f"limit must be .*, got {limit}"):
        tfmp.SaturationDetector(limit)


def test_no_detector_stands_for_the_one_that_looks_for_infinities_and_nan() -> None:
    own = _OfTheUsers()
    assert validated_detector(own) is own
    assert type(validated_detector(None)) is tfmp.NonFiniteDetector


def test_object_that_is_no_detector_is_refused() -> None:
    with pytest.raises(
        TypeError, match=r"^overflow_detector must be a tfmp\.OverflowDetector, got 'inf' of type str: "
    ):
        validated_detector("inf")
