"""What counts as an overflow: the detectors, the check of one replica's gradients, and the counts of a step."""

import math
from functools import partial
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from gradient_forms import MODES, in_every_mode
from recording_adapters import scaler_of, take_step

import tfmp
from tfmp.core.gradients import arithmetic
from tfmp.core.overflow.detectors import OverflowDetector, validated_detector
from tfmp.core.overflow.found import Checked, Found, GradientCheck, OverflowCounts
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
    ("dtype", "largest", "limit", "below"),
    [
        ("float16", 65504.0, 65488.0, 65472.0),
        ("bfloat16", 255 * 2.0**120, 254.5 * 2.0**120, 254 * 2.0**120),
        # No number of float32 lies between these.
        ("float32", (2**24 - 1) * 2.0**104, (2**24 - 1) * 2.0**104, (2**24 - 2) * 2.0**104),
        ("float8_e4m3fn", 448.0, 432.0, 416.0),
        ("float8_e5m2", 57344.0, 53248.0, 49152.0),
    ],
)
def test_values_that_would_round_to_the_largest_are_saturated(
    dtype: str, largest: float, limit: float, below: float
) -> None:
    detector = tfmp.SaturationDetector(dtype=dtype)
    for sign in (1, -1):
        for value, saturated in [
            (largest, True),
            (limit, True),
            (float(np.nextafter(np.float32(limit), np.float32(0))), False),
            (below, False),
        ]:
            grads = [tf.constant([sign * value])]
            assert bool(detector.all_finite(grads, tf.constant(1.0))) is not saturated
            assert detector.counts(grads, tf.constant(1.0)).numpy().tolist() == [[0, 0, int(saturated)]]


@pytest.mark.parametrize("scale", [3.0, 1000.0, 12345.678, 2.0**40])
def test_saturation_is_detected_although_unscaling_rounds(scale: float) -> None:
    scale = tf.constant(scale)
    assert not bool(tfmp.SaturationDetector().all_finite([65504 * tf.math.reciprocal(scale)], scale))
    assert bool(tfmp.SaturationDetector().all_finite([65472 * tf.math.reciprocal(scale)], scale))


def test_limit_can_be_given_as_a_number_and_no_detector_looks_for_infinities_and_nan() -> None:
    assert _finite(tfmp.SaturationDetector(limit=1e30), 65504.0)
    own = _OfTheUsers()
    assert validated_detector(own) is own
    assert type(validated_detector(None)) is tfmp.NonFiniteDetector


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        *(
            (partial(tfmp.SaturationDetector, limit), ValueError, f"limit must be .*, got {limit}")
            for limit in (0.0, -1.0, math.inf, math.nan)
        ),
        *(
            (partial(tfmp.SaturationDetector, dtype=dtype), TypeError, f"floating-point type .* '{dtype}'")
            for dtype in ("int32", "float11")
        ),
        (
            partial(tfmp.SaturationDetector, 8.0, dtype="float16"),
            ValueError,
            "pass limit or dtype, not both, got limit=8.0 and dtype='float16'",
        ),
        (
            partial(validated_detector, "inf"),
            TypeError,
            r"^overflow_detector must be a tfmp\.OverflowDetector, got 'inf' of type str: ",
        ),
    ],
)
def test_what_is_no_detector_or_limit_is_refused(call: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()


_NAMES = ["kernel", "bias"]


def test_last_skipped_step_of_each_list_of_variables_is_kept_and_all_are_counted() -> None:
    scaler = scaler_of(tfmp.FixedLossScaleManager(1024))
    for kernel, bias in [([math.nan, 1.0], math.inf), ([math.inf, math.nan], 0.0), ([1.0, 1.0], 1.0)]:
        take_step(scaler, [tf.constant(kernel), tf.constant(bias)], _NAMES, lambda grads: None)
    take_step(scaler, [tf.constant(math.nan)], ["discriminator"], lambda grads: None)
    reports = [
        (each.names, each.last.numpy().tolist(), each.steps.numpy().tolist()) for each in scaler.overflow_reports()
    ]
    assert reports == [(_NAMES, [[1, 1, 0], [0, 0, 0]], [2, 1]), (["discriminator"], [[0, 1, 0]], [1])]


def test_good_steps_count_nothing() -> None:
    seen = []

    class Detector(tfmp.NonFiniteDetector):
        def counts(self, *args: tf.Tensor) -> tf.Tensor:
            seen.append(args)
            return super().counts(*args)

    scaler = scaler_of(tfmp.FixedLossScaleManager(1024), Detector())
    for value, asked in [(1.0, 0), (math.inf, 1)]:
        take_step(scaler, [tf.constant(value), None], _NAMES, lambda grads: None)
        assert len(seen) == asked


@pytest.mark.graph
def test_counts_need_no_initializer_and_start_from_0_in_each_session(session: tf.compat.v1.Session) -> None:
    counts = OverflowCounts(_NAMES)
    record, steps = counts.record(tf.constant([[1, 2, 3], [0, 0, 0]], tf.int64)), counts.report().steps
    session.run(record)
    assert session.run(steps).tolist() == [1, 0]
    with tf.compat.v1.Session() as other:
        assert other.run(steps).tolist() == [0, 0]


_NOTHING = [0, 0, 0]


class _Tolerant(tfmp.OverflowDetector):
    def all_finite(self, grads: Gradients, loss_scale: tf.Tensor) -> tf.Tensor:
        del grads, loss_scale
        return tf.constant(True)


def _check(loss_scale: float = 8.0, **settings: Any) -> GradientCheck:
    return GradientCheck(tfmp.NonFiniteDetector(), tf.constant(loss_scale), **settings)


@pytest.mark.parametrize(("are_scaled", "largest"), [(False, 16.0), (True, 2.0)])
def test_scaled_gradients_are_measured_and_checked_as_their_true_ones(are_scaled: bool, largest: float) -> None:
    check, grads = _check(are_scaled=are_scaled, needs_max_abs=True), [None, tf.constant([4.0, -16.0])]
    assert float(check.find(grads).max_abs) == largest
    for last, counts in [(-16.0, _NOTHING), (math.inf, [1, 0, 0]), (math.nan, [0, 1, 0])]:
        grads[1] = tf.constant([4.0, last])
        assert bool(check.find(grads).usable) is (counts == _NOTHING)
        assert check.counts(grads).numpy().tolist() == [_NOTHING, counts]


def test_scaled_gradients_are_not_usable_at_a_scale_below_1() -> None:
    largest = [tf.constant([tf.float32.max])]
    # A checkpoint may restore such a scale. Divided by 0.5, a gradient that is finite here overflows.
    assert not bool(_check(0.5, are_scaled=True).find(largest).usable)
    assert bool(_check(1.0, are_scaled=True).find(largest).usable)
    assert bool(_check(0.5).find(largest).usable)


@pytest.mark.parametrize("are_scaled", [False, True])
def test_next_value_of_a_variable_is_never_scaled_and_checked_for_finiteness_alone(are_scaled: bool) -> None:
    check = GradientCheck(tfmp.SaturationDetector(), tf.constant(8.0), are_scaled, 1, [1], needs_max_abs=True)
    # For a gradient this would be saturated.
    large = [tf.constant([16.0]), tf.constant([1e6])]
    found = check.find(large)
    assert (bool(found.usable), float(found.max_abs)) == (True, 2 if are_scaled else 16)
    assert check.counts(large).numpy().tolist() == [_NOTHING, _NOTHING]
    nan = [tf.constant([16.0]), tf.constant([math.nan])]
    assert not bool(check.find(nan).usable)
    assert check.counts(nan).numpy().tolist() == [_NOTHING, [0, 1, 0]]
    both = [tf.constant([math.inf]), tf.constant([math.nan])]
    assert check.counts(both).numpy().tolist() == [[1, 0, 0], [0, 1, 0]]
    # What was checked before is left out, and the others keep their places.
    for value, usable in [(1e6, True), (math.nan, False)]:
        again = [large[0], tf.constant([value])]
        assert bool(check.find(again, Checked(Found(tf.constant(True)), grads=large)).usable) is usable


def test_gradient_that_could_overflow_in_the_sum_over_replicas_counts_as_infinite() -> None:
    grads = [tf.constant([1.0, 0.625 * tf.float32.max, tf.float32.max]), tf.constant([1.0])]
    # An infinity is counted once.
    assert _check(num_summed=2).counts([tf.constant([math.inf, 1.0])]).numpy().tolist() == [[1, 0, 0]]
    alone, summed = _check(), _check(num_summed=2)
    assert [bool(check.find(grads).usable) for check in (alone, summed)] == [True, False]
    counts = [check.counts(grads).numpy().tolist() for check in (alone, summed)]
    assert counts == [[_NOTHING, _NOTHING], [[2, 0, 0], _NOTHING]]
    # Scaled gradients are divided before they are summed, those of half precision in float32.
    for loss_scale, is_usable in [(1.0, False), (4.0, True)]:
        scaled = GradientCheck(tfmp.NonFiniteDetector(), tf.constant(loss_scale), are_scaled=True, num_summed=2)
        assert bool(scaled.find(grads).usable) is is_usable
        assert scaled.counts(grads).numpy().tolist() == [_NOTHING if is_usable else [2, 0, 0], _NOTHING]
        assert bool(scaled.find([tf.constant([65504.0], tf.float16)]).usable)
    # Where gradients are not summed, the detector alone decides.
    for num_summed, finite in [(1, True), (2, False)]:
        check = GradientCheck(_Tolerant(), tf.constant(8.0), num_summed=num_summed)
        assert bool(check.find([tf.constant([math.inf])]).usable) is finite


@in_every_mode
@pytest.mark.parametrize("num_summed", [1, 2])
def test_counts_of_large_gradients_are_those_of_all_values(mode: str, num_summed: int) -> None:
    check = _check(num_summed=num_summed)
    overflowed = tf.constant([[math.inf, math.nan, 1.0, 3e38] * 30] * 100)
    grads = [tf.ones([100, 100]), overflowed, None, tf.constant([math.nan]), tf.fill([100, 100], 2e38)]

    counted = MODES[mode](check.counts)(grads)
    in_sum = [3000, 10000] if num_summed == 2 else [0, 0]
    rows = [_NOTHING, [3000 + in_sum[0], 3000, 0], _NOTHING, [0, 1, 0], [in_sum[1], 0, 0]]
    assert counted.numpy().tolist() == rows
    # A detector that counts finite values looks at all of them.
    saturated = GradientCheck(tfmp.SaturationDetector(), tf.constant(8.0), num_summed=num_summed)
    assert MODES[mode](saturated.counts)([tf.fill([100, 100], 65504.0)]).numpy().tolist() == [[0, 0, 10000]]


@pytest.mark.parametrize(
    ("before", "value", "usable"), [(True, 1.0, True), (True, math.inf, False), (False, 1.0, False)]
)
def test_gradients_that_were_checked_before_are_not_read_again(before: bool, value: float, usable: bool) -> None:
    old, new = tf.constant([math.nan]), tf.constant([value])
    known = Checked(Found(tf.constant(before), tf.constant(2.0)), grads=[old])
    for grads, expected in [([old, new, None], usable), ([new], usable), ([old, None], before)]:
        found = _check(needs_max_abs=True).find(grads, known)
        assert (bool(found.usable), float(found.max_abs)) == (expected, 2)
    # The largest magnitude is found if it is needed and not known.
    for known in (None, Checked(Found(tf.constant(True)))):
        for needs_max_abs, largest in [(True, 3.0), (False, None)]:
            found = _check(needs_max_abs=needs_max_abs).find([tf.constant([-3.0, 1.0]), None], known)
            assert (bool(found.usable), found.max_abs) == (True, largest)
