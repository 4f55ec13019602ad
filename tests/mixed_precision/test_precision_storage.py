import numpy as np
import pytest
import tensorflow as tf

import tfmp

pytestmark = pytest.mark.graph


def _scope(dtype: tf.DType = tf.float16) -> tf.compat.v1.variable_scope:
    return tf.compat.v1.variable_scope("net", dtype=dtype, custom_getter=tfmp.float32_variable_storage_getter)


@pytest.mark.parametrize(
    ("dtype", "trainable", "stored"),
    [
        (tf.float16, True, tf.float32),
        (tf.bfloat16, True, tf.float32),
        (tf.float32, True, tf.float32),
        (tf.float64, True, tf.float64),
        (tf.float16, False, tf.float16),
    ],
)
def test_trainable_half_variable_is_stored_in_float32_and_others_as_asked_for(
    session: tf.compat.v1.Session, dtype: tf.DType, trainable: bool, stored: tf.DType
) -> None:
    with _scope(dtype):
        tensor = tf.compat.v1.get_variable("w", [3], trainable=trainable)
    (variable,) = tf.compat.v1.global_variables()
    assert (tensor.dtype.base_dtype, variable.dtype.base_dtype, variable.op.name) == (dtype, stored, "net/w")
    assert (tensor is variable) == (dtype == stored)


@pytest.mark.parametrize(
    "initializer",
    [
        lambda: tf.constant([0.5, 2.0], tf.float16),
        lambda: np.float16([0.5, 2.0]),
        lambda: lambda shape, dtype, **_: tf.constant([0.5, 2.0], dtype),
    ],
    ids=["tensor", "array", "function"],
)
def test_initializer_of_the_type_asked_for_is_taken(session: tf.compat.v1.Session, initializer: object) -> None:
    value = initializer()
    with _scope():
        tensor = tf.compat.v1.get_variable("w", [2] if callable(value) else None, initializer=value)
    session.run(tf.compat.v1.global_variables_initializer())
    assert session.run(tensor).tolist() == [0.5, 2]


def test_regularizer_sees_the_stored_variable(session: tf.compat.v1.Session) -> None:
    seen = []
    with _scope():
        tf.compat.v1.get_variable("w", [2], regularizer=lambda w: seen.append(w.dtype.base_dtype))
    assert seen == [tf.float32]


def test_reused_variable_is_the_same(session: tf.compat.v1.Session) -> None:
    for reuse in (False, True):
        with tf.compat.v1.variable_scope(
            "net", dtype=tf.float16, custom_getter=tfmp.float32_variable_storage_getter, reuse=reuse
        ):
            tf.compat.v1.get_variable("w", [2])
    assert len(tf.compat.v1.trainable_variables()) == 1


def test_small_updates_add_up_in_float32(session: tf.compat.v1.Session) -> None:
    with _scope():
        w = tf.compat.v1.get_variable("w", initializer=tf.constant(1.0, tf.float16))
    loss = tf.cast(w, tf.float32) * 2.0**-12
    opt = tfmp.LossScaleOptimizer(tf.compat.v1.train.GradientDescentOptimizer(1.0), tfmp.FixedLossScaleManager(1024))
    train_op = opt.minimize(loss)
    session.run(tf.compat.v1.global_variables_initializer())
    for _ in range(16):
        session.run(train_op)
    # In float16, 1 - 2**-12 rounds to 1, so a float16 weight would still be 1.
    assert np.float16(1) - np.float16(2.0**-12) == 1
    assert session.run(w) == 1 - 2.0**-8
