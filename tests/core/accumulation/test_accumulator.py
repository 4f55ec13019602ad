import itertools
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from function_steps import take_step
from gradient_forms import TYPES
from hypothesis import given, settings
from hypothesis import strategies as st

import tfmp
from tfmp.core.accumulation.accumulator import accumulator_of_optimizer
from tfmp.core.accumulation.settings import accumulation_settings
from tfmp.core.gradients.arithmetic import densify
from tfmp.core.step.scaler import LossScaler
from tfmp.types import Gradients

_POLICIES = ["window", "micro_batch"]
_SCALE = 2.0**20
_TWO_STEPS = accumulation_settings(2, "window", None)
_MODES: dict[str, Callable[..., Any]] = {
    "eager": lambda function: function,
    "function": tf.function,
    "xla": tf.function(jit_compile=True),
}


def _windows(values: Sequence[float], steps: int, per_epoch: int | None) -> list[list[float]]:
    """Return the values of each window that ends."""
    windows: list[list[float]] = []
    for epoch in (
        [values[start : start + per_epoch] for start in range(0, len(values), per_epoch)] if per_epoch else [values]
    ):
        windows += [list(epoch[start : start + steps]) for start in range(0, len(epoch), steps)]
        if len(epoch) != per_epoch and len(windows[-1]) < steps:
            windows.pop()
    return windows


def _mean(window: Sequence[float], overflow_drops: str) -> np.float32 | None:
    """Return the mean of the finite values, in float32; None where nothing is to be applied."""
    kept = [np.float32(value) for value in window if math.isfinite(value)]
    if not kept or (overflow_drops == "window" and len(kept) < len(window)):
        return None
    return sum(kept, np.float32(0)) / np.float32(len(kept))


class _Training:
    """A weight that each window sets to its mean, and one that the loss does not depend on."""

    def __init__(self, *args: Any, **accumulation: Any) -> None:
        self.weight, self.other = tf.Variable(0.0), tf.Variable(0.0)
        self.manager = tfmp.ExponentialUpdateLossScaleManager(_SCALE, 10**6, decr_every_n_nan_or_inf=1, decr_ratio=0.5)
        self.scaler = LossScaler(self.manager, tfmp.NonFiniteDetector(), is_distributed=False)
        self.accumulator = tfmp.GradientAccumulator([self.weight, self.other], *args, **accumulation)
        self.scaler.prepare(["weight", "other"])

    def step(self, grad: tf.Tensor) -> None:
        take_step(self.scaler, [grad, None], ["weight", "other"], self._apply, accumulator=self.accumulator)

    def _apply(self, grads: Gradients) -> tf.Operation:
        assert grads[1] is None
        return tf.group(self.weight.assign(grads[0]))

    def told(self) -> tuple[float, float, int, int]:
        outcomes = self.manager.get_status()
        scale = float(self.manager.get_loss_scale())
        return float(self.weight), scale, int(outcomes.applied_steps), int(outcomes.skipped_steps)


def _expected(windows: list[list[float]], overflow_drops: str) -> tuple[float, float, int, int]:
    """Return what a training tells after some windows."""
    means = [_mean(window, overflow_drops) for window in windows]
    applied = [float(mean) for mean in means if mean is not None]
    overflowed = sum(not all(map(math.isfinite, window)) for window in windows)
    return (applied or [0.0])[-1], _SCALE * 0.5**overflowed, len(applied), len(means) - len(applied)


_VALUES = st.one_of(st.floats(-1e4, 1e4, width=32, allow_subnormal=False), st.sampled_from([math.inf, math.nan]))


@settings(deadline=None, max_examples=30)
@given(
    st.lists(_VALUES, min_size=1, max_size=12),
    st.integers(1, 5),
    st.sampled_from(_POLICIES),
    st.one_of(st.none(), st.integers(1, 7)),
)
def test_each_window_applies_the_mean_of_what_it_kept(
    values: list[float], steps: int, overflow_drops: str, per_epoch: int | None
) -> None:
    training = _Training(steps, overflow_drops=overflow_drops, micro_batches_per_epoch=per_epoch)
    for count, value in enumerate(values, 1):
        training.step(tf.constant(value))
        assert training.told() == _expected(_windows(values[:count], steps, per_epoch), overflow_drops)


@pytest.mark.parametrize("mode", _MODES)
@pytest.mark.parametrize("overflow_drops", _POLICIES)
def test_windows_are_the_same_in_every_mode(mode: str, overflow_drops: str) -> None:
    values = [1.0, 3.0, math.inf, 5.0, math.nan, -math.inf, 7.0, 2.0, 9.0]
    training = _Training(2, overflow_drops=overflow_drops, micro_batches_per_epoch=7)
    step = _MODES[mode](training.step)
    for count, value in enumerate(values, 1):
        step(tf.constant(value))
        assert training.told() == _expected(_windows(values[:count], 2, 7), overflow_drops)
    (report,) = training.scaler.overflow_reports()
    # Of the last window that overflowed; and on how many steps each variable did.
    assert report.last.numpy().tolist() == [[1, 1, 0], [0, 0, 0]]
    assert report.steps.numpy().tolist() == [2, 0]


def test_102_micro_batches_in_windows_of_4_end_with_a_mean_of_2() -> None:
    training = _Training(4, micro_batches_per_epoch=102)
    step = tf.function(training.step)
    means = []
    for index in [*range(102), *range(4)]:
        step(tf.constant(float(index)))
        means.append(float(training.weight))
    assert means[3:100:4] == [4 * window + 1.5 for window in range(25)]
    assert means[100:] == [97.5, 100.5, 100.5, 100.5, 100.5, 1.5]
    assert int(training.manager.get_status().applied_steps) == 27


@pytest.mark.parametrize("dtype", TYPES)
def test_sums_are_wide_and_means_are_of_the_variables_type(dtype: tf.DType) -> None:
    accumulator = tfmp.GradientAccumulator([tf.Variable(tf.zeros([2], dtype))], 2)
    assert accumulator.sums[0].dtype == (tf.float64 if dtype == tf.float64 else tf.float32)
    # 2**16 in the sum is infinite in float16, and 1 + 2**-20 is not in bfloat16; 2**-40 is in float64 only.
    for grad in ([2.0**15, 1.0], [2.0**15, 2.0**-20 + 2.0**-40]):
        accumulator.add([tf.constant(grad, tf.float64 if dtype == tf.float64 else tf.float32)])
    tail = 2.0**-20 + (2.0**-40 if dtype == tf.float64 else 0)
    assert accumulator.sums[0].numpy().tolist() == [2.0**16, 1 + tail]
    (mean,) = accumulator.mean()
    assert mean.dtype == dtype
    assert mean.numpy().tolist() == tf.cast(tf.constant([2.0**15, (1 + tail) / 2], tf.float64), dtype).numpy().tolist()


def test_mean_of_float64_has_the_precision_of_float64() -> None:
    variable = tf.Variable(tf.zeros([], tf.float64))
    accumulator = tfmp.GradientAccumulator([variable], 3)
    values = [0.1, 0.2, 0.7]
    for value in values:
        accumulator.add([tf.constant(value, tf.float64)])
    assert float(accumulator.mean()[0]) == sum(values) / 3
    # At the end of a window too.
    opt = tf.compat.v1.train.GradientDescentOptimizer(1.0)
    scaler = LossScaler(tfmp.FixedLossScaleManager(1), tfmp.NonFiniteDetector(), is_distributed=False)
    accumulator.reset()
    for value in values:
        grad = tf.constant(value, tf.float64)
        take_step(
            scaler, [grad], ["w"], lambda grads: opt.apply_gradients([(grads[0], variable)]), accumulator=accumulator
        )
    assert float(variable) == -sum(values) / 3


@pytest.mark.parametrize(("keeps_float32", "dtype"), [(False, tf.float16), (True, tf.float32)])
def test_mean_may_stay_in_float32(keeps_float32: bool, dtype: tf.DType) -> None:
    variable = tf.Variable(tf.zeros([], tf.float16))
    accumulator = accumulator_of_optimizer([variable], _TWO_STEPS, None, keeps_float32=keeps_float32)
    accumulator.add([tf.constant(2.0**-10)])
    assert accumulator.mean()[0].dtype == dtype


def test_owner_of_the_variables_is_told_their_names_shapes_and_types() -> None:
    made = []

    def add_buffer(name: str, shape: Sequence[int], dtype: tf.DType) -> tf.Variable:
        made.append((name, list(shape), dtype.name))
        return tf.Variable(tf.zeros(shape, dtype))

    variables = [tf.Variable(tf.zeros([2, 3], tf.float16)), tf.Variable(tf.zeros([], tf.float64))]
    accumulator = accumulator_of_optimizer(variables, _TWO_STEPS, None, add_buffer)
    assert made == [
        ("sum_0", [2, 3], "float32"),
        ("sum_1", [], "float64"),
        ("kept", [], "float64"),
        ("tried", [], "float64"),
        ("tried_in_epoch", [], "float64"),
        ("largest", [], "float32"),
        ("overflows", [2, 3], "float64"),
    ]
    accumulator.add([tf.ones([2, 3]), None])
    assert float(accumulator.tried) == 1


def test_no_optimizer_trains_the_variables_of_an_accumulator() -> None:
    assert tfmp.GradientAccumulator([tf.Variable(0.0)], 2).trainable_variables == ()


def test_largest_magnitude_is_that_of_the_micro_batches_that_were_kept() -> None:
    accumulator = tfmp.GradientAccumulator([tf.Variable(0.0), tf.Variable(0.0)], 8)
    for value in (2.0, -8.0, math.inf, 4.0):
        accumulator.add([tf.constant(16 * value), tf.constant(1.0)], 16.0)
    accumulator.add_unscaled([tf.constant(32.0), None], tf.constant(1.0), keeps_max_abs=False)
    assert float(accumulator.largest) == 8
    accumulator.add_unscaled([tf.constant(32.0), None], tf.constant(1.0))
    assert float(accumulator.largest) == 32
    accumulator.reset()
    assert float(accumulator.largest) == 0


@pytest.mark.parametrize(
    ("overflow_drops", "values", "mean", "usable", "complete"),
    [
        ("window", [2.0, math.inf, 6.0], 4.0, False, None),
        ("window", [2.0, 6.0], 4.0, True, None),
        ("micro_batch", [2.0, math.inf, 6.0], 4.0, True, False),
        ("micro_batch", [2.0, 6.0], 4.0, True, True),
        # Not NaN, which would be counted as an overflow of every variable.
        ("micro_batch", [math.inf], 0.0, False, False),
    ],
)
def test_end_of_a_window_tells_what_became_of_its_micro_batches(
    overflow_drops: str, values: list[float], mean: float, usable: bool, complete: bool | None
) -> None:
    accumulator = tfmp.GradientAccumulator([tf.Variable(0.0)], 3, overflow_drops=overflow_drops)
    for value in values:
        accumulator.add([tf.constant(value)])
    # A checkpoint of several replicas restores parts of a count.
    accumulator.overflows.assign_add([[0.0, 0.25, 0.0]])
    (grad,), known, _ = accumulator.drain(lambda counts: counts)
    check = known.result
    assert float(grad) == mean
    assert bool(check.usable) is usable
    assert (None if check.complete is None else bool(check.complete)) is complete
    assert known.overflow_counts.numpy().tolist() == [[int(math.inf in values), 1, 0]]
    assert float(check.max_abs) == max([0.0, *(value for value in values if value < math.inf)])
    assert known.of_micro_batches
    with pytest.raises(RuntimeError, match=r"^the window is empty: add gradients first"):
        accumulator.drain(lambda counts: counts)


@pytest.mark.graph
def test_run_that_fails_before_it_has_gradients_does_not_count(session: tf.compat.v1.Session) -> None:
    fed = tf.compat.v1.placeholder(tf.float32, [])
    accumulator = tfmp.GradientAccumulator([tf.compat.v1.get_variable("weight", initializer=0.0)], 2)
    added = accumulator.add([tf.debugging.check_numerics(fed, "the input ended")])
    session.run(tf.compat.v1.global_variables_initializer())
    for _ in range(3):
        with pytest.raises(tf.errors.InvalidArgumentError, match="the input ended"):
            session.run(added, {fed: math.nan})
    session.run(added, {fed: 2.0})
    counters = [accumulator.tried, accumulator.tried_in_epoch, accumulator.kept]
    assert session.run([*counters, accumulator.largest]) == [1, 1, 1, 2]


def test_scaled_gradients_are_unscaled_before_they_are_added() -> None:
    accumulator = tfmp.GradientAccumulator([tf.Variable(0.0)], 2)
    for scale in (1024.0, 512.0):
        accumulator.add([tf.constant(3 * scale, tf.float16)], loss_scale=tf.constant(scale))
    assert [float(grad) for grad in accumulator.mean()] == [3]


def test_accumulator_alone_begins_anew_when_it_is_reset() -> None:
    accumulator = tfmp.GradientAccumulator([tf.Variable(0.0)], 2, micro_batches_per_epoch=3)
    means, ends = [], []
    for value in [1.0, math.inf, 4.0, 5.0, 7.0]:
        accumulator.add([tf.constant(value)])
        ends.append(bool(accumulator.is_full))
        if ends[-1]:
            means.append(float(accumulator.mean()[0]))
            accumulator.reset()
    assert ends == [False, True, True, False, True]
    assert means == [1, 4, 6]
    assert accumulator.overflows.numpy().tolist() == [[0, 0, 0]]


def test_gradient_that_some_micro_batches_lack_is_0_there() -> None:
    accumulator = tfmp.GradientAccumulator([tf.Variable(0.0) for _ in range(3)], 2)
    accumulator.add([tf.constant(2.0), None, None])
    accumulator.add([tf.constant(4.0), tf.constant(6.0), None])
    first, second, third = accumulator.mean()
    assert (float(first), float(second), third) == (3, 3, None)


@pytest.mark.parametrize("mode", _MODES)
def test_sparse_gradient_is_sparse_again_with_the_rows_it_touched(mode: str) -> None:
    accumulator = tfmp.GradientAccumulator([tf.Variable(tf.zeros([5, 2], tf.float16))], 2)

    def add(values: tf.Tensor, indices: tf.Tensor) -> None:
        accumulator.add([tf.IndexedSlices(values, indices, tf.constant([5, 2], tf.int64))])

    add = _MODES[mode](add)
    add(tf.constant([[1.0, 2.0], [3.0, 4.0]]), tf.constant([3, 3], tf.int64))
    add(tf.constant([[8.0, 0.0], [4.0, 4.0]]), tf.constant([1, 3], tf.int64))
    (mean,) = accumulator.mean()
    assert isinstance(mean, tf.IndexedSlices)
    assert mean.indices.numpy().tolist() == [1, 3]
    assert mean.values.dtype == tf.float16
    assert mean.values.numpy().tolist() == [[4, 0], [4, 5]]
    accumulator.reset()
    add(tf.constant([[2.0, 2.0], [0.0, 0.0]]), tf.constant([0, 3], tf.int64))
    assert densify(accumulator.mean()[0]).numpy().tolist() == [[2, 2], *[[0, 0]] * 4]


def test_mean_has_the_form_of_the_last_gradient_of_its_variable() -> None:
    accumulator = tfmp.GradientAccumulator([tf.Variable(tf.zeros([2, 1])) for _ in range(3)], 2)
    rows, dense = tf.IndexedSlices(tf.ones([1, 1]), tf.constant([1])), tf.ones([2, 1])
    accumulator.add([rows, rows, dense])
    accumulator.add([dense, None, rows])
    assert [type(grad) is tf.IndexedSlices for grad in accumulator.mean()] == [False, True, True]
    assert [densify(grad).numpy().tolist() for grad in accumulator.mean()[:2]] == [[[0.5], [1.0]], [[0.0], [0.5]]]


def test_sum_that_overflows_though_no_micro_batch_did_skips_the_window() -> None:
    for overflow_drops in _POLICIES:
        training = _Training(2, overflow_drops=overflow_drops)
        for _ in range(2):
            training.step(tf.constant(3e38))
        assert training.told() == (0, _SCALE / 2, 0, 1)


def test_micro_batch_that_saturated_is_dropped_by_a_detector_that_sees_it() -> None:
    detector = tfmp.SaturationDetector()
    training = _Training(3, overflow_drops="micro_batch", overflow_detector=detector)
    for value in [2.0**-6, 65504 / _SCALE, 2.0**-5]:
        training.step(tf.constant(value))
    assert training.told() == (1.5 * 2.0**-6, _SCALE / 2, 1, 0)
    (report,) = training.scaler.overflow_reports()
    assert report.last.numpy().tolist() == [[0, 0, 1], [0, 0, 0]]


@pytest.mark.parametrize("loss_scale", [_SCALE, tf.float64], ids=["number", "float64 tensor"])
def test_detector_is_told_the_scale_that_gradients_are_added_with(loss_scale: Any) -> None:
    detector = tfmp.SaturationDetector()
    accumulator = tfmp.GradientAccumulator(
        [tf.Variable(0.0)], 2, overflow_drops="micro_batch", overflow_detector=detector
    )
    scale = loss_scale if isinstance(loss_scale, float) else tf.constant(_SCALE, loss_scale)
    for scaled in (65504.0, 8.0):
        accumulator.add([tf.constant(scaled)], loss_scale=scale)
    assert (float(accumulator.kept), float(accumulator.sums[0])) == (1, 2.0**-17)


def test_checkpoint_inside_a_window_goes_on_exactly(tmp_path: Path) -> None:
    values = [0.1, math.inf, 0.3, 0.7, 1.1, 1.3, 1.7]
    settings_ = {"overflow_drops": "micro_batch", "micro_batches_per_epoch": 5}
    straight = _Training(3, **settings_)
    for value in values:
        straight.step(tf.constant(value))
    first, second = _Training(3, **settings_), _Training(3, **settings_)
    for value in values[:2]:
        first.step(tf.constant(value))
    path = tf.train.Checkpoint(accumulator=first.accumulator, manager=first.manager).save(tmp_path / "inside")
    checkpoint = tf.train.Checkpoint(accumulator=second.accumulator, manager=second.manager)
    checkpoint.restore(path).assert_consumed()
    for value in values[2:]:
        second.step(tf.constant(value))
    assert second.told() == straight.told()
    assert (
        second.accumulator.sums[0].numpy() == straight.accumulator.sums[0].numpy() == np.float32(1.3) + np.float32(1.7)
    )


def test_restored_window_has_the_gradients_that_it_was_saved_with(tmp_path: Path) -> None:
    def make() -> tuple[tfmp.GradientAccumulator, tf.train.Checkpoint]:
        accumulator = tfmp.GradientAccumulator([tf.Variable(0.0) for _ in range(3)], 2)
        return accumulator, tf.train.Checkpoint(accumulator=accumulator)

    saved, checkpoint = make()
    saved.add([tf.constant(2.0), tf.constant(4.0), None])
    path = checkpoint.save(tmp_path / "inside")
    restored, checkpoint = make()
    checkpoint.restore(path).assert_consumed()
    assert [None if grad is None else float(grad) for grad in restored.mean()] == [2, 4, None]
    going_on, checkpoint = make()
    checkpoint.restore(path).assert_consumed()
    going_on.add([tf.constant(6.0), None, None])
    assert [None if grad is None else float(grad) for grad in going_on.mean()] == [4, 2, None]


def test_variable_that_a_traced_end_of_the_window_leaves_out_is_not_lost_silently() -> None:
    variables = [tf.Variable(0.0, name=name) for name in "xyz"]
    accumulator = tfmp.GradientAccumulator(variables, 2)

    def add(of_others: float | None) -> None:
        accumulator.add([tf.constant(1.0), *[of_others if of_others is None else tf.constant(of_others)] * 2])

    traced = tf.function(add)
    traced(None)
    assert tf.function(accumulator.mean)()[1:] == [None, None]
    for add_or_traced in (traced, add):
        with pytest.raises(ValueError, match=r"no gradient for y:0, z:0 when .* pass tf.zeros_like"):
            add_or_traced(2.0)
    assert accumulator.mean()[1:] == [None, None]
    # In the other order nothing was left out.
    accumulator = tfmp.GradientAccumulator(variables, 2)
    add(2.0)
    add(None)
    assert [float(grad) for grad in tf.function(accumulator.mean)()] == [1, 1, 1]


def test_mean_of_an_empty_window_is_refused() -> None:
    accumulator = tfmp.GradientAccumulator([tf.Variable(0.0)], 2)
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"^the window is empty: add gradients first"):
            accumulator.mean()
        accumulator.add([tf.constant(1.0)])
        accumulator.reset()


def test_log_max_follows_the_largest_micro_batch_not_the_mean() -> None:
    managers = [tfmp.LogMaxLossScaleManager() for _ in range(2)]
    accumulator = tfmp.GradientAccumulator([tf.Variable(0.0)], 4)
    scaler = LossScaler(managers[0], tfmp.NonFiniteDetector(), is_distributed=False)

    @tf.function
    def step(grad: tf.Tensor) -> None:
        take_step(scaler, [grad], ["w"], lambda _: tf.no_op(), accumulator=accumulator)

    for window in ([1.0, -8.0, 2.0, 0.5], [0.25, 0.5, 0.0, 2.0]):
        for value in window:
            step(tf.constant(value))
        managers[1].update_loss_scale(tf.constant(True), tf.constant(max(map(abs, window))))
        assert managers[0].state_dict() == managers[1].state_dict()


@pytest.mark.parametrize("mode", ["eager", "function"])
@pytest.mark.parametrize("overflow_drops", _POLICIES)
def test_replicas_share_a_window_whatever_overflowed_on_one(
    two_replicas: tf.distribute.MirroredStrategy, overflow_drops: str, mode: str
) -> None:
    with two_replicas.scope():
        weight = tf.Variable(0.0)
        manager = tfmp.ExponentialUpdateLossScaleManager(_SCALE, 1000, decr_every_n_nan_or_inf=1, decr_ratio=0.5)
        accumulator = tfmp.GradientAccumulator([weight], 2, overflow_drops=overflow_drops)
    scaler = LossScaler(manager, tfmp.NonFiniteDetector(), is_distributed=True)
    opt = tf.compat.v1.train.GradientDescentOptimizer(1.0)

    def of_replica(values: tf.Tensor) -> None:
        # A replica's gradient is its share of the mean.
        share = values[tf.distribute.get_replica_context().replica_id_in_sync_group] / 2
        take_step(
            scaler,
            [share],
            ["weight"],
            lambda grads: opt.apply_gradients([(grads[0], weight)]),
            accumulator=accumulator,
        )

    step = _MODES[mode](lambda values: two_replicas.run(of_replica, args=(values,)))
    # The second replica alone overflows; then none; then both in all micro-batches.
    windows = [[[1.0, 3.0], [8.0, math.inf]], [[2.0, 4.0], [6.0, 8.0]], [[math.inf, math.nan]] * 2]
    seen = []
    for values in itertools.chain(*windows):
        step(tf.constant(values))
        seen.append([float(value) for value in two_replicas.experimental_local_results(weight)])
    # The means are 4 and 5.
    moved = [-4.0, -9.0] if overflow_drops == "micro_batch" else [0.0, -5.0]
    assert seen == [[value] * 2 for value in (0.0, moved[0], moved[0], moved[1], moved[1], moved[1])]
    outcomes = manager.get_status()
    assert int(outcomes.applied_steps) == (2 if overflow_drops == "micro_batch" else 1)
    assert float(manager.get_loss_scale()) == _SCALE / 4
    (report,) = scaler.overflow_reports()
    assert report.steps.numpy().tolist() == [2]


def _own(values: tf.Tensor) -> tf.Tensor:
    return values[tf.distribute.get_replica_context().replica_id_in_sync_group]


@pytest.mark.parametrize(("steps", "per_epoch"), [(4, None), (8, 4)])
def test_window_is_full_at_the_same_time_within_and_outside_of_replicas(
    two_replicas: tf.distribute.MirroredStrategy, steps: int, per_epoch: int | None
) -> None:
    with two_replicas.scope():
        weight = tf.Variable(tf.zeros([3, 1]))
        accumulator = tfmp.GradientAccumulator([weight], steps, micro_batches_per_epoch=per_epoch)

    def add(values: tf.Tensor) -> None:
        rows = tf.stack([tf.distribute.get_replica_context().replica_id_in_sync_group, 0])
        values = tf.reshape(_own(values), [1, 1]) * [[1.0], [1.0]]
        accumulator.add([tf.IndexedSlices(values, rows, tf.constant([3, 1]))])

    on_replicas = tf.function(lambda values: two_replicas.run(add, args=(values,)))
    ends = []
    for _ in range(4):
        on_replicas(tf.constant([1.0, 2.0]))
        ends.append(bool(accumulator.is_full))
        with two_replicas.scope():
            assert bool(accumulator.is_full) is ends[-1]
    assert ends == [False, False, False, True]
    # Sparse, of the rows that each replica named.
    means = two_replicas.run(lambda: tuple(map(densify, accumulator.mean())))
    found = [part.numpy().ravel().tolist() for part in two_replicas.experimental_local_results(means[0])]
    assert found == [[2, 0, 0], [2, 2, 0]]
    two_replicas.run(accumulator.reset)
    assert float(accumulator.tried.read_value()) == 0
    for method in (accumulator.mean, accumulator.reset, lambda: accumulator.add([tf.zeros([3, 1])])):
        with pytest.raises(
            RuntimeError, match=r"^the accumulator belongs to the replicas of MirroredStrategy: .* strategy\.run"
        ):
            method()
        with two_replicas.scope(), pytest.raises(RuntimeError, match=r"strategy\.run"):
            method()
    assert float(accumulator.tried.read_value()) == 0


def test_accumulator_made_outside_of_the_scope_is_refused_on_replicas(
    two_replicas: tf.distribute.MirroredStrategy,
) -> None:
    weight = tf.Variable(0.0)
    shared = tfmp.GradientAccumulator([weight], 2)
    with pytest.raises(RuntimeError, match=r"^make the accumulator in the strategy's scope"):
        two_replicas.run(lambda: shared.add([tf.constant(1.0)]))
    # A single device has nothing to share.
    tf.distribute.OneDeviceStrategy("cpu:0").run(lambda: shared.add([tf.constant(1.0)]))
    assert float(shared.tried) == 1


def test_part_of_a_window_that_is_larger_than_a_micro_batch_may_be_is_not_saturated(
    two_replicas: tf.distribute.MirroredStrategy,
) -> None:
    detector, opt = tfmp.SaturationDetector(), tf.compat.v1.train.GradientDescentOptimizer(1.0)
    with two_replicas.scope():
        weight = tf.Variable(0.0)
        manager = tfmp.FixedLossScaleManager(1)
        accumulator = tfmp.GradientAccumulator([weight], 2, overflow_drops="micro_batch", overflow_detector=detector)
    scaler = LossScaler(manager, detector, is_distributed=False)

    def of_replica(values: tf.Tensor) -> None:
        take_step(
            scaler,
            [_own(values)],
            ["w"],
            lambda grads: opt.apply_gradients([(grads[0], weight)]),
            accumulator=accumulator,
        )

    step = tf.function(lambda values: two_replicas.run(of_replica, args=(values,)))
    for _ in range(2):
        step(tf.constant([40000.0, math.inf]))
    # The one that was kept, twice: 80000, which no micro-batch may have.
    assert [float(value) for value in two_replicas.experimental_local_results(weight)] == [-80000] * 2
    assert scaler.overflow_reports()[0].last.numpy().tolist() == [[2, 0, 0]]


@pytest.mark.graph
@pytest.mark.parametrize("overflow_drops", _POLICIES)
def test_graph_accumulates_as_eager_code_does(session: tf.compat.v1.Session, overflow_drops: str) -> None:
    weight = tf.compat.v1.get_variable("weight", initializer=0.0)
    grad = tf.compat.v1.placeholder(tf.float32, [])
    manager = tfmp.ExponentialUpdateLossScaleManager(_SCALE, 10**6, decr_every_n_nan_or_inf=1, decr_ratio=0.5)
    accumulator = tfmp.GradientAccumulator([weight], 2, overflow_drops=overflow_drops, micro_batches_per_epoch=5)
    scaler = LossScaler(manager, tfmp.NonFiniteDetector(), is_distributed=False)
    train_op = take_step(scaler, [grad], ["weight"], lambda grads: weight.assign(grads[0]), accumulator=accumulator)
    outcomes = manager.get_status()
    told = [weight, manager.get_loss_scale(), outcomes.applied_steps, outcomes.skipped_steps]
    session.run(tf.compat.v1.global_variables_initializer())
    tf.compat.v1.get_default_graph().finalize()
    values = [1.0, 3.0, math.inf, 5.0, 7.0, 1.0, math.nan]
    for count, value in enumerate(values, 1):
        session.run(train_op, {grad: value})
        assert tuple(session.run(told)) == _expected(_windows(values[:count], 2, 5), overflow_drops)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"accumulation_steps": 0}, ValueError, "accumulation_steps must be a whole number from 1 to .*, got 0"),
        ({"accumulation_steps": 1.5}, ValueError, "accumulation_steps must be a whole number from 1 to .*, got 1.5"),
        ({"accumulation_steps": "4"}, TypeError, "accumulation_steps must be a number, got '4'"),
        ({"overflow_drops": "batch"}, ValueError, 'overflow_drops must be "window" or "micro_batch", got \'batch\''),
        ({"micro_batches_per_epoch": 0}, ValueError, "micro_batches_per_epoch must be a whole number from 1 .*, got 0"),
        ({"variables": []}, ValueError, "variables is empty: pass the variables to train"),
        ({"variables": ["kernel"]}, TypeError, "variables must be a list of variables, and it holds 'kernel'"),
        ({"overflow_detector": max}, TypeError, "overflow_detector must be a tfmp.OverflowDetector, got <built-in"),
    ],
)
def test_setting_out_of_range_is_refused(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=f"^{message}"):
        tfmp.GradientAccumulator(**{"variables": [tf.Variable(0.0)], "accumulation_steps": 2} | arguments)


def test_gradients_that_do_not_fit_the_variables_are_refused() -> None:
    accumulator = tfmp.GradientAccumulator([tf.Variable(0.0)], 2)
    with pytest.raises(ValueError, match=r"^there are 2 gradients for 1 variables: pass one for each, None where"):
        accumulator.add([tf.constant(1.0), None])
    with pytest.raises(ValueError, match=r"^every gradient is None: the loss depends on none of the variables"):
        accumulator.add([None])
    assert float(accumulator.tried) == 0


@pytest.mark.parametrize(
    ("loss_scale", "error", "message"),
    [
        (0.0, ValueError, "loss_scale must be greater than 0, got 0.0"),
        (math.inf, ValueError, "loss_scale must be finite, got inf"),
        ("8", TypeError, "loss_scale must be a number, got '8'"),
    ],
)
def test_loss_scale_that_is_none_is_refused(loss_scale: Any, error: type[Exception], message: str) -> None:
    accumulator = tfmp.GradientAccumulator([tf.Variable(0.0)], 2)
    with pytest.raises(error, match=f"^{message}"):
        accumulator.add([tf.constant(1.0)], loss_scale)
    accumulator.add([tf.constant(16.0)], tf.constant(8.0, tf.float64))
    assert float(accumulator.mean()[0]) == 2


def test_counts_go_on_beyond_2_to_the_24() -> None:
    accumulator = tfmp.GradientAccumulator([tf.Variable(0.0)], 2**31 - 1)
    for counter in (accumulator.tried, accumulator.kept, accumulator.tried_in_epoch):
        counter.assign(2.0**24)
    accumulator.add([tf.constant(1.0)])
    counters = (accumulator.tried, accumulator.kept, accumulator.tried_in_epoch)
    assert [float(counter) for counter in counters] == [2**24 + 1] * 3
