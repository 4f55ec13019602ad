import math
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from function_steps import take_step
from gradient_forms import FORMS, TYPES, gradient
from hypothesis import given, settings
from hypothesis import strategies as st
from kerases import for_every_keras, kernel_and_bias, optimizer, wrap

import tfmp
from tfmp.core.gradients.arithmetic import values_of
from tfmp.core.step.scaler import LossScaler
from tfmp.types import Gradient, Gradients


def _by_global_norm(grads: Gradients, clip_norm: Any) -> list[Gradient]:
    return tfmp.clip_by_global_norm(grads, clip_norm)[0]


def _by_value(grads: Gradients, limit: Any) -> list[Gradient]:
    return tfmp.clip_by_value(grads, -limit, limit)


_WAYS = [_by_value, tfmp.clip_by_norm, _by_global_norm]
_MODES: dict[str, Callable[..., Any]] = {
    "eager": lambda function: function,
    "function": tf.function,
    "xla": tf.function(jit_compile=True),
}


def _numbers(grads: Gradients) -> list[list[float]]:
    return [values.numpy().astype(float).tolist() for values in values_of(grads)]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", TYPES)
def test_clipped_gradients_keep_their_types_and_forms(dtype: tf.DType, form: str) -> None:
    grads = [gradient([24.0, -32.0], dtype, form), None, tf.constant(-1.0)]
    for way, expected in [
        (_by_value, [[2.5, -2.5], -1.0]),
        (tfmp.clip_by_norm, [[1.5, -2.0], -1.0]),
        (lambda grads, norm: _by_global_norm([*grads[:2], tf.constant(0.0)], norm), [[1.5, -2.0], 0.0]),
    ]:
        clipped = way(grads, 2.5)
        assert [type(grad) for grad in clipped] == [type(grad) for grad in grads]
        assert [values.dtype for values in values_of(clipped)] == [dtype, tf.float32]
        assert _numbers(clipped) == expected
        if form == "indexed":
            assert clipped[0].indices.numpy().tolist() == [0, 1]
            assert clipped[0].dense_shape is grads[0].dense_shape


@pytest.mark.parametrize("mode", _MODES)
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_clipping_leaves_infinities_and_nan_in_place(mode: str, bad: float) -> None:
    def clip(values: tf.Tensor, rows: tf.Tensor) -> list[list[tf.Tensor]]:
        grads = [values, None, tf.IndexedSlices(rows, tf.constant([3, 3])), tf.constant([3.0, 4.0])]
        return [values_of(way(grads, 2.5)) for way in _WAYS]

    by_value, by_norm, by_global_norm = _MODES[mode](clip)(tf.constant([6.0, bad]), tf.constant([8.0, -bad]))
    for (values, rows, healthy), expected in [
        (by_value, [2.5, 2.5, [2.5, 2.5]]),
        (by_norm, [6.0, 8.0, [1.5, 2.0]]),
        (by_global_norm, [6.0, 8.0, [3.0, 4.0]]),
    ]:
        np.testing.assert_array_equal(values, np.float32([expected[0], bad]))
        np.testing.assert_array_equal(rows, np.float32([expected[1], -bad]))
        assert healthy.numpy().tolist() == expected[2]


@pytest.mark.parametrize("mode", _MODES)
def test_norm_is_right_although_squares_overflow(mode: str) -> None:
    def clip(values: tf.Tensor) -> tuple[list[tf.Tensor], list[tf.Tensor], tf.Tensor]:
        grads = [values * 2.0**127, tf.cast(values * 2.0**15, tf.float16), values * 2.0**-10]
        clipped, norm = tfmp.clip_by_global_norm(grads[:2], 4.0)
        return values_of(tfmp.clip_by_norm(grads, 2.0**-13)), values_of(clipped), norm

    by_norm, clipped, norm = _MODES[mode](clip)(tf.ones([4]))
    # The norm of a small gradient is right although that of another one had to be computed again.
    assert _numbers(by_norm) == [[2.0**-14] * 4] * 3
    # The second gradient would become 2**-111, which is 0 in float16.
    assert _numbers(clipped) == [[2.0] * 4, [0.0] * 4]
    assert float(norm) == 2.0**128


def test_float64_gradients_are_clipped_in_their_own_precision_and_range() -> None:
    grads = [tf.constant([3e100, 4e100], tf.float64), tf.constant([3.1, -0.7], tf.float64)]
    huge, small = tfmp.clip_by_norm(grads, 2.0)
    np.testing.assert_allclose(huge, [1.2, 1.6], rtol=1e-15)
    np.testing.assert_allclose(small, tf.clip_by_norm(grads[1], 2.0), rtol=1e-15)


def test_gradients_of_norm_zero_are_not_divided_by_it() -> None:
    zeros = [tf.zeros([2]), tf.zeros([0]), None]
    (by_global_norm, norm), by_norm = tfmp.clip_by_global_norm(zeros, 1.0), tfmp.clip_by_norm(zeros, 1.0)
    assert _numbers(by_global_norm) == _numbers(by_norm) == [[0.0, 0.0], []]
    assert float(norm) == 0


def test_rows_with_the_same_index_count_separately_in_the_norm() -> None:
    slices = tf.IndexedSlices(tf.constant([3.0, 4.0]), tf.constant([1, 1]), tf.constant([2]))
    clipped, norm = tfmp.clip_by_global_norm([slices], 2.5)
    of_tensorflow, norm_of_tensorflow = tf.clip_by_global_norm([slices], 2.5)
    assert _numbers(clipped) == _numbers(of_tensorflow) == [[1.5, 2.0]]
    assert float(norm) == float(norm_of_tensorflow) == 5


def test_clip_norm_and_clip_values_may_be_tensors() -> None:
    limit = tf.Variable(2.5, dtype=tf.float16)
    for way in _WAYS:
        assert _numbers(way([tf.constant([3.0, 4.0])], limit)) == _numbers(way([tf.constant([3.0, 4.0])], 2.5))


def test_one_bound_may_be_a_tensor_of_a_graph() -> None:
    @tf.function(autograph=False)
    def clip(limit: tf.Tensor) -> list[tf.Tensor]:
        grad = tf.constant([3.0, -4.0])
        return [tfmp.clip_by_value(grad, -limit, 1), tfmp.clip_by_value(grad, -1, limit)]

    assert _numbers(clip(tf.constant(2.5))) == [[1.0, -2.5], [2.5, -1.0]]


@pytest.mark.parametrize("way", _WAYS)
def test_limit_has_the_precision_of_float64(way: Callable[..., Any]) -> None:
    assert _numbers(way([tf.constant([1.0], tf.float64)], 0.1)) == [[0.1]]


def test_nan_as_bound_makes_gradients_nan_instead_of_clipping_nothing() -> None:
    for way in _WAYS:
        assert np.isnan(_numbers(way([tf.constant([3.0, 4.0])], tf.constant(math.nan)))).all()


_VALUES = st.floats(-1e4, 1e4, width=32, allow_subnormal=False)


@settings(deadline=None, max_examples=60)
@given(st.lists(st.lists(_VALUES, min_size=3, max_size=3), min_size=2, max_size=2), st.floats(2.0**-10, 2.0**14))
def test_ordinary_gradients_are_clipped_as_by_tensorflow(values: list[list[float]], limit: float) -> None:
    grads = [tf.constant(values[0]), tf.IndexedSlices(tf.constant(values[1]), tf.constant([2, 0, 2]))]
    clipped, norm = tfmp.clip_by_global_norm(grads, limit)
    of_tensorflow, norm_of_tensorflow = tf.clip_by_global_norm(grads, limit)
    np.testing.assert_allclose(_numbers(clipped), _numbers(of_tensorflow), rtol=1e-5, atol=1e-30)
    np.testing.assert_allclose(norm, norm_of_tensorflow, rtol=1e-6, atol=1e-15)
    of_tensorflow = [tf.clip_by_norm(grad, limit) for grad in grads]
    np.testing.assert_allclose(
        _numbers(tfmp.clip_by_norm(grads, limit)), _numbers(of_tensorflow), rtol=1e-5, atol=1e-30
    )
    of_tensorflow = [tf.clip_by_value(grad, -limit / 2, limit) for grad in grads]
    assert _numbers(tfmp.clip_by_value(grads, -limit / 2, limit)) == _numbers(of_tensorflow)


@pytest.mark.parametrize(
    "way", [lambda grads: tfmp.clip_by_value(grads, -1, 2), lambda grads: tfmp.clip_by_norm(grads, 2)]
)
def test_single_gradient_is_clipped_as_in_a_list(way: Callable[..., Any]) -> None:
    slices = tf.IndexedSlices(tf.constant([3.0, -4.0]), tf.constant([1, 0]), tf.constant([2]))
    for grad in (tf.constant([3.0, -4.0]), tf.constant([3.0, math.inf]), slices):
        single = way(grad)
        assert type(single) is type(grad)
        assert _numbers([single]) == _numbers(way([grad]))


def test_global_norm_of_a_single_tensor_is_refused() -> None:
    with pytest.raises(TypeError, match=r"^grads must be a list of gradients, .* of type EagerTensor: pass \[grad\]"):
        tfmp.clip_by_global_norm(tf.constant([1.0]), 1.0)


@pytest.mark.parametrize("way", _WAYS)
def test_argument_that_is_not_a_list_of_gradients_is_refused(way: Callable[..., Any]) -> None:
    grad = tf.constant([1.0])
    with pytest.raises(TypeError, match=r"^grads must be a list of gradients, .* pass the gradients alone, without"):
        way(zip([grad], [grad], strict=True), 1.0)
    with pytest.raises(TypeError, match=r"^grads must be a list of gradients, .* pass the gradients alone, without"):
        way([(grad, tf.Variable(1.0))], 1.0)
    with pytest.raises(ValueError, match=r"^grads is empty: pass the gradients"):
        way([], 1.0)
    with pytest.raises(ValueError, match=r"^every gradient is None: the loss depends on none of the variables"):
        way([None, None], 1.0)


@pytest.mark.parametrize("way", [tfmp.clip_by_norm, tfmp.clip_by_global_norm])
@pytest.mark.parametrize(
    ("bad", "error", "message"),
    [
        (0, ValueError, "clip_norm must be greater than 0, got 0"),
        (-1.5, ValueError, "clip_norm must be greater than 0, got -1.5"),
        (math.inf, ValueError, "clip_norm must be finite, got inf"),
        (math.nan, ValueError, "clip_norm must be finite, got nan"),
        (None, TypeError, "clip_norm must be a number, got None"),
    ],
)
def test_norm_out_of_range_is_refused(way: Callable[..., Any], bad: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=f"^{message}"):
        way([tf.constant([1.0])], bad)


def test_invalid_range_of_clip_by_value_is_refused() -> None:
    grads = [tf.constant([1.0])]
    with pytest.raises(ValueError, match=r"^clip_value_min must not be greater than clip_value_max, got 1 and -1\.$"):
        tfmp.clip_by_value(grads, 1, -1)
    assert _numbers([tfmp.clip_by_value(tf.constant([1.0, -3.0]), -1, -1)]) == [[-1.0, -1.0]]
    with pytest.raises(ValueError, match=r"^clip_value_max must be finite, got inf"):
        tfmp.clip_by_value(grads, 1, math.inf)
    with pytest.raises(TypeError, match=r"^clip_value_min must be a number, got None"):
        tfmp.clip_by_value(grads, None, 1)


@pytest.mark.graph
@pytest.mark.parametrize("way", _WAYS)
def test_graph_skips_overflow_after_clipping_and_reports_its_variable(
    session: tf.compat.v1.Session, way: Callable[..., Any]
) -> None:
    factor = tf.compat.v1.placeholder(tf.float32, [])
    kernel = tf.compat.v1.get_variable("kernel", initializer=[1.0, 2.0])
    bias = tf.compat.v1.get_variable("bias", initializer=1.0)
    manager = tfmp.ExponentialUpdateLossScaleManager(8, 1000, decr_every_n_nan_or_inf=1, decr_ratio=0.5)
    opt = tfmp.LossScaleOptimizer(tf.compat.v1.train.GradientDescentOptimizer(0.5), manager)
    loss = tf.reduce_sum(kernel * [3.0, 4.0]) + bias * factor
    grads, variables = zip(*opt.compute_gradients(loss, [kernel, bias]), strict=True)
    train_op = opt.apply_gradients(zip(way(grads, 2.5), variables, strict=True))
    (report,) = opt.overflow_reports()
    session.run(tf.compat.v1.global_variables_initializer())
    session.run(train_op, {factor: 0.0})
    clipped = [-0.25, 0.75] if way is _by_value else [0.25, 1.0]
    assert session.run([kernel, bias])[0].tolist() == clipped
    session.run(train_op, {factor: math.inf})
    assert [value.tolist() for value in session.run([kernel, bias])] == [clipped, 1.0]
    assert session.run(opt.loss_scale) == 4
    assert session.run(report.last).tolist() == [[0, 0, 0], [1, 0, 0]]


@for_every_keras()
def test_every_keras_skips_overflow_after_clipping_and_reports_its_variable(keras: ModuleType) -> None:
    variables = kernel_and_bias(keras)
    opt = wrap(optimizer(keras))
    opt.build(variables)
    scale = float(opt.loss_scale)

    before = [variable.numpy().tolist() for variable in variables]
    opt.get_scaled_loss(tf.constant(1.0))
    for way in _WAYS:
        grads = opt.get_unscaled_gradients([tf.fill([2, 2], scale), tf.constant([scale, math.inf])])
        opt.apply_gradients(zip(way(grads, 2.5), variables, strict=True))
    assert [variable.numpy().tolist() for variable in variables] == before
    assert int(opt.skipped_steps) == 3
    (report,) = opt.overflow_reports()
    assert report.steps.numpy().tolist() == [0, 3]


def test_each_replica_clips_its_own_gradients_and_all_skip_an_overflow(
    two_replicas: tf.distribute.MirroredStrategy,
) -> None:
    with two_replicas.scope():
        weight = tf.Variable([8.0, 8.0], aggregation=tf.VariableAggregation.SUM)
        manager = tfmp.ExponentialUpdateLossScaleManager(8, 1000, decr_every_n_nan_or_inf=1, decr_ratio=0.5)
    scaler = LossScaler(manager, tfmp.NonFiniteDetector(), is_distributed=True)

    def step(value: tf.Tensor) -> None:
        replica = tf.distribute.get_replica_context().replica_id_in_sync_group
        # On the second replica the norm is below clip_norm in the first step, and infinite in the second step.
        grad = tf.where(tf.equal(replica, 0), [3.0, 4.0], [value, 0.0])
        take_step(scaler, _by_global_norm([grad], 2.5), ["weight"], lambda grads: tf.group(weight.assign_sub(grads[0])))

    for value in (1.0, math.inf):
        two_replicas.run(step, args=(tf.constant(value),))
        assert [each.numpy().tolist() for each in two_replicas.experimental_local_results(weight)] == [[5.5, 6.0]] * 2
    assert float(manager.get_loss_scale()) == 4
