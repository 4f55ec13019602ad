"""The norm of a step's gradients, as every host shows it."""

import functools
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from kerases import eager_steps, for_every_front_end, for_every_keras
from norm_hosts import MODES, SCALE, for_every_host, training, true_norm

import tfmp

tf1 = tf.compat.v1

#: One gradient is large, so that it is summed alone, and two are small.
_SHAPES = [[40, 300], [7], [33, 5]]


def _grads(dtype: str, factor: float = 1.0, *, sparse: bool = False) -> list[Any]:
    rng = np.random.default_rng(0)
    # Scaled by 1024 they must fit into float16.
    grads = [tf.cast(rng.normal(size=shape) * factor, dtype) for shape in _SHAPES]
    if sparse:
        grads[0] = tf.IndexedSlices(grads[0][:4], tf.constant([1, 3, 1, 0]), tf.constant(_SHAPES[0]))
    return grads


@for_every_host
@pytest.mark.parametrize("mode", MODES)
def test_norm_is_that_of_numpy(host: str, mode: str) -> None:
    # The squares of 1e25 and of 1e-28 are infinite and 0 in float32.
    for dtype, factor, sparse in [
        ("float32", 1.0, False),
        ("float32", 1e25, True),
        ("float32", 1e-28, False),
        ("float16", 1.0, True),
        ("bfloat16", 1.0, False),
        ("float64", 1e-28, True),
    ]:
        grads = _grads(dtype, factor, sparse=sparse)
        made = training(host, _SHAPES, "float64" if dtype == "float64" else "float32")
        made.opt.record_gradient_norm()
        assert np.isnan(made.opt.gradient_norm)
        MODES[mode](functools.partial(made.step, grads))()
        norm = made.opt.gradient_norm
        assert norm.dtype == tf.float64
        np.testing.assert_allclose(float(norm), true_norm(grads), rtol=1e-5, err_msg=f"{dtype} {factor} {sparse}")


@pytest.mark.filterwarnings("ignore:Gradients do not exist")
@for_every_host
def test_norm_of_gradients_of_none_and_zero(host: str) -> None:
    made = training(host, [[2], [3]])
    made.opt.record_gradient_norm()
    made.step([None, tf.constant([0.0, 3.0, 4.0])])
    assert float(made.opt.gradient_norm) == 5
    made.step([tf.zeros([2]), tf.zeros([3])])
    assert float(made.opt.gradient_norm) == 0


@for_every_host
def test_unrecorded_norm_is_an_error_that_says_what_to_call(host: str) -> None:
    made = training(host, [[2]])
    made.step([tf.ones([2])])
    assert not made.opt.records_gradient_norm
    with pytest.raises(AttributeError, match=r"call record_gradient_norm\(\) before"):
        _ = made.opt.gradient_norm


def _gradients(made: Any) -> Any:
    """Return gradients whose norm is 5, and their variables."""
    grads_and_vars = made.opt.compute_gradients(
        lambda: 3 * made.variables[0][0] + tf.reduce_sum(made.variables[1] * 2.0), made.variables
    )
    return zip(*grads_and_vars, strict=True)


@pytest.mark.parametrize(
    "call",
    [
        lambda function: tf.cond(tf.constant(value=True), function, lambda: None),
        lambda function: tf.function(function)(),
        lambda function: tf.cond(tf.constant(value=True), tf.function(function), lambda: None),
    ],
    ids=["in a branch", "in a function", "in a function in a branch"],
)
@pytest.mark.parametrize("outer", ["eager", "function"])
@pytest.mark.parametrize("host", [name for name in for_every_host.args[1] if name != "scaler"])
def test_norm_is_measured_before_the_script_clips_in_inner_code(host: str, outer: str, call: Any) -> None:
    made = training(host, [[2], [4]])
    made.opt.record_gradient_norm()

    def step() -> None:
        grads, variables = _gradients(made)

        def clip_and_apply() -> None:
            clipped, _ = tfmp.clip_by_global_norm(grads, 0.5)
            made.opt.apply_gradients(zip(clipped, variables, strict=True))

        call(clip_and_apply)

    MODES[outer](step)()
    assert float(made.opt.gradient_norm) == 5
    np.testing.assert_allclose(np.sqrt(sum(np.sum(weight**2) for weight in made.weights())), 0.5, rtol=1e-6)


@pytest.mark.parametrize("clip", [tf.clip_by_global_norm, tfmp.clip_by_global_norm])
@pytest.mark.parametrize("mode", ["eager", "function"])
def test_norm_of_a_scaler_is_measured_before_the_script_clips_by_any_function(mode: str, clip: Any) -> None:
    made = training("scaler", [[2], [2]])
    made.opt.record_gradient_norm()

    def step() -> None:
        scaled = [tf.constant(grad) * SCALE for grad in ([3.0, 0.0], [0.0, 4.0])]
        grads, _ = clip(made.opt.unscale(made.inner, scaled), 0.5)
        made.opt.step(made.inner, zip(grads, made.variables, strict=True))
        made.opt.update()

    made.opt.scale(tf.ones([]))
    MODES[mode](step)()
    assert float(made.opt.gradient_norm) == 5
    np.testing.assert_allclose(made.weights(), [[-0.3, 0], [0, -0.4]], rtol=1e-6)


def test_norm_of_a_scaler_is_that_of_its_last_step() -> None:
    made = training("scaler", [[2], [2]])
    made.opt.record_gradient_norm()
    other = tf1.train.GradientDescentOptimizer(1.0)
    grads = (tf.constant([size, 0.0]) * SCALE for size in (3, 4))
    one, two = ([pair] for pair in zip(grads, made.variables, strict=True))
    made.opt.step(made.inner, one)
    assert float(made.opt.gradient_norm) == 3
    made.opt.step(other, two)
    assert float(made.opt.gradient_norm) == 4
    made.opt.update()
    made.opt.step_all([(made.inner, one), (other, two)])
    made.opt.update()
    assert float(made.opt.gradient_norm) == 5


def test_norm_of_a_scaler_that_is_not_enabled() -> None:
    scaler, weight = tfmp.GradScaler(enabled=False), tf.Variable([1.0, 1.0])
    scaler.record_gradient_norm()
    optimizer = tf1.train.GradientDescentOptimizer(1.0)
    scaler.step(optimizer, [(tf.constant([3.0, 4.0]), weight)])
    scaler.update()
    assert float(scaler.gradient_norm) == 5
    scaler.step(optimizer, [(grad * 0.5, weight) for grad in scaler.unscale(optimizer, [tf.constant([6.0, 8.0])])])
    assert float(scaler.gradient_norm) == 10


@pytest.mark.graph
def test_norm_of_a_scaler_that_is_not_enabled_in_a_graph() -> None:
    with tf.Graph().as_default(), tf1.Session() as session:
        weight = tf1.Variable([1.0, 1.0], use_resource=True)
        scaler = tfmp.GradScaler(enabled=False)
        scaler.step(tf1.train.GradientDescentOptimizer(1.0), [(tf.constant([3.0, 4.0]), weight)])
        train_op, norm = scaler.update(), scaler.gradient_norm
        session.run(tf1.global_variables_initializer())
        assert session.run([train_op, norm])[1] == 5


@for_every_keras()
@for_every_front_end
@pytest.mark.parametrize("sparse", [False, True])
def test_step_sets_nothing_on_the_gradients(keras: ModuleType, front_end: str, sparse: bool) -> None:
    settings = {"skip_spikes": tfmp.SpikeDetector()}
    _, step = eager_steps(keras, front_end, tfmp.FixedLossScaleManager(8), np.zeros([64, 256]), **settings)
    values = tf.ones([64, 256])
    before = dict(vars(values))
    step(tf.IndexedSlices(values, tf.range(64), tf.constant([64, 256])) if sparse else values)
    assert vars(values) == before


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_norm_is_not_rounded_to_the_type_of_the_variables(dtype: str) -> None:
    made = training("v1", [[2]], dtype)
    made.opt.record_gradient_norm()
    made.step([tf.constant([1e-6, 1.001])])
    np.testing.assert_allclose(float(made.opt.gradient_norm), 1.001, rtol=1e-6)


@pytest.mark.graph
def test_norm_in_a_conditional_of_a_graph_must_be_asked_for() -> None:
    for records in (False, True):
        with tf.Graph().as_default(), tf1.Session() as session:
            weight = tf1.Variable([0.0, 0.0], use_resource=True)
            opt = tfmp.LossScaleOptimizer(
                tf1.train.GradientDescentOptimizer(1.0), tfmp.FixedLossScaleManager(SCALE), accumulation_steps=2
            )
            if records:
                opt.record_gradient_norm()
            train_op = opt.minimize(tf.reduce_sum(weight * [3.0, 4.0]), var_list=[weight])
            session.run(tf1.global_variables_initializer())
            if not records:
                with pytest.raises(AttributeError, match="record_gradient_norm"):
                    _ = opt.gradient_norm
                continue
            norm = opt.gradient_norm
            session.run(train_op)
            assert np.isnan(session.run(norm))
            session.run(train_op)
            assert session.run(norm) == 5


@pytest.mark.graph
def test_norm_in_a_session_must_be_asked_for_if_optimizers_sum(two_replicas: tf.distribute.MirroredStrategy) -> None:
    with tf.Graph().as_default(), two_replicas.scope():
        weight = tf1.get_variable("weight", initializer=1.0)
        opt = tfmp.LossScaleOptimizer(tf1.train.GradientDescentOptimizer(0.5), tfmp.FixedLossScaleManager(SCALE))
        two_replicas.run(lambda: opt.minimize(weight * 1.0, var_list=[weight]))
        with pytest.raises(AttributeError, match=r"not recorded: call record_gradient_norm\(\) before the first step"):
            _ = opt.gradient_norm
