"""Whose gradients overflowed, as a step of the core counts it; the front-ends have tests of their own."""

import math

import pytest
import tensorflow as tf
from recording_adapters import take_step

import tfmp
from tfmp.core.overflow.overflow_counts import OverflowCounts, OverflowReport
from tfmp.core.step.scaler import LossScaler

_NAMES = ["kernel", "bias"]


def _scaler(detector: tfmp.OverflowDetector) -> LossScaler:
    return LossScaler(tfmp.FixedLossScaleManager(1024), detector, is_distributed=False)


def _numbers(report: OverflowReport) -> tuple[list[str], list[list[int]], list[int]]:
    return report.names, report.last.numpy().tolist(), report.steps.numpy().tolist()


def test_last_skipped_step_is_kept_and_all_are_counted() -> None:
    scaler = _scaler(tfmp.NonFiniteDetector())
    for kernel, bias in [([math.nan, 1.0], math.inf), ([math.inf, math.nan], 0.0), ([1.0, 1.0], 1.0)]:
        take_step(scaler, [tf.constant(kernel), tf.constant(bias)], _NAMES, lambda grads: None)
    (report,) = scaler.overflow_reports()
    assert _numbers(report) == (_NAMES, [[1, 1, 0], [0, 0, 0]], [2, 1])


def test_saturated_values_name_their_variable() -> None:
    scaler = _scaler(tfmp.SaturationDetector(dtype="float8_e4m3fn"))
    take_step(scaler, [tf.constant([448.0, -448.0]) / 1024, tf.constant(1.0) / 1024], _NAMES, lambda grads: None)
    assert _numbers(*scaler.overflow_reports()) == (_NAMES, [[0, 0, 2], [0, 0, 0]], [1, 0])


@pytest.mark.parametrize("detector", [tfmp.NonFiniteDetector(), tfmp.SaturationDetector()])
def test_scaled_gradients_are_counted_in_true_magnitude(detector: tfmp.OverflowDetector) -> None:
    # 65504 is the scaled value: saturated for the one that asks, ordinary for the other, which sees the NaN.
    scaler = _scaler(detector)
    take_step(scaler, [tf.constant([65504.0, math.nan]), None], _NAMES, lambda grads: None, are_scaled=True)
    saturated = int(isinstance(detector, tfmp.SaturationDetector))
    assert _numbers(*scaler.overflow_reports()) == (_NAMES, [[0, 1, saturated], [0, 0, 0]], [1, 0])


def test_each_list_of_variables_has_a_report() -> None:
    scaler = _scaler(tfmp.NonFiniteDetector())
    take_step(scaler, [tf.constant(math.inf)], ["generator"], lambda grads: None)
    take_step(scaler, [tf.constant(math.nan)], ["discriminator"], lambda grads: None)
    assert [_numbers(report) for report in scaler.overflow_reports()] == [
        (["generator"], [[1, 0, 0]], [1]),
        (["discriminator"], [[0, 1, 0]], [1]),
    ]


def test_good_steps_count_nothing() -> None:
    seen = []

    class Detector(tfmp.NonFiniteDetector):
        def counts(self, *args: tf.Tensor) -> tf.Tensor:
            seen.append(args)
            return super().counts(*args)

    scaler = _scaler(Detector())
    take_step(scaler, [tf.constant(1.0), None], _NAMES, lambda grads: None)
    assert seen == []
    take_step(scaler, [tf.constant(math.inf), None], _NAMES, lambda grads: None)
    assert len(seen) == 1


def test_variables_that_steps_need_are_made_in_any_trace_and_cost_none() -> None:
    scaler = _scaler(tfmp.NonFiniteDetector())
    traces = []

    @tf.function
    def step(grad: tf.Tensor, name: str) -> None:
        traces.append(1)
        take_step(scaler, [grad], [name], lambda grads: tf.no_op())

    for name in ("kernel", "bias"):
        step(tf.constant(math.inf), name)
    assert [_numbers(report) for report in scaler.overflow_reports()] == [
        (["kernel"], [[1, 0, 0]], [1]),
        (["bias"], [[1, 0, 0]], [1]),
    ]
    assert len(traces) == 2


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
