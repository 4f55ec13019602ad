"""The path of gradients through a step, with adapters that keep what reaches them."""

import math
from collections.abc import Sequence
from typing import Any

import pytest
import tensorflow as tf
from function_steps import FunctionAdapter, take_step
from recording_adapters import SCALERS, RecordingAdapter, halving, numbers, scaler_of
from stand_in_horovod import run_horovod

import tfmp
from tfmp.core.distribute import SingleProcess
from tfmp.core.overflow.results import EarlierCheck, LocalResult, StepResult
from tfmp.core.step.choice import update_of_scaled, update_of_unscaled
from tfmp.core.step.scaler import LossScaler
from tfmp.types import Gradient, Gradients


def test_scale_and_unscale_use_the_current_scale() -> None:
    manager = halving()
    scaler = scaler_of(manager)
    manager.update_loss_scale(tf.constant(False))
    assert float(scaler.scale(tf.constant(3.0))) == 12
    assert float(scaler.unscale([tf.constant(12.0)])[0]) == 3


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "function"])
@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_step_applies_finite_gradients_and_skips_others(compiled: bool, bad: float) -> None:
    manager = halving()
    scaler = scaler_of(manager)
    weight = tf.Variable(0.0)

    def apply(grads: Gradients) -> tf.Operation:
        return tf.group(weight.assign_add(grads[0]))

    def step(grad: tf.Tensor) -> None:
        take_step(scaler, [grad, None], ["kernel", "bias"], apply)

    run = tf.function(step) if compiled else step
    for grad in [1.0, bad, 2.0]:
        run(tf.constant(grad))
    assert float(weight) == 3
    assert float(manager.get_loss_scale()) == 4


def test_detector_decides_what_is_skipped() -> None:
    manager = halving()
    scaler = scaler_of(manager, tfmp.SaturationDetector())
    take_step(
        scaler, [tf.constant(65504.0 / 8)], ["kernel"], lambda grads: pytest.fail("a saturated gradient was applied")
    )
    assert float(manager.get_loss_scale()) == 4


@pytest.mark.parametrize("is_distributed", [False, True])
def test_setting_of_the_user_decides_whether_horovod_distributes(
    is_distributed: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    run_horovod(monkeypatch, 2)
    scaler = LossScaler(halving(), tfmp.NonFiniteDetector(), is_distributed)
    assert repr(scaler.distribution()) == ("Horovod()" if is_distributed else "SingleProcess()")
    scaler.worker_average.warn_if_missing()
    assert ("nothing averages the gradients" in caplog.text) is not is_distributed


def test_gradients_are_averaged_by_the_type_of_the_aggregation_and_by_the_scale_of_the_manager() -> None:
    class Averaging(SingleProcess):
        def mean(self, grads: Gradients, names: Sequence[str], dtype: tf.DType | None) -> list[Gradient]:
            asked.append((numbers(grads), list(names), dtype))
            return [None if grad is None else grad / 2 for grad in grads]

    asked: list[Any] = []
    scaler = LossScaler(halving(), tfmp.NonFiniteDetector(), is_distributed=True, aggregation_dtype=tf.float16)
    grads = [tf.constant(2.0), None]
    assert numbers(scaler.worker_average.mean(grads, ["a", "b"], Averaging(), are_scaled=False)) == [1, None]
    # In half precision they travel scaled.
    assert asked == [([16, None], ["a", "b"], tf.float16)]


@pytest.mark.parametrize(("is_step", "counted"), [(None, (1, 0)), (True, (1, 0)), (False, (0, 0))])
def test_result_that_is_no_step_moves_the_scale_and_is_not_counted(
    is_step: bool | None, counted: tuple[int, int]
) -> None:
    manager = halving()
    result = StepResult(usable=tf.constant(True), complete=tf.constant(False))
    scaler_of(manager).advance(result, None if is_step is None else tf.constant(is_step))
    status = manager.get_status()
    assert (int(status.applied_steps), int(status.skipped_steps)) == counted
    assert bool(status.last_step_finite) is (is_step is False)
    assert float(manager.get_loss_scale()) == 4


@pytest.mark.graph
def test_overflow_reports_are_those_of_the_graph_or_of_eager_code(session: tf.compat.v1.Session) -> None:
    scaler = scaler_of(tfmp.FixedLossScaleManager(8))
    take_step(scaler, [tf.constant(1.0)], ["kernel"], lambda grads: tf.no_op())
    assert [report.names for report in scaler.overflow_reports()] == [["kernel"]]
    with tf.Graph().as_default():
        assert scaler.overflow_reports() == []
        take_step(scaler, [tf.constant(1.0)], ["bias"], lambda grads: tf.no_op())
        assert [report.names for report in scaler.overflow_reports()] == [["bias"]]


def test_counts_are_prepared_outside_of_replicas(two_replicas: tf.distribute.MirroredStrategy) -> None:
    scaler = scaler_of(halving())
    two_replicas.run(lambda: scaler.prepare(["on a replica"]))
    assert scaler.overflow_reports() == []
    with two_replicas.scope():
        scaler.prepare(["in a scope"])
    scaler.prepare(["alone"])
    assert [report.names for report in scaler.overflow_reports()] == [["in a scope"], ["alone"]]


def test_replicas_agree_on_what_each_found() -> None:
    class Agreeing(SingleProcess):
        def agree(
            self, usable: tf.Tensor, max_abs: tf.Tensor | None, grads: Gradients, names: Sequence[str]
        ) -> tuple[tf.Tensor, tf.Tensor | None]:
            asked.append((bool(usable), None if max_abs is None else float(max_abs), numbers(grads), list(names)))
            return tf.constant(False), max_abs

    asked: list[Any] = []
    scaler, adapter = SCALERS["largest magnitude"](), RecordingAdapter()
    scaler.step(update_of_unscaled(adapter, [tf.constant(-3.0), None], scaler.facts(Agreeing())))
    result = scaler.agree_early(EarlierCheck(LocalResult(tf.constant(True), tf.constant(5.0))), Agreeing())
    assert asked == [(True, 3, [-3, None], ["kernel", "bias"]), (True, 5, [], [])]
    assert (bool(result.applied), bool(result.finite), float(result.max_abs)) == (False, False, 5)
    assert (adapter.applied, adapter.steps) == ([], [False])
    asked.clear()
    scaler, adapter = SCALERS["finite"](), RecordingAdapter()
    scaler.step(update_of_scaled(adapter, [tf.constant(16.0), None], scaler.facts(Agreeing())))
    assert asked == [(True, None, [16, None], ["kernel", "bias"])]
    assert (adapter.applied, adapter.steps) == ([], [False])


@pytest.mark.parametrize(("complete", "finite"), [(None, True), (True, True), (False, False)])
def test_step_that_drops_a_micro_batch_is_applied_and_not_finite(complete: bool | None, finite: bool) -> None:
    found = LocalResult(tf.constant(True), complete=None if complete is None else tf.constant(complete))
    result = scaler_of(halving()).agree_early(EarlierCheck(found), SingleProcess())
    assert (bool(result.applied), bool(result.finite)) == (True, finite)
    assert (result.finite is result.applied) is (complete is None)


@pytest.mark.graph
@pytest.mark.parametrize("value", [1.0, math.inf])
def test_step_of_a_graph_moves_the_scale_and_runs_what_the_adapter_counts(
    value: float, session: tf.compat.v1.Session
) -> None:
    class Counting(FunctionAdapter):
        def on_step(self, applied: tf.Tensor) -> tf.Operation:
            return counted.assign(tf.where(applied, 1, 2)).op

    counted = tf.compat.v1.get_variable("counted", initializer=0, use_resource=True)
    weight = tf.compat.v1.get_variable("w", initializer=0.0, use_resource=True)
    manager = halving()
    scaler = scaler_of(manager)
    adapter = Counting(["kernel"], lambda grads: tf.group(weight.assign_add(grads[0])))
    done = scaler.step(update_of_unscaled(adapter, [tf.constant(value)], scaler.facts()))
    session.run(tf.compat.v1.global_variables_initializer())
    session.run(done)
    found = session.run([counted, manager.get_loss_scale(), weight])
    assert found == ([1, 8, 1] if math.isfinite(value) else [2, 4, 0])
