"""The overflow reports of every front-end, which name the variables whose gradients overflowed."""

import itertools
import math
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import tensorflow as tf
from kerases import SCALE, for_every_keras, installed, kernel_and_bias, optimizer, take_step, wrap

import tfmp

#: The gradients of each step; then the expected counts, in the last skipped step and in all skipped steps.
_KERNELS = [[1.0, 1.0], [math.inf, math.nan], [math.nan, math.nan], [1.0, 1.0]]
_BIASES = [1.0, -math.inf, 1.0, 1.0]
_LAST = [[0, 2, 0], [0, 0, 0]]
_STEPS = [2, 1]


def _opt() -> tfmp.LossScaleOptimizer:
    manager = tfmp.ExponentialUpdateLossScaleManager(1024, 1000, decr_every_n_nan_or_inf=1, decr_ratio=0.5)
    return tfmp.LossScaleOptimizer(tf.compat.v1.train.MomentumOptimizer(0.5, 0.5), manager)


@pytest.mark.graph
def test_report_in_a_graph_is_fetched(session: tf.compat.v1.Session) -> None:
    kernel_factor, bias_factor = (tf.compat.v1.placeholder(tf.float32, shape) for shape in ([2], []))
    kernel = tf.compat.v1.get_variable("dense/kernel", initializer=[1.0, 2.0])
    bias = tf.compat.v1.get_variable("dense/bias", initializer=1.0)
    opt = _opt()
    train_op = opt.minimize(tf.reduce_sum(kernel * kernel_factor) + bias * bias_factor)
    (report,) = opt.overflow_reports()
    session.run(tf.compat.v1.global_variables_initializer())
    tf.compat.v1.get_default_graph().finalize()
    for fed in zip(_KERNELS, _BIASES, strict=True):
        session.run(train_op, dict(zip((kernel_factor, bias_factor), fed, strict=True)))
    assert report.names == ["dense/kernel:0", "dense/bias:0"]
    assert session.run(report.last).tolist() == _LAST
    assert session.run(report.steps).tolist() == _STEPS
    (again,) = opt.overflow_reports()
    assert again.last is report.last


@pytest.mark.graph
def test_report_in_a_graph_covers_only_that_graph() -> None:
    opt = _opt()
    for name in ("one", "other"):
        with tf.Graph().as_default():
            opt.minimize(tf.compat.v1.get_variable(name, initializer=1.0) * 1.0)
            assert [report.names for report in opt.overflow_reports()] == [[f"{name}:0"]]


@pytest.mark.parametrize(
    ("host", "way"),
    [("tf1", "eager"), ("tf1", "function"), *itertools.product(installed(), ["eager", "function", "xla"])],
)
def test_report_in_eager_code_holds_values_and_names_of_the_variables(host: str, way: str) -> None:
    if host == "tf1":
        variables, opt = [tf.Variable([[1.0, 2.0]], name="kernel"), tf.Variable([1.0], name="bias")], _opt()
    else:
        variables, opt = kernel_and_bias(installed()[host]), wrap(optimizer(installed()[host]))
        opt.build(variables)
    traces = []

    def step(kernel: tf.Tensor, bias: tf.Tensor) -> None:
        traces.append(1)
        if host == "tf1":
            opt.minimize(lambda: tf.reduce_sum(variables[0] * kernel) + variables[1][0] * bias, var_list=variables)
        else:
            take_step(opt, variables, [tf.stack([kernel, tf.ones([2])]), tf.stack([1.0, bias])])

    run = step if way == "eager" else tf.function(step, jit_compile=way == "xla")
    for fed in zip(_KERNELS, _BIASES, strict=True):
        run(*map(tf.constant, fed))
    (report,) = opt.overflow_reports()
    assert report.names == [getattr(variable, "path", variable.name) for variable in variables]
    assert (report.last.numpy().tolist(), report.steps.numpy().tolist()) == (_LAST, _STEPS)
    # `build` makes the variables of the counts, so a function need not be traced a second time.
    assert host == "tf1" or len(traces) == (4 if way == "eager" else 1)


@for_every_keras()
def test_function_that_takes_steps_can_be_exported_and_counts_are_in_no_checkpoint(
    keras: ModuleType, tmp_path: Path
) -> None:
    module = tf.Module()
    module.variables_to_train = variables = kernel_and_bias(keras)
    module.opt = opt = wrap(optimizer(keras))
    opt.build(variables)

    @tf.function(input_signature=[tf.TensorSpec([2, 2]), tf.TensorSpec([2])])
    def train(kernel: tf.Tensor, bias: tf.Tensor) -> tf.Tensor:
        take_step(opt, variables, [kernel, bias])
        return opt.loss_scale

    module.train = train
    tf.saved_model.save(module, str(tmp_path))
    loaded = tf.saved_model.load(str(tmp_path))
    assert float(loaded.train(tf.fill([2, 2], math.inf), tf.ones([2]))) == SCALE / 2
    # A checkpoint with the counts could not be restored for other variables.
    tf.train.Checkpoint(opt=opt).write(str(tmp_path / "checkpoint"))
    shapes = tf.train.load_checkpoint(str(tmp_path / "checkpoint")).get_variable_to_shape_map().values()
    assert [2, 3] not in [*shapes, *(list(variable.shape) for variable in opt.variables)]


def _step_on(strategy: tf.distribute.Strategy, opt: Any, variable: Any, factors: tf.Tensor) -> None:
    def step() -> None:
        context = tf.distribute.get_replica_context()
        take_step(opt, [variable], [tf.gather(factors, context.replica_id_in_sync_group)])

    strategy.run(step)


@for_every_keras()
def test_replicas_report_the_largest_of_their_counts(
    keras: ModuleType, two_replicas: tf.distribute.MirroredStrategy
) -> None:
    with two_replicas.scope():
        kernel, _ = kernel_and_bias(keras)
        opt = wrap(optimizer(keras))
        opt.build([kernel])
    run = tf.function(lambda factors: _step_on(two_replicas, opt, kernel, factors))
    good = [[1.0, 1.0], [1.0, 1.0]]
    run(tf.constant([good, [[math.inf, 1.0], [math.inf, math.nan]]]))
    (report,) = opt.overflow_reports()
    # Keras 2 sums the gradients before the check, so both replicas have the same counts.
    assert report.last.numpy().tolist() == [[2, 1, 0]]
    run(tf.constant([[[math.nan, 1.0], [1.0, 1.0]], good]))
    run(tf.constant([good, good]))
    (report,) = opt.overflow_reports()
    assert (report.last.numpy().tolist(), report.steps.numpy().tolist()) == ([[0, 1, 0]], [2])
