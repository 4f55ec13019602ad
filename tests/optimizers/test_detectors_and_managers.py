"""Detectors and managers in steps: what replaces their methods, values that change, scales below 1."""

import math
from types import ModuleType

import numpy as np
import pytest
import tensorflow as tf
from kerases import (
    SCALE,
    eager_steps,
    for_every_front_end,
    for_every_keras,
    kernel_and_bias,
    optimizer,
    values,
)

import tfmp


@for_every_keras()
@for_every_front_end
def test_what_replaces_a_method_of_the_detectors_class_decides_only_while_it_is_there(
    keras: ModuleType, front_end: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(*, steps: int) -> None:
        for _ in range(steps):
            step(tf.constant([8.0, 8.0]))

    manager = tfmp.FixedLossScaleManager(8)
    _, step = eager_steps(keras, front_end, manager)
    run(steps=70)
    with monkeypatch.context() as patched:
        patched.setattr(tfmp.NonFiniteDetector, "all_finite", lambda *_: tf.constant(False))
        run(steps=3)
        # Another optimizer of the process takes its first steps meanwhile.
        other = tfmp.FixedLossScaleManager(8)
        _, step = eager_steps(keras, front_end, other)
        run(steps=70)
    run(steps=5)
    assert [int(count) for count in manager.get_status()[4:6]] == [70, 3]
    assert [int(count) for count in other.get_status()[4:6]] == [5, 70]


@for_every_keras()
@for_every_front_end
@pytest.mark.parametrize("skip_spikes", [False, True])
def test_method_that_one_detector_has_got_decides(keras: ModuleType, front_end: str, skip_spikes: bool) -> None:
    manager, detector = tfmp.FixedLossScaleManager(8), tfmp.NonFiniteDetector()
    # To look for spikes, a step measures the norm of the gradients.
    settings = {"skip_spikes": tfmp.SpikeDetector()} if skip_spikes else {}
    weight, step = eager_steps(keras, front_end, manager, overflow_detector=detector, **settings)
    step(tf.constant([8.0, 8.0]))
    setattr(detector, "all_finite", lambda *_: tf.constant(False))  # noqa: B010 - a type checker refuses the assignment
    for _ in range(2):
        step(tf.constant([8.0, 8.0]))
    assert [int(count) for count in manager.get_status()[4:6]] == [1, 2]
    assert values([weight]) == [[0.5, 1.5]]


@for_every_keras()
@for_every_front_end
@pytest.mark.parametrize("num_rows", [16, 2**13])
def test_rows_that_a_variable_holds_are_checked_anew_in_each_step(
    keras: ModuleType, front_end: str, num_rows: int
) -> None:
    manager = tfmp.FixedLossScaleManager(8)
    weight, step = eager_steps(keras, front_end, manager, np.zeros([num_rows, 2]))
    rows, seen = tf.Variable(tf.zeros([num_rows, 2])), []
    for value in (8.0, math.inf, 16.0, math.nan, -8.0):
        rows.assign(tf.fill([num_rows, 2], value))
        step(tf.IndexedSlices(rows, tf.range(num_rows), tf.constant([num_rows, 2])))
        seen.append((int(manager.get_status().skipped_steps), {*weight.numpy().flat}))
    assert seen == [(0, {-0.5}), (1, {-0.5}), (1, {-1.5}), (2, {-1.5}), (2, {-1.0})]


@for_every_keras()
@for_every_front_end
@pytest.mark.parametrize("has_shape", [True, False])
def test_rows_may_be_arrays_of_numpy(keras: ModuleType, front_end: str, has_shape: bool) -> None:
    manager = tfmp.FixedLossScaleManager(8)
    weight, step = eager_steps(keras, front_end, manager, np.zeros([4, 2]))
    for value in (8, math.inf, 16):
        rows = np.full([2, 2], value, np.float32)
        step(tf.IndexedSlices(rows, np.array([3, 1]), np.array([4, 2]) if has_shape else None))
    assert weight.numpy().tolist() == [[0, 0], [-1.5, -1.5], [0, 0], [-1.5, -1.5]]
    assert int(manager.get_status().skipped_steps) == 1


@for_every_keras()
@pytest.mark.parametrize("way", ["eager", "function", "xla"])
def test_gradients_that_unscaling_by_a_scale_below_1_makes_infinite_are_found(keras: ModuleType, way: str) -> None:
    manager = tfmp.ExponentialUpdateLossScaleManager(2.0**-10, 1000, min_loss_scale=2.0**-20)
    variables = kernel_and_bias(keras)
    before = values(variables)
    opt = tfmp.LossScaleOptimizer(optimizer(keras), manager)
    opt.build(variables)

    def step(kernel: tf.Tensor) -> None:
        opt.scale_loss(tf.constant(1.0))
        opt.apply_gradients(zip([tf.fill([2, 2], kernel), tf.zeros([2])], variables, strict=True))

    run = step if way == "eager" else tf.function(step, jit_compile=way == "xla")
    # The scaled gradient is finite, and the unscaled one is infinite.
    run(tf.constant(2.0**120))
    assert (values(variables), int(opt.skipped_steps)) == (before, 1)
    (report,) = opt.overflow_reports()
    assert report.last.numpy().tolist() == [[4, 0, 0], [0, 0, 0]]
    run(tf.constant(2.0**-10))
    assert values(variables) == [[[0.5, 1.5], [2.5, 3.5]], [5, 6]]


class _Halving(tfmp.LossScaleManager):
    """A custom manager that declares no lower bound for its scale."""

    def __init__(self, loss_scale: float) -> None:
        super().__init__()
        self.loss_scale = tf.Variable(loss_scale, trainable=False)

    def get_loss_scale(self) -> tf.Tensor:
        return self.loss_scale.read_value()

    def update_loss_scale(self, finite_grads: tf.Tensor) -> tf.Operation:
        return self.loss_scale.assign(self.loss_scale * tf.where(finite_grads, 1.0, 0.5))


@for_every_keras()
def test_overflow_is_found_if_the_manager_has_no_lower_bound_for_its_scale(keras: ModuleType) -> None:
    # One manager is custom. The state of the other comes from a checkpoint of a manager with a lower bound.
    restored = tfmp.ExponentialUpdateLossScaleManager(1024, 1000)
    restored.state.assign(restored.state.read()._replace(loss_scale=tf.constant(2.0**-10)))
    for manager in (_Halving(2.0**-10), restored):
        variables = kernel_and_bias(keras)
        before = values(variables)
        opt = tfmp.LossScaleOptimizer(optimizer(keras), manager)
        opt.build(variables)
        opt.scale_loss(tf.constant(1.0))
        opt.apply_gradients(zip([tf.fill([2, 2], 2.0**120), tf.zeros([2])], variables, strict=True))
        assert (values(variables), int(opt.skipped_steps)) == (before, 1)


@for_every_keras()
@for_every_front_end
@pytest.mark.parametrize("method", ["update_loss_scale", "next_state", "note_step"])
def test_what_replaces_a_method_of_a_manager_is_called_in_each_later_step(
    keras: ModuleType, front_end: str, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager, seen = tfmp.ExponentialUpdateLossScaleManager(SCALE, 1000), []
    _, step = eager_steps(keras, front_end, manager)
    grad = tf.constant([1.0, 1.0])
    for _ in range(70):
        step(grad)
    original = getattr(manager, method)
    with monkeypatch.context() as patched:
        patched.setattr(manager, method, lambda *args: [seen.append(bool(args[-1])), original(*args)][1])
        for factor in (1.0, math.inf, 1.0):
            step(grad * factor)
    step(grad)
    assert seen == [True, False, True]
    assert [int(count) for count in manager.get_status()[3:6]] == [74, 73, 1]
