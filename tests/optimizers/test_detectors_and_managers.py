"""Detectors and managers in steps: forms of gradients, scales below 1, and the reports."""

import math
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import kerases
import numpy as np
import pytest
import tensorflow as tf
from kerases import SCALE, for_every_keras, optimizer, values, variable, wrap

import tfmp

_by_each_front_end = pytest.mark.parametrize("is_scaler", [False, True], ids=["LossScaleOptimizer", "GradScaler"])


def _stepping(
    keras: ModuleType, is_scaler: bool, shape: list[int], **settings: Any
) -> tuple[Any, tfmp.LossScaleManager, Callable[[Any], None]]:
    """Return a weight of zeros, a manager, and a function that takes an eager step with a gradient scaled by 8."""
    weight, inner, manager = variable(keras, np.zeros(shape)), optimizer(keras), tfmp.FixedLossScaleManager(8)
    opt: Any = None
    if is_scaler:
        opt = tfmp.GradScaler(manager=manager, **settings)
    else:
        opt = tfmp.LossScaleOptimizer(inner, manager, **settings)

    def step(grad: Any) -> None:
        if is_scaler:
            opt.scale(tf.constant(1.0))
            opt.step(inner, [(grad, weight)])
            opt.update()
        else:
            opt.scale_loss(tf.constant(1.0))
            opt.apply_gradients([(grad, weight)])

    return weight, manager, step


@for_every_keras()
@_by_each_front_end
@pytest.mark.parametrize("has_shape", [True, False])
def test_rows_may_be_arrays_of_numpy(keras: ModuleType, is_scaler: bool, has_shape: bool) -> None:
    weight, manager, step = _stepping(keras, is_scaler, [4, 2])
    for value in (8, math.inf, 16):
        rows, shape = np.full([2, 2], value, np.float32), np.array([4, 2]) if has_shape else None
        step(tf.IndexedSlices(rows, np.array([3, 1]), shape))
    assert weight.numpy().tolist() == [[0, 0], [-1.5, -1.5], [0, 0], [-1.5, -1.5]]
    assert int(manager.get_status().skipped_steps) == 1


@for_every_keras()
@_by_each_front_end
@pytest.mark.parametrize("num_rows", [16, 2**13])
def test_rows_that_a_variable_holds_are_checked_anew_in_each_step(
    keras: ModuleType, is_scaler: bool, num_rows: int
) -> None:
    weight, manager, step = _stepping(keras, is_scaler, [num_rows, 2])
    rows, seen = tf.Variable(tf.zeros([num_rows, 2])), []
    for value in (8.0, math.inf, 16.0, math.nan, -8.0):
        rows.assign(tf.fill([num_rows, 2], value))
        step(tf.IndexedSlices(rows, tf.range(num_rows), tf.constant([num_rows, 2])))
        seen.append((int(manager.get_status().skipped_steps), {*weight.numpy().flat}))
    assert seen == [(0, {-0.5}), (1, {-0.5}), (1, {-1.5}), (2, {-1.5}), (2, {-1.0})]


@for_every_keras()
@_by_each_front_end
@pytest.mark.parametrize("sparse", [False, True])
def test_step_sets_nothing_on_the_gradients(keras: ModuleType, is_scaler: bool, sparse: bool) -> None:
    *_, step = _stepping(keras, is_scaler, [64, 256], skip_spikes=tfmp.SpikeDetector())
    grad = tf.ones([64, 256])
    before = dict(vars(grad))
    step(tf.IndexedSlices(grad, tf.range(64), tf.constant([64, 256])) if sparse else grad)
    assert vars(grad) == before


def _low(loss_scale: float) -> tfmp.LossScaleManager:
    return tfmp.ExponentialUpdateLossScaleManager(loss_scale, 1000, min_loss_scale=2.0**-20)


def _restored(loss_scale: float) -> tfmp.LossScaleManager:
    """Return a manager with a state from a checkpoint of a manager with a lower bound."""
    restored = tfmp.ExponentialUpdateLossScaleManager(1024, 1000)
    restored.state.assign(restored.state.read()._replace(loss_scale=tf.constant(loss_scale)))
    return restored


@for_every_keras()
@pytest.mark.parametrize(
    ("make_manager", "way"),
    [*((_low, way) for way in ("eager", "function", "xla")), (kerases.Halving, "eager"), (_restored, "eager")],
)
def test_gradients_that_unscaling_by_a_scale_below_1_makes_infinite_are_found(
    keras: ModuleType, make_manager: Any, way: str
) -> None:
    variables = kerases.kernel_and_bias(keras)
    opt = tfmp.LossScaleOptimizer(optimizer(keras), make_manager(2.0**-10))
    opt.build(variables)
    before = values(variables)

    def step(kernel: tf.Tensor) -> None:
        opt.scale_loss(tf.constant(1.0))
        opt.apply_gradients(zip([tf.fill([2, 2], kernel), tf.zeros([2])], variables, strict=True))

    run = step if way == "eager" else tf.function(step, jit_compile=way == "xla")
    # The scaled gradient is finite, and the unscaled one is infinite.
    run(tf.constant(2.0**120))
    assert (values(variables), int(opt.skipped_steps)) == (before, 1)
    (report,) = opt.overflow_reports()
    # Of a manager that was restored below its bound, the report does not tell.
    assert make_manager is _restored or report.last.numpy().tolist() == [[4, 0, 0], [0, 0, 0]]
    run(opt.loss_scale)
    assert values(variables) == [[[0.5, 1.5], [2.5, 3.5]], [5, 6]]


@pytest.mark.graph
def test_report_in_a_graph_covers_only_that_graph_and_is_the_same_each_time() -> None:
    opt = tfmp.LossScaleOptimizer(tf.compat.v1.train.MomentumOptimizer(0.5, 0.5), 1024)
    for name in ("one", "other"):
        with tf.Graph().as_default(), tf.compat.v1.Session() as session:
            train_op = opt.minimize(
                tf.compat.v1.get_variable(name, initializer=[1.0, 2.0, 3.0]) * [math.nan, -math.inf, 1.0]
            )
            (report,), (again,) = opt.overflow_reports(), opt.overflow_reports()
            session.run(tf.compat.v1.global_variables_initializer())
            tf.compat.v1.get_default_graph().finalize()
            session.run(train_op)
            assert (report.names, session.run(report.last).tolist()) == ([f"{name}:0"], [[1, 1, 0]])
            assert again.last is report.last


@for_every_keras()
def test_function_that_takes_steps_can_be_exported_and_counts_are_in_no_checkpoint(
    keras: ModuleType, tmp_path: Path
) -> None:
    module = tf.Module()
    module.variables_to_train = variables = kerases.kernel_and_bias(keras)
    module.opt = opt = wrap(optimizer(keras), skip_spikes=tfmp.SpikeDetector(max_norm=10))
    opt.build(variables)

    @tf.function(input_signature=[tf.TensorSpec([2, 2]), tf.TensorSpec([2])])
    def train(kernel: tf.Tensor, bias: tf.Tensor) -> Any:
        kerases.take_step(opt, variables, [kernel, bias])
        return opt.loss_scale, opt.gradient_norm, opt.skipped_spikes

    module.train = train
    tf.saved_model.save(module, str(tmp_path))
    loaded, zeros = tf.saved_model.load(str(tmp_path)), tf.zeros([2])
    assert float(loaded.train(tf.fill([2, 2], math.inf), zeros)[0]) == SCALE / 2
    assert [float(each) for each in loaded.train(tf.fill([2, 2], 8.0), zeros)] == [SCALE / 2, 16, 1]
    assert [float(each) for each in loaded.train(tf.fill([2, 2], 2.0), zeros)] == [SCALE / 2, 4, 1]
    assert int(opt.attempted_steps) == 0
    # A checkpoint with the counts could not be restored for other variables.
    tf.train.Checkpoint(opt=opt).write(str(tmp_path / "checkpoint"))
    shapes = tf.train.load_checkpoint(str(tmp_path / "checkpoint")).get_variable_to_shape_map().values()
    assert [2, 3] not in [*shapes, *(list(each.shape) for each in opt.variables)]
