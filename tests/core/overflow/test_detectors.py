"""The detectors, and whose gradients overflowed, as a step counts it."""

import math
from collections.abc import Callable

import numpy as np
import pytest
import tensorflow as tf
from recording_adapters import scaler_of, take_step

import tfmp
from tfmp.core.gradients import arithmetic
from tfmp.core.overflow.detectors import OverflowDetector, validated_detector
from tfmp.core.overflow.overflow_counts import OverflowCounts, OverflowReport
from tfmp.core.step.scaler import LossScaler
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


def test_every_detector_sees_non_finite_values_and_accepts_ordinary_ones(detector: OverflowDetector) -> None:
    for bad in (math.inf, -math.inf, math.nan):
        assert not _finite(detector, 0.0, bad)
    assert _finite(detector, 0.0, -60000.0 / _SCALE)
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


def test_no_detector_stands_for_the_one_that_looks_for_infinities_and_nan() -> None:
    own = _OfTheUsers()
    assert validated_detector(own) is own
    assert type(validated_detector(None)) is tfmp.NonFiniteDetector


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        *(
            (lambda limit=limit: tfmp.SaturationDetector(limit), ValueError, f"limit must be .*, got {limit}")
            for limit in (0.0, -1.0, math.inf, math.nan)
        ),
        *(
            (lambda dtype=dtype: tfmp.SaturationDetector(dtype=dtype), TypeError, f"floating-point type .* '{dtype}'")
            for dtype in ("int32", "float11")
        ),
        (
            lambda: tfmp.SaturationDetector(8.0, dtype="float16"),
            ValueError,
            "pass limit or dtype, not both, got limit=8.0 and dtype='float16'",
        ),
        (
            lambda: validated_detector("inf"),
            TypeError,
            r"^overflow_detector must be a tfmp\.OverflowDetector, got 'inf' of type str: ",
        ),
    ],
)
def test_what_is_no_detector_or_limit_is_refused(
    call: Callable[[], object], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        call()


_NAMES = ["kernel", "bias"]


def _scaler(detector: tfmp.OverflowDetector) -> LossScaler:
    return scaler_of(tfmp.FixedLossScaleManager(1024), detector)


def _numbers(report: OverflowReport) -> tuple[list[str], list[list[int]], list[int]]:
    return report.names, report.last.numpy().tolist(), report.steps.numpy().tolist()


def test_last_skipped_step_of_each_list_of_variables_is_kept_and_all_are_counted() -> None:
    scaler = _scaler(tfmp.NonFiniteDetector())
    for kernel, bias in [([math.nan, 1.0], math.inf), ([math.inf, math.nan], 0.0), ([1.0, 1.0], 1.0)]:
        take_step(scaler, [tf.constant(kernel), tf.constant(bias)], _NAMES, lambda grads: None)
    take_step(scaler, [tf.constant(math.nan)], ["discriminator"], lambda grads: None)
    assert [_numbers(report) for report in scaler.overflow_reports()] == [
        (_NAMES, [[1, 1, 0], [0, 0, 0]], [2, 1]),
        (["discriminator"], [[0, 1, 0]], [1]),
    ]


@pytest.mark.parametrize("detector", [tfmp.NonFiniteDetector(), tfmp.SaturationDetector()])
def test_scaled_gradients_are_counted_in_true_magnitude(detector: tfmp.OverflowDetector) -> None:
    # 65504 is the scaled value: saturated for the one that asks, ordinary for the other, which sees the NaN.
    scaler = _scaler(detector)
    take_step(scaler, [tf.constant([65504.0, math.nan]), None], _NAMES, lambda grads: None, are_scaled=True)
    saturated = int(isinstance(detector, tfmp.SaturationDetector))
    assert _numbers(*scaler.overflow_reports()) == (_NAMES, [[0, 1, saturated], [0, 0, 0]], [1, 0])


def test_good_steps_count_nothing() -> None:
    seen = []

    class Detector(tfmp.NonFiniteDetector):
        def counts(self, *args: tf.Tensor) -> tf.Tensor:
            seen.append(args)
            return super().counts(*args)

    scaler = _scaler(Detector())
    for value, asked in [(1.0, 0), (math.inf, 1)]:
        take_step(scaler, [tf.constant(value), None], _NAMES, lambda grads: None)
        assert len(seen) == asked


def test_variables_that_steps_need_are_made_in_any_trace_and_cost_none() -> None:
    scaler, traces = _scaler(tfmp.NonFiniteDetector()), []

    @tf.function
    def step(grad: tf.Tensor, name: str) -> None:
        traces.append(name)
        take_step(scaler, [grad], [name], lambda grads: tf.no_op())

    for name in _NAMES:
        step(tf.constant(math.inf), name)
    assert [_numbers(each) for each in scaler.overflow_reports()] == [([name], [[1, 0, 0]], [1]) for name in _NAMES]
    assert traces == _NAMES


@pytest.mark.graph
def test_session_that_took_no_step_reports_zeros(session: tf.compat.v1.Session) -> None:
    counts = OverflowCounts(_NAMES)
    report = counts.report()
    record = counts.record(tf.constant([[1, 2, 3], [0, 0, 0]], tf.int64))
    assert session.run(report.last).tolist() == [[0, 0, 0], [0, 0, 0]]
    session.run(record)
    session.run(record)
    assert session.run(report.steps).tolist() == [2, 0]
    with tf.compat.v1.Session() as other:
        assert other.run(report.steps).tolist() == [0, 0]
