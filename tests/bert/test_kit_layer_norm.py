"""Layer normalization, against its formula."""

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import tfmp
from tfmp import bert

pytestmark = pytest.mark.graph

tf1 = tf.compat.v1


@pytest.mark.parametrize(("dtype", "epsilon"), [("float32", 1e-12), ("float16", 1e-3)])
@pytest.mark.parametrize("axes", [(-1, -1), (1, -1), (1, 1)])
def test_it_normalizes_by_mean_and_variance(
    axes: tuple[int, int], dtype: str, epsilon: float, session: tf1.Session
) -> None:
    values = np.random.default_rng(0).normal(3.0, 0.25, size=(2, 4, 5)).astype(dtype)
    normalized = bert.layer_norm(tf.constant(values), axes[0], begin_params_axis=axes[1])
    beta, gamma = tf1.trainable_variables()
    assert normalized.dtype == dtype
    assert beta.shape == values.shape[axes[1] :]
    wide = values.astype(np.float64)
    over = tuple(range(axes[0] % 3, 3))
    mean, variance = wide.mean(over, keepdims=True), wide.var(over, keepdims=True)
    expected = 2.0 * (wide - mean) / np.sqrt(variance + epsilon) + 0.5
    session.run(
        [beta.assign(tf.fill(beta.shape, tf.cast(0.5, dtype))), gamma.assign(tf.fill(gamma.shape, tf.cast(2.0, dtype)))]
    )
    tolerance = 1e-4 if dtype == "float32" else 5e-3
    np.testing.assert_allclose(session.run(normalized), expected, atol=tolerance)


def test_squares_that_overflow_float16_do_not_matter(session: tf1.Session) -> None:
    normalized = bert.layer_norm(tf.constant([[-1000.0, 1000.0]], tf.float16))
    session.run(tf1.global_variables_initializer())
    assert session.run(normalized).tolist() == [[-1.0, 1.0]]


@pytest.mark.parametrize(("level", "epsilon"), [("O1", 1e-12), ("O2", 1e-3), ("O1-bfloat16", 1e-12)])
def test_small_activations_are_normalized_at_o1_as_in_float32(level: str, epsilon: float, session: tf1.Session) -> None:
    with tfmp.precision(level) as precision:
        half = tf.matmul(precision.cast(tf.constant([[0.0, 1.0]])), precision.cast(tf.eye(2) * 2.0**-5))
        normalized = bert.layer_norm(half)
    assert half.dtype == normalized.dtype
    assert half.dtype in (tf.float16, tf.bfloat16)
    session.run(tf1.global_variables_initializer())
    expected = 2.0**-6 / np.sqrt(2.0**-12 + epsilon)
    # 8 bits of bfloat16
    assert session.run(tf.cast(normalized, tf.float32)).tolist() == [pytest.approx([-expected, expected], rel=2**-8)]


def test_its_variables_have_the_names_of_contrib(session: tf1.Session) -> None:
    del session
    inputs = tf.ones([2, 3])
    for scope in (None, None, "output"):
        bert.layer_norm(inputs, scope=scope)
    names = [variable.op.name for variable in tf1.trainable_variables()]
    assert names == [
        f"{scope}/{name}" for scope in ("LayerNorm", "LayerNorm_1", "output") for name in ("beta", "gamma")
    ]


def test_a_storage_getter_keeps_its_variables_in_float32(session: tf1.Session) -> None:
    del session
    with tf1.variable_scope("bert", custom_getter=tfmp.float32_variable_storage_getter):
        assert bert.layer_norm(tf.ones([2, 3], tf.float16)).dtype == tf.float16
    assert [variable.dtype.base_dtype for variable in tf1.trainable_variables()] == [tf.float32] * 2


@pytest.mark.parametrize(
    ("inputs", "axes", "error", "message"),
    [
        (lambda: tf.constant([[1, 2]]), (-1, -1), TypeError, "inputs must be of a floating-point type, got int32"),
        (lambda: tf.ones([2, 3]), (2, -1), ValueError, "begin_norm_axis must be an axis of inputs, got 2"),
        (
            lambda: tf1.placeholder(tf.float32, [2, None]),
            (-1, -1),
            ValueError,
            "sizes of inputs from begin_params_axis",
        ),
    ],
)
def test_bad_inputs_of_layer_norm_are_refused(
    inputs: Any, axes: tuple[int, int], error: type[Exception], message: str, session: tf1.Session
) -> None:
    del session
    with pytest.raises(error, match=message):
        bert.layer_norm(inputs(), axes[0], begin_params_axis=axes[1])


def test_a_name_in_the_place_of_an_axis_is_refused(session: tf1.Session) -> None:
    del session
    with pytest.raises(TypeError, match="got 'output': pass the name as scope='output'"):
        bert.layer_norm(tf.ones([2, 3]), "output")


def test_a_flag_of_contrib_in_the_place_of_an_axis_is_refused(session: tf1.Session) -> None:
    del session
    with pytest.raises(TypeError, match=r"begin_norm_axis must be a whole number, got True\."):
        bert.layer_norm(tf.ones([2, 3]), True)
