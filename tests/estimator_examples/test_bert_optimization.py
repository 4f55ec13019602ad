"""The schedule, AdamW, and the step that is built from them."""

import dataclasses
from typing import Any

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


class _NumpyAdamW:
    """The update of one variable, as the optimizer's docstring has it."""

    def __init__(self, value: np.ndarray, rate: float, decay: float) -> None:
        self.value = value.astype(np.float64)
        self._m = np.zeros_like(self.value)
        self._v = np.zeros_like(self.value)
        self._rate = rate
        self._decay = decay

    def step(self, grad: np.ndarray) -> None:
        self._m = 0.9 * self._m + 0.1 * grad
        self._v = 0.999 * self._v + 0.001 * grad**2
        self.value -= self._rate * (self._m / (np.sqrt(self._v) + 1e-6) + self._decay * self.value)


def _variable(value: np.ndarray, name: str = "kernel") -> tf.Variable:
    return tf1.get_variable(name, initializer=tf.constant(value, tf.float32))


def _rate(session: tf1.Session, step: int, **changes: Any) -> float:
    settings = dataclasses.replace(SETTINGS, **changes)
    return session.run(optimization.learning_rate(tf.constant(step, tf.int64), settings))


def test_the_learning_rate_rises_then_falls_to_zero(session: tf1.Session) -> None:
    rates = [_rate(session, step) for step in range(101)]
    np.testing.assert_allclose(rates[:10], [0.05 * (step + 1) for step in range(10)], rtol=1e-6)
    np.testing.assert_allclose(rates[10:], [0.5 * (100 - step) / 90 for step in range(10, 101)], rtol=1e-6, atol=0)
    assert rates[100] == 0


def test_the_learning_rate_stays_zero_past_the_end(session: tf1.Session) -> None:
    assert _rate(session, 150) == 0


def test_without_warm_up_the_learning_rate_starts_at_its_peak(session: tf1.Session) -> None:
    assert _rate(session, 0, num_warmup_steps=0) == 0.5


@pytest.mark.parametrize("use_resource", [True, False])
def test_adamw_follows_the_numpy_reference(use_resource: bool, session: tf1.Session) -> None:
    rng = np.random.default_rng(0)
    start = rng.normal(size=(3, 4))
    grads = rng.normal(size=(6, 3, 4)) * 10.0 ** rng.integers(-4, 3, size=(6, 3, 4))
    reference = _NumpyAdamW(start, rate=0.1, decay=0.01)
    with tf1.variable_scope("net", use_resource=use_resource):
        kernel = _variable(start)
    grad = tf1.placeholder(tf.float32, [3, 4])
    train_op = optimization.AdamWeightDecayOptimizer(0.1, 0.01).apply_gradients([(grad, kernel)])
    session.run(tf1.global_variables_initializer())
    for value in grads:
        reference.step(value)
        session.run(train_op, {grad: value})
        np.testing.assert_allclose(session.run(kernel), reference.value, rtol=1e-5, atol=1e-6)


def test_a_sparse_gradient_moves_the_weights_as_its_dense_form(session: tf1.Session) -> None:
    start = np.arange(8.0).reshape(4, 2)
    # Row 2 twice: its gradients add up. Row 0 not at all: its moments decay all the same.
    slices = tf.IndexedSlices(tf.constant([[1.0, 2.0], [3.0, 4.0]]), tf.constant([2, 2]), tf.constant([4, 2]))
    dense = tf.constant([[0.0, 0.0], [0.0, 0.0], [4.0, 6.0], [0.0, 0.0]])
    sparse_table, dense_table = _variable(start, "sparse"), _variable(start, "dense")
    optimizer = optimization.AdamWeightDecayOptimizer(0.1, 0.01)
    train_op = optimizer.apply_gradients([(slices, sparse_table), (dense, dense_table)])
    session.run(tf1.global_variables_initializer())
    for _ in range(3):
        session.run(train_op)
    by_sparse, by_dense = session.run([sparse_table, dense_table])
    np.testing.assert_allclose(by_sparse, by_dense, rtol=1e-6)
    assert (by_dense[2] < start[2] - 0.1).all()


@pytest.mark.parametrize(
    ("name", "decays"),
    [
        ("bert/layer_0/kernel", True),
        ("bert/word_embeddings", True),
        ("bert/layer_0/bias", False),
        ("bert/layer_0/LayerNorm/gamma", False),
        ("bert/layer_0/layer_norm/beta", False),
    ],
)
def test_biases_and_layer_norms_do_not_decay(name: str, decays: bool, session: tf1.Session) -> None:
    variable = _variable(np.ones(2), name)
    optimizer = optimization.AdamWeightDecayOptimizer(0.1, 0.5, exclude=optimization.NOT_DECAYED)
    train_op = optimizer.apply_gradients([(tf.zeros(2), variable)])
    session.run(tf1.global_variables_initializer())
    session.run(train_op)
    assert optimizer.decays(variable) == decays
    np.testing.assert_allclose(session.run(variable), 0.95 if decays else 1.0, rtol=1e-6)


def test_the_moments_are_saved_under_the_names_of_bert(session: tf1.Session) -> None:
    del session
    variable = _variable(np.ones(2), "layer/kernel")
    optimizer = optimization.AdamWeightDecayOptimizer(0.1)
    optimizer.apply_gradients([(tf.ones(2), variable)])
    names = {slot.op.name for slot in optimizer.variables()}
    assert names == {"layer/kernel/adam_m", "layer/kernel/adam_v"}


def test_apply_gradients_counts_the_step_once(session: tf1.Session) -> None:
    global_step = tf1.train.get_or_create_global_step()
    optimizer = optimization.AdamWeightDecayOptimizer(0.1)
    train_op = optimizer.apply_gradients([(tf.ones(2), _variable(np.ones(2)))], global_step)
    session.run(tf1.global_variables_initializer())
    for _ in range(3):
        session.run(train_op)
    assert session.run(global_step) == 3


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
    training = optimization.build_training(loss, SETTINGS)
    session.run(tf1.global_variables_initializer())
    session.run(training.train_op)
    slots = {variable.op.name: session.run(variable) for variable in tf1.global_variables()}
    np.testing.assert_allclose(slots["first_bias/adam_m"], 0.1 * 0.6, rtol=1e-5)
    np.testing.assert_allclose(slots["second_bias/adam_m"], 0.1 * 0.8, rtol=1e-5)


def test_the_rate_of_a_step_is_that_of_the_steps_before_it(session: tf1.Session) -> None:
    training = optimization.build_training(tf.reduce_sum(_variable(np.ones(2))), SETTINGS)
    session.run(tf1.global_variables_initializer())
    rates = [session.run([training.learning_rate, training.train_op])[0] for _ in range(4)]
    np.testing.assert_allclose(rates, [0.05, 0.1, 0.15, 0.2], rtol=1e-6)
