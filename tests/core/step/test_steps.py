"""What a step checks, measures, applies and tells, with adapters that keep what reaches them.

That each host skips, counts and goes on as it is promised, tests/contract shows.
"""

import math
from collections.abc import Sequence
from typing import Any

import pytest
import tensorflow as tf
from recording_adapters import (
    SCALERS,
    FunctionAdapter,
    OfTwo,
    RecordingAdapter,
    halving,
    numbers,
    run,
    scaler_of,
)
from stand_ins import Workers, run_horovod

import tfmp
from tfmp.core.distribute import SingleProcess
from tfmp.core.overflow.found import Checked, Found
from tfmp.core.step.norms import Measured, StepNorms
from tfmp.core.step.step import agree
from tfmp.types import Gradients

tf1 = tf.compat.v1


@pytest.mark.parametrize(
    ("settings", "are_scaled", "applied"),
    [
        # A program gets gradients as they are, with their factor; those in true magnitude with 1. If it clips, it gets
        # their norm too.
        ({}, True, ([2 + 2.0**-12, 16], 8, None)),
        ({"clips": True}, True, ([2 + 2.0**-12, 16], 8, pytest.approx(math.hypot(2 + 2.0**-12, 16)))),
        # In half precision they are unscaled and cast before: 2 + 2**-12 is no number of float16.
        ({"clips": True, "kernel": tf.float16}, False, ([2, 16], 1, pytest.approx(math.hypot(2, 16)))),
        ({"clips": True, "kernel": tf.float16}, True, ([0.25, 2], 1, pytest.approx(math.hypot(0.25, 2)))),
        # Without a program, gradients are unscaled and cast.
        ({"has_program": False, "kernel": tf.float16}, False, [2, 16]),
        ({"has_program": False, "kernel": tf.float16}, True, [0.25, 2]),
        ({"has_program": False}, True, [0.25 + 2.0**-15, 2]),
        # The next value of a variable is neither unscaled nor cast.
        ({"has_program": False, "overwritten": [1]}, True, [0.25 + 2.0**-15, 16]),
    ],
)
def test_optimizers_and_programs_get_gradients_in_the_form_they_take(
    settings: dict[str, Any], are_scaled: bool, applied: Any
) -> None:
    adapter = RecordingAdapter(**settings)
    run(SCALERS["finite"](), adapter, [tf.constant(2 + 2.0**-12), tf.constant(16.0)], are_scaled=are_scaled)
    assert adapter.applied == [applied]


@pytest.mark.parametrize("are_scaled", [False, True])
@pytest.mark.parametrize(
    ("kind", "grads", "distribution", "applied"),
    [
        # Saturated when it was scaled; the next value of a variable was never scaled, and no gradient overflowed.
        ("saturation", [1.0, 65504.0], None, False),
        ("saturation", [65504.0, 1.0], None, False),
        ("finite", [1.0, 65504.0], None, True),
        # The sum of scaled gradients over two replicas would overflow, but they are unscaled before they are summed.
        ("finite", [1.0, 3e38], OfTwo(), True),
        ("own detector", [1.0, 3e38], OfTwo(), True),
        ("largest magnitude", [1.0, 3e38], OfTwo(), True),
        ("ignores sums", [1.0, 3e38], OfTwo(), True),
        # A scale that can be less than 1 makes gradients larger: they are unscaled before they are checked.
        ("below 1", [1.0, 3e38], OfTwo(), True),
        ("finite", [1.0, 3e38], SingleProcess(), True),
    ],
)
def test_facts_decide_what_is_checked(
    kind: str, grads: list[float], distribution: Any, applied: bool, are_scaled: bool
) -> None:
    scaler, adapter = SCALERS[kind](), RecordingAdapter()
    given = [tf.constant(grad if are_scaled else grad / 8) for grad in grads]
    run(scaler, adapter, given, are_scaled=are_scaled, distribution=distribution)
    assert adapter.steps == [applied]


@pytest.mark.parametrize(("sums_first", "applied"), [(False, False), (True, True)])
def test_sum_that_is_checked_needs_no_room_for_further_replicas(sums_first: bool, applied: bool) -> None:
    adapter = RecordingAdapter()
    adapter.sums_first = sums_first
    run(SCALERS["finite"](), adapter, [None, tf.constant(3e38)], distribution=OfTwo())
    assert adapter.steps == [applied]


@pytest.mark.parametrize(
    ("grads", "overwritten", "of_window", "applied"),
    [
        ([1.0, 65504 / 8], [], False, False),
        ([1.0, 65504 / 8], [], True, True),
        ([1.0, math.nan], [], True, False),
        ([65504 / 8, 1.0], [], False, False),
        # What will be the next value of its variable was never scaled.
        ([1.0, 65504 / 8], [1], False, True),
    ],
)
def test_detector_looks_at_gradients_that_were_scaled_and_not_looked_at_before(
    grads: list[float], overwritten: list[int], of_window: bool, applied: bool
) -> None:
    scaler, adapter = SCALERS["saturation"](), RecordingAdapter(overwritten=overwritten)
    known = Checked(Found(tf.constant(True)), of_window=of_window)
    run(scaler, adapter, [tf.constant(grad) for grad in grads], known=known)
    assert adapter.steps == [applied]


@pytest.mark.graph
@pytest.mark.parametrize(("value", "expected"), [(1.0, [1, 8, 1]), (math.inf, [2, 4, 0])])
def test_step_of_a_graph_runs_what_the_adapter_counts(value: float, expected: list[int], session: tf1.Session) -> None:
    class Counting(FunctionAdapter):
        def on_step(self, applied: tf.Tensor) -> tf.Operation:
            return counted.assign(tf.where(applied, 1, 2)).op

    counted = tf1.get_variable("counted", initializer=0, use_resource=True)
    weight = tf1.get_variable("w", initializer=0.0, use_resource=True)
    manager = halving()
    adapter = Counting(["kernel"], lambda grads: tf.group(weight.assign_add(grads[0])))
    done = run(scaler_of(manager), adapter, [tf.constant(value)])
    session.run(tf1.global_variables_initializer())
    session.run(done)
    assert session.run([counted, manager.get_loss_scale(), weight]) == expected


def test_replicas_agree_on_what_each_found() -> None:
    class Agreeing(SingleProcess):
        def agree(self, answers: Sequence[tf.Tensor], grads: Gradients, names: Sequence[str]) -> list[tf.Tensor]:
            asked.append((numbers(answers), numbers(grads), list(names)))
            return [tf.constant(True), *answers[1:]]

    asked: list[Any] = []
    names = ["kernel", "bias"]
    for kind, grad, are_scaled in [("largest magnitude", -3.0, False), ("finite", 16.0, True)]:
        scaler, adapter = SCALERS[kind](), RecordingAdapter()
        run(scaler, adapter, [tf.constant(grad), None], are_scaled=are_scaled, distribution=Agreeing())
        assert (adapter.applied, adapter.steps) == ([], [False])
    assert asked == [([False, 3], [-3, None], names), ([False], [16, None], names)]
    earlier = Checked(Found(tf.constant(True), tf.constant(5.0)))
    result = agree(earlier.found, SCALERS["largest magnitude"](), Agreeing())
    assert asked[2:] == [([False, 5], [], [])]
    assert (bool(result.applied), bool(result.finite), float(result.max_abs)) == (False, False, 5)


@pytest.mark.parametrize(("is_step", "counted"), [(None, (1, 0)), (True, (1, 0)), (False, (0, 0))])
def test_result_moves_the_scale_also_if_it_is_no_step(is_step: bool | None, counted: tuple[int, int]) -> None:
    manager = halving()
    scaler = scaler_of(manager)
    for complete in (None, True, False):
        found = Found(tf.constant(True), complete=None if complete is None else tf.constant(complete))
        result = agree(found, scaler, SingleProcess())
        assert (bool(result.applied), bool(result.finite)) == (True, complete is not False)
        assert (result.finite is result.applied) is (complete is None)
    scaler.advance(result, None if is_step is None else tf.constant(is_step))
    status = manager.get_status()
    assert (int(status.applied_steps), int(status.skipped_steps)) == counted
    assert bool(status.last_step_finite) is (is_step is False)
    assert float(manager.get_loss_scale()) == 4


def test_counts_are_prepared_outside_of_replicas(two_replicas: tf.distribute.MirroredStrategy) -> None:
    scaler = scaler_of(halving())
    two_replicas.run(lambda: scaler.prepare(["on a replica"]))
    assert scaler.overflow_reports() == []
    with two_replicas.scope():
        scaler.prepare(["in a scope"])
    scaler.prepare(["alone"])
    assert [report.names for report in scaler.overflow_reports()] == [["in a scope"], ["alone"]]


def test_user_sees_the_manager_and_in_eager_programs_the_steps() -> None:
    def optimizer() -> tfmp.LossScaleOptimizer:
        return tfmp.LossScaleOptimizer(tf1.train.GradientDescentOptimizer(0.5), halving())

    with tf.Graph().as_default():
        shown = repr(optimizer())
        assert shown.startswith("<tfmp.LossScaleOptimizer(")
        assert "<ExponentialUpdateLossScaleManager(init_loss_scale=8.0, incr_every_n_steps=100, decr_every" in shown
        assert "applied_steps" not in shown
    opt, weight, seen = optimizer(), tf.Variable(4.0), []
    for factor in (1.0, math.inf):
        opt.minimize(lambda factor=factor: weight * factor, var_list=[weight])
    tf.function(lambda: seen.append(repr(opt)))()
    assert seen == [repr(opt)]
    assert repr(opt).endswith(">): applied_steps=1, skipped_steps=1>")
    assert int(opt.attempted_steps) == 2
    assert opt.record_gradient_ranges() is opt.record_gradient_ranges() is not None


def test_integer_loss_is_refused() -> None:
    with pytest.raises(TypeError, match="the loss must be of a floating-point type, got int32"):
        scaler_of(halving()).scale(tf.constant(3))


@pytest.mark.parametrize(
    ("aggregation_dtype", "are_scaled", "value", "dtype", "sent"),
    [
        # As float16, the first gradient would be 0: in half precision gradients travel scaled.
        (tf.float16, False, 2.0**-28, tf.float32, 2.0**-8),
        (tf.float16, False, 2.0**-20, tf.float16, 1.0),
        # Others travel as they are.
        (tf.float16, True, 2.0**-8, tf.float32, 2.0**-8),
        (None, True, 2.0**-8, tf.float32, 2.0**-8),
        (None, False, 2.0**-8, tf.float32, 2.0**-8),
    ],
)
def test_gradients_travel_in_the_type_of_the_aggregation_and_come_back_as_they_were(
    aggregation_dtype: tf.DType | None, are_scaled: bool, value: float, dtype: tf.DType, sent: float
) -> None:
    manager, workers, names = tfmp.FixedLossScaleManager(2.0**20), Workers(), ["kernel", "bias"]
    scaler = scaler_of(manager, is_distributed=True, aggregation_dtype=aggregation_dtype)
    grads = [tf.constant(value, dtype), None]
    mean, none = scaler.mean_over_workers(grads, names, workers, are_scaled=are_scaled)
    assert workers.averaged == [([sent, None], names, aggregation_dtype)]
    assert (float(mean), mean.dtype, none) == (value / 2, dtype, None)


@pytest.mark.parametrize(
    ("size", "is_distributed", "warnings"),
    [(None, False, 0), (1, False, 0), (1, True, 0), (2, True, 0), (2, False, 1), (3, False, 1)],
)
def test_setting_of_the_user_decides_whether_horovod_distributes_and_one_warning_is_given_if_nothing_does(
    size: int | None,
    is_distributed: bool,
    warnings: int,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    if size is not None:
        run_horovod(monkeypatch, size)
    scaler = scaler_of(halving(), is_distributed=is_distributed)
    assert repr(scaler.distribution()) == ("Horovod()" if is_distributed and size != 1 else "SingleProcess()")
    grads = [tf.constant(2.0), None]
    for _ in range(2):
        assert scaler.mean_over_workers(grads, ["kernel", "bias"], SingleProcess()) == grads
    assert caplog.text.count(f"Horovod runs {size} processes, and nothing averages the gradients over them") == warnings


@pytest.mark.parametrize(
    ("values", "dtype", "loss_scale", "is_summed", "norm"),
    [
        # Divided by the loss scale.
        (([24.0], [32.0]), tf.float32, 8.0, True, 5),
        (([3.0], [4.0]), tf.float32, None, True, 5),
        # Summed over the replicas, unless they are already; half precision in float32.
        (([3.0, 4.0], None), tf.float32, None, True, 5),
        (([3.0, 4.0], None), tf.float32, None, False, 10),
        (([40000.0], None), tf.float16, None, False, 80000),
        # The sum of the scaled ones would overflow.
        (([2.0**127], None), tf.float32, 2.0**100, False, 2**28),
    ],
)
def test_norm_is_that_of_the_unscaled_sum(
    values: Any, dtype: tf.DType, loss_scale: Any, is_summed: bool, norm: float
) -> None:
    grads = [None if each is None else tf.constant(each, dtype) for each in values]
    measured = Measured(grads, None if loss_scale is None else tf.constant(loss_scale), is_summed)
    assert float(measured.norm(["kernel", "bias"], OfTwo())) == norm


@pytest.mark.graph
def test_nobody_wants_the_norm_unless_it_is_recorded_compared_or_may_be_fetched_from_a_graph() -> None:
    norms, found = StepNorms(halving()), list[tuple[bool, bool]]()

    def ask(norms: StepNorms = norms) -> None:
        found.append((norms.are_wanted, norms.is_recorded))

    with tf.Graph().as_default():
        ask()
        tf.function(ask)()
    assert found == [(True, False), (False, False)]
    found.clear()
    if tf1.executing_eagerly():
        ask()
        tf.function(ask)()
        assert found == [(False, False)] * 2
        found.clear()
    norms.record()
    ask()
    ask(StepNorms(halving(), tfmp.SpikeDetector()))
    assert found == [(True, True)] * 2
