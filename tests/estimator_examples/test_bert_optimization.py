"""Tests of the training step that the example builds from its settings."""

import dataclasses

import numpy as np
import pytest
import tensorflow as tf

from estimator_examples.bert import optimization

pytestmark = pytest.mark.graph

tf1 = tf.compat.v1

SETTINGS = optimization.OptimizerSettings(
    learning_rate=0.5,
    num_train_steps=100,
    num_warmup_steps=10,
    weight_decay=0.01,
    clip_norm=1.0,
    loss_scale=None,
    init_loss_scale=2.0**10,
    incr_every_n_steps=1000,
)


def _variable(value: np.ndarray, name: str = "kernel") -> tf.Variable:
    return tf1.get_variable(name, initializer=tf.constant(value, tf.float32))


def test_an_overflow_skips_the_whole_step(session: tf1.Session) -> None:
    kernel = _variable(np.ones(3))
    factor = tf1.placeholder(tf.float32, [])
    training = optimization.build_training(tf.reduce_sum(kernel) * factor, SETTINGS)
    state = [kernel, *training.optimizer.variables(), tf1.train.get_global_step()]
    session.run(tf1.global_variables_initializer())
    session.run(training.train_op, {factor: 1.0})
    before = session.run(state)
    session.run(training.train_op, {factor: np.inf})
    for old, new in zip(before, session.run(state), strict=True):
        np.testing.assert_array_equal(old, new)
    counts = session.run([training.optimizer.applied_steps, training.optimizer.skipped_steps])
    assert counts == [1, 1]
    assert session.run(tf1.train.get_global_step()) == 1


def test_gradients_are_clipped_by_their_global_norm(session: tf1.Session) -> None:
    first, second = _variable(np.ones(1), "first_bias"), _variable(np.ones(1), "second_bias")
    loss = tf.reduce_sum(3e3 * first + 4e3 * second)
    training = optimization.build_training(loss, dataclasses.replace(SETTINGS, clip_norm=2.0))
    session.run(tf1.global_variables_initializer())
    session.run(training.train_op)
    slots = {variable.op.name: session.run(variable) for variable in tf1.global_variables()}
    np.testing.assert_allclose(slots["first_bias/adam_m"], 0.1 * 1.2, rtol=1e-5)
    np.testing.assert_allclose(slots["second_bias/adam_m"], 0.1 * 1.6, rtol=1e-5)


def test_the_learning_rate_depends_on_the_steps_applied_before(session: tf1.Session) -> None:
    training = optimization.build_training(tf.reduce_sum(_variable(np.ones(2))), SETTINGS)
    session.run(tf1.global_variables_initializer())
    rates = [session.run([training.learning_rate, training.train_op])[0] for _ in range(4)]
    np.testing.assert_allclose(rates, [0.0, 0.05, 0.1, 0.15], rtol=1e-6)


def test_weights_decay_as_set_and_biases_do_not(session: tf1.Session) -> None:
    kernel, bias = _variable(np.ones(1)), _variable(np.ones(1), "bias")
    settings = dataclasses.replace(SETTINGS, num_warmup_steps=0, weight_decay=0.5)
    training = optimization.build_training(tf.reduce_sum(0.0 * kernel + 0.0 * bias), settings)
    session.run(tf1.global_variables_initializer())
    session.run(training.train_op)
    np.testing.assert_allclose(session.run([kernel, bias]), [[0.75], [1.0]])


@pytest.mark.parametrize(("loss_scale", "after_overflows"), [(64.0, [64, 64]), (None, [1024, 512])])
def test_the_loss_scale_is_fixed_or_dynamic(
    loss_scale: float | None, after_overflows: list[float], session: tf1.Session
) -> None:
    settings = dataclasses.replace(SETTINGS, loss_scale=loss_scale)
    training = optimization.build_training(_variable(np.float32(1.0)) * np.inf, settings)
    session.run(tf1.global_variables_initializer())
    scales = []
    for _ in after_overflows:
        session.run(training.train_op)
        scales.append(session.run(training.optimizer.loss_scale))
    assert scales == after_overflows
