"""Steps with the mean of several micro-batches; `test_accumulator.py` tests the windows themselves."""

import math

import pytest
import tensorflow as tf
from recording_adapters import SCALERS, RecordingAdapter

import tfmp
from tfmp.core.distribute import SingleProcess
from tfmp.core.overflow.local_check import LocalCheck
from tfmp.core.step.choice import update_of_unscaled
from tfmp.core.step.window import accumulate, drain


def test_step_is_taken_with_the_mean_when_the_window_ends() -> None:
    scaler, adapter = SCALERS["finite"](), RecordingAdapter()
    accumulator = tfmp.GradientAccumulator([tf.Variable(0.0, dtype=tf.float16), tf.Variable(0.0)], 2)
    for grad in (1.0, 2.0, math.inf, 1.0):
        accumulate(scaler, adapter, [tf.constant(grad), None], scaler.facts(), accumulator)
    assert adapter.applied == [[1.5, None]]
    assert adapter.steps == [True, False]
    assert float(scaler.scale(tf.constant(1.0))) == 4


def test_drained_window_is_empty_and_its_check_is_known() -> None:
    accumulator = tfmp.GradientAccumulator([tf.Variable(0.0)], 2)
    for grad in (1.0, 3.0):
        accumulator.add([tf.constant(grad)])
    (mean,), known = drain(accumulator, SingleProcess())
    assert (float(mean), bool(known.usable), known.already_checked, float(accumulator.tried)) == (2, True, True, 0)


@pytest.mark.parametrize(("grad", "last"), [(1.0, [[2, 1, 0], [0, 0, 0]]), (math.inf, [[3, 1, 0], [0, 0, 0]])])
def test_overflows_of_micro_batches_are_counted_whether_the_step_is_applied_or_not(
    grad: float, last: list[list[int]]
) -> None:
    scaler, of_window = SCALERS["finite"](), [[2, 1, 0], [0, 0, 0]]
    known = LocalCheck(tf.constant(True), overflow_counts=tf.constant(of_window, tf.int64))
    update = update_of_unscaled(RecordingAdapter(), [tf.constant(grad), None], scaler.facts(), known)
    scaler.step(update, SingleProcess())
    (report,) = scaler.overflow_reports()
    assert (report.last.numpy().tolist(), report.steps.numpy().tolist()) == (last, [1, 0])
