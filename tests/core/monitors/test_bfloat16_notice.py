"""The notice that a loss which is computed in bfloat16 needs no scaling."""

import logging
from collections.abc import Callable
from typing import Any

import pytest
import tensorflow as tf

import tfmp

_NEEDLESS = "the loss is computed in bfloat16, which has the range of float32: it needs no loss scaling"


def _loss(dtypes: list[tf.DType], weights: tf.Variable) -> tf.Tensor:
    """Return a loss that is computed by a product in each of the types, and cast to float32."""
    values = tf.ones([2, 2])
    for dtype in dtypes:
        values = tf.matmul(tf.cast(values, dtype), tf.cast(weights, dtype))
    return tf.reduce_mean(tf.cast(values, tf.float32))


@pytest.mark.parametrize(
    ("dtypes", "notices"),
    [
        ([tf.bfloat16], 1),
        ([tf.bfloat16, tf.float32], 1),
        ([tf.float32], 0),
        ([tf.float16], 0),
        ([tf.float16, tf.bfloat16], 0),
    ],
)
@pytest.mark.parametrize("jit_compile", [False, True], ids=["graph", "xla"])
def test_function_is_told_once_if_its_products_are_in_bfloat16(
    dtypes: list[tf.DType], notices: int, jit_compile: bool, caplog: pytest.LogCaptureFixture
) -> None:
    scaler, weights = tfmp.GradScaler(), tf.Variable(tf.eye(2))
    for _ in range(2):
        tf.function(lambda: scaler.scale(_loss(dtypes, weights)), jit_compile=jit_compile)()
    assert caplog.text.count(_NEEDLESS) == notices
    assert not notices or "pass enabled=False to tfmp.GradScaler" in caplog.text


@pytest.mark.graph
def test_graph_is_told(session: tf.compat.v1.Session, caplog: pytest.LogCaptureFixture) -> None:
    weights = tf.compat.v1.get_variable("weights", initializer=[[1.0, 0.0], [0.0, 1.0]])
    opt = tfmp.LossScaleOptimizer(
        tf.compat.v1.train.GradientDescentOptimizer(0.5), tfmp.ExponentialUpdateLossScaleManager(8, 1000)
    )
    opt.compute_gradients(_loss([tf.bfloat16], weights), [weights])
    assert caplog.text.count(_NEEDLESS) == 1


@pytest.mark.parametrize(("dtype", "notices"), [(tf.bfloat16, 1), (tf.float16, 0), (tf.float32, 0)])
def test_eager_code_is_told_by_the_type_of_the_loss(
    dtype: tf.DType, notices: int, caplog: pytest.LogCaptureFixture
) -> None:
    scaler = tfmp.GradScaler()
    for _ in range(2):
        scaler.scale(tf.constant(1.0, dtype))
    scaler.scale(1.0)
    assert caplog.text.count(_NEEDLESS) == notices


def test_autocast_is_seen(caplog: pytest.LogCaptureFixture) -> None:
    weights = tf.Variable(tf.eye(2))

    @tf.function
    def scaled(scaler: tfmp.GradScaler, dtype: str) -> tf.Tensor:
        with tfmp.autocast(dtype):
            loss = tf.reduce_mean(tf.nn.relu(tf.ones([2, 2]) @ weights) ** 2)
        return scaler.scale(loss)

    scaled(tfmp.GradScaler(), "float16")
    assert _NEEDLESS not in caplog.text
    scaled(tfmp.GradScaler(), "bfloat16")
    assert caplog.text.count(_NEEDLESS) == 1


@pytest.mark.parametrize(
    "make",
    [
        lambda: tfmp.GradScaler(enabled=False),
        lambda: tfmp.GradScaler(manager=tfmp.FixedLossScaleManager(1)),
    ],
    ids=["off", "scale of 1"],
)
def test_nothing_is_said_where_nothing_is_scaled(make: Callable[[], Any], caplog: pytest.LogCaptureFixture) -> None:
    make().scale(tf.constant(1.0, tf.bfloat16))
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_functions_that_are_called_may_hide_float16(caplog: pytest.LogCaptureFixture) -> None:
    scaler, weights = tfmp.GradScaler(), tf.Variable(tf.eye(2))
    hidden = tf.function(lambda values: tf.cast(tf.matmul(values, tf.cast(weights, tf.float16)), tf.bfloat16))

    @tf.function
    def scaled() -> tf.Tensor:
        values = hidden(tf.ones([2, 2], tf.float16))
        return scaler.scale(tf.reduce_mean(tf.matmul(values, tf.cast(weights, tf.bfloat16))))

    scaled()
    assert _NEEDLESS not in caplog.text
