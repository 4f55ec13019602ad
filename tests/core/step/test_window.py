"""Steps with the mean of several micro-batches; `test_accumulator.py` tests the windows themselves."""

import math

import pytest
import tensorflow as tf
from function_steps import FunctionAdapter
from recording_adapters import SCALERS, RecordingAdapter

import tfmp
from tfmp.core.distribute import SingleProcess
from tfmp.core.overflow.results import EarlierCheck, LocalResult
from tfmp.core.step.choice import update_of_unscaled
from tfmp.core.step.window import accumulate, drain
from tfmp.types import Gradients


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
    (mean,), known, emptied = drain(accumulator, SingleProcess())
    assert (float(mean), bool(known.result.usable), known.of_micro_batches) == (2, True, True)
    assert (float(accumulator.tried), emptied) == (0, None)


@pytest.mark.parametrize(("grad", "last"), [(1.0, [[2, 1, 0], [0, 0, 0]]), (math.inf, [[3, 1, 0], [0, 0, 0]])])
def test_overflows_of_micro_batches_are_counted_whether_the_step_is_applied_or_not(
    grad: float, last: list[list[int]]
) -> None:
    scaler, of_window = SCALERS["finite"](), [[2, 1, 0], [0, 0, 0]]
    known = EarlierCheck(LocalResult(tf.constant(True)), overflow_counts=tf.constant(of_window, tf.int64))
    update = update_of_unscaled(RecordingAdapter(), [tf.constant(grad), None], scaler.facts(), known)
    scaler.step(update)
    (report,) = scaler.overflow_reports()
    assert (report.last.numpy().tolist(), report.steps.numpy().tolist()) == (last, [1, 0])


def test_accumulator_learns_the_scale_and_the_largest_magnitude() -> None:
    class Recording(tfmp.NonFiniteDetector):
        def all_finite(self, grads: Gradients, loss_scale: tf.Tensor) -> tf.Tensor:
            scales.append(float(loss_scale))
            return super().all_finite(grads, loss_scale)

    scales: list[float] = []
    for kind, largest in [("largest magnitude", 3.0), ("finite", 0.0)]:
        scaler, weights = SCALERS[kind](), [tf.Variable(0.0), tf.Variable(0.0)]
        accumulator = tfmp.GradientAccumulator(weights, 2, overflow_detector=Recording())
        accumulate(scaler, RecordingAdapter(), [tf.constant(-3.0), None], scaler.facts(), accumulator)
        assert float(accumulator.largest) == largest
    assert scales == [8, 8]


@pytest.mark.graph
def test_window_in_a_graph_ends_with_the_micro_batch_that_fills_it(session: tf.compat.v1.Session) -> None:
    scaler, applied = SCALERS["finite"](), tf.compat.v1.get_variable("applied", initializer=0.0, use_resource=True)
    weight = tf.compat.v1.get_variable("w", initializer=0.0, use_resource=True)
    adapter = FunctionAdapter(["w"], lambda grads: tf.group(applied.assign_add(grads[0])))
    accumulator = tfmp.GradientAccumulator([weight], 2)
    done = accumulate(scaler, adapter, [tf.constant(3.0)], scaler.facts(), accumulator)
    session.run(tf.compat.v1.global_variables_initializer())
    found = []
    for _ in range(4):
        session.run(done)
        found.append(session.run(applied))
    assert found == [0, 3, 3, 6]
