"""AdamWeightDecayOptimizer and LAMBOptimizer, against the published formulas."""

import time
from pathlib import Path
from typing import Any

import numpy as np
import published_formulas
import pytest
import tensorflow as tf

import tfmp
from tfmp import bert

pytestmark = pytest.mark.graph

tf1 = tf.compat.v1

_OPTIMIZERS = {"adam": bert.AdamWeightDecayOptimizer, "lamb": bert.LAMBOptimizer}


def _variable(value: Any, name: str = "kernel", dtype: tf.DType = tf.float32) -> tf.Variable:
    return tf1.get_variable(name, initializer=tf.constant(value, dtype))


def _train_op(optimizer: tf1.train.Optimizer, *pairs: tuple[Any, tf.Variable]) -> tf.Operation:
    return optimizer.apply_gradients(pairs, tf1.train.get_or_create_global_step())


def _run(session: tf1.Session, train_op: tf.Operation, steps: int = 1) -> None:
    session.run(tf1.global_variables_initializer())
    for _ in range(steps):
        session.run(train_op)


def _late(value: tf.Tensor) -> tf.Tensor:
    """Return a value that is computed long after everything in the same run that does not wait for it."""
    return tf.ensure_shape(tf.numpy_function(lambda value: time.sleep(0.2) or value, [value], value.dtype), value.shape)


# The originals do not order the read and the increment of the step: where the increment came first, LAMB divided by 0,
# and the rate was that of the next step.
def test_lamb_corrects_its_first_update_by_step_1_and_not_0(session: tf1.Session) -> None:
    # Without an order, the counter would be incremented before the late gradient is computed.
    kernel = _variable([1.0])
    train_op = _train_op(bert.LAMBOptimizer(0.25), (_late(tf.ones(1)), kernel))
    _run(session, train_op)
    np.testing.assert_allclose(session.run(kernel), 0.75, rtol=1e-4)


def test_the_rate_is_read_before_the_step_is_counted(session: tf1.Session) -> None:
    global_step, kernel = tf1.train.get_or_create_global_step(), _variable([1.0])
    with tf.control_dependencies([_late(tf.constant(0.0))]):
        rate = tf.cast(global_step.read_value(), tf.float32)
    train_op = _train_op(bert.AdamWeightDecayOptimizer(rate), (tf.ones(1), kernel))
    _run(session, train_op)
    assert session.run([kernel, global_step]) == [1.0, 1]


@pytest.mark.parametrize("use_resource", [True, False])
@pytest.mark.parametrize("kind", _OPTIMIZERS)
def test_updates_follow_the_published_formula(kind: str, use_resource: bool, session: tf1.Session) -> None:
    rng = np.random.default_rng(0)
    start = rng.normal(size=(3, 4))
    grads = rng.normal(size=(6, 3, 4)) * 10.0 ** rng.integers(-4, 3, size=(6, 3, 4))
    reference = published_formulas.RULES[kind](start, decay=0.01)
    with tf1.variable_scope("net", use_resource=use_resource):
        kernel = _variable(start)
    grad = tf1.placeholder(tf.float32, [3, 4])
    train_op = _train_op(_OPTIMIZERS[kind](0.1, 0.01), (grad, kernel))
    session.run(tf1.global_variables_initializer())
    for value in grads:
        reference.step(value, 0.1)
        session.run(train_op, {grad: value})
        np.testing.assert_allclose(session.run(kernel), reference.value, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", _OPTIMIZERS)
def test_eager_code_takes_the_same_steps(kind: str) -> None:
    if not tf.executing_eagerly():
        pytest.skip("graph mode is on")
    rng = np.random.default_rng(1)
    reference = published_formulas.RULES[kind](rng.normal(size=5), decay=0.5)
    kernel, global_step = tf.Variable(np.float32(reference.value)), tf.Variable(0, dtype=tf.int64)
    rate = tf.Variable(0.25)
    optimizer = _OPTIMIZERS[kind](rate, 0.5)
    for step, grad in enumerate(rng.normal(size=(4, 5))):
        rate.assign(0.25 / (step + 1))
        reference.step(grad, 0.25 / (step + 1))
        # The argument manual_fp16 is accepted and changes nothing.
        optimizer.apply_gradients([(tf.constant(grad, tf.float32), kernel)], global_step, None, step % 2 == 0)
    np.testing.assert_allclose(kernel.numpy(), reference.value, rtol=1e-5)
    assert int(global_step) == 4


@pytest.mark.parametrize("kind", _OPTIMIZERS)
def test_a_sparse_gradient_moves_the_weights_as_its_dense_form(kind: str, session: tf1.Session) -> None:
    start = np.arange(8.0).reshape(4, 2)
    # Row 2 occurs twice: its gradients add up. Row 0 does not occur: its moments decay nevertheless.
    slices = tf.IndexedSlices(tf.constant([[1.0, 2.0], [3.0, 4.0]]), tf.constant([2, 2]), tf.constant([4, 2]))
    dense = tf.constant([[0.0, 0.0], [0.0, 0.0], [4.0, 6.0], [0.0, 0.0]])
    sparse_table, dense_table = _variable(start, "sparse"), _variable(start, "dense")
    train_op = _train_op(_OPTIMIZERS[kind](0.1, 0.01), (slices, sparse_table), (dense, dense_table))
    _run(session, train_op, 3)
    by_sparse, by_dense = session.run([sparse_table, dense_table])
    np.testing.assert_allclose(by_sparse, by_dense, rtol=1e-6)
    assert (by_dense[2] < start[2] - 0.1).all()


@pytest.mark.parametrize(("weights", "grad"), [([0.0, 0.0], [3.0, 4.0]), ([3.0, 4.0], [0.0, 0.0])])
def test_lamb_trusts_by_1_where_a_norm_is_0(weights: list[float], grad: list[float], session: tf1.Session) -> None:
    kernel = _variable(weights)
    train_op = _train_op(bert.LAMBOptimizer(0.5), (tf.constant(grad), kernel))
    _run(session, train_op)
    np.testing.assert_allclose(session.run(kernel), np.subtract(weights, 0.5 * np.sign(grad)), rtol=1e-5)


def test_biases_and_layer_norms_do_not_decay_unless_a_subclass_says_so(session: tf1.Session) -> None:
    class DecaysBiasesAlone(bert.AdamWeightDecayOptimizer):
        def decays(self, variable: tf.Variable) -> bool:
            return "bias" in variable.name

    layers = ["bias", "LayerNorm/gamma", "layer_norm/beta", "kernel"]
    variables = [_variable(np.ones(2), name) for name in ("word_embeddings", *(f"layer_0/{each}" for each in layers))]
    for make, decaying in ((bert.AdamWeightDecayOptimizer, [0, 4]), (DecaysBiasesAlone, [1])):
        optimizer = make(0.1, 0.5, exclude_from_weight_decay=bert.NOT_DECAYED)
        train_op = _train_op(optimizer, *((tf.zeros(2), variable) for variable in variables))
        _run(session, train_op)
        assert [optimizer.decays(variable) for variable in variables] == [index in decaying for index in range(5)]
        expected = [[0.95] * 2 if index in decaying else [1.0] * 2 for index in range(5)]
        np.testing.assert_allclose(session.run(variables), expected, rtol=1e-6)


def test_a_script_reads_the_settings_back(session: tf1.Session) -> None:
    optimizer = bert.LAMBOptimizer(0.5, 0.01, 0.8, 0.99, 1e-3, ["bias"])
    assert session.run([optimizer.learning_rate, "learning_rate:0"]) == [0.5, 0.5]
    names = ("weight_decay_rate", "beta_1", "beta_2", "epsilon", "exclude_from_weight_decay")
    assert [getattr(optimizer, name) for name in names] == [0.01, 0.8, 0.99, 1e-3, ["bias"]]
    assert optimizer.get_name() == "LAMBOptimizer"


@pytest.mark.parametrize("dtype", [tf.float16, tf.bfloat16])
def test_half_precision_weights_follow_their_float32_copy(dtype: tf.DType, session: tf1.Session) -> None:
    # Near 1 the spacing of float16 is 2**-10, and that of bfloat16 is 2**-7: a single step would be lost by rounding.
    kernel = _variable([1.0], dtype=dtype)
    optimizer = bert.AdamWeightDecayOptimizer(2.0**-12, weight_decay_rate=1.0)
    train_op = _train_op(optimizer, (tf.zeros([1], dtype), kernel))
    session.run(tf1.global_variables_initializer())
    shadow = optimizer.get_slot(kernel, "shadow")
    assert (shadow.op.name, shadow.dtype.base_dtype) == ("kernel/shadow", tf.float32)
    assert session.run(shadow) == 1.0
    for _ in range(64):
        session.run(train_op)
    np.testing.assert_allclose(session.run(shadow), (1 - 2.0**-12) ** 64, rtol=1e-6)
    assert session.run(kernel) == session.run(tf.cast(shadow, dtype)) < 1


@pytest.mark.parametrize("kind", _OPTIMIZERS)
def test_a_float16_weight_that_is_set_from_outside_goes_on_from_there(
    kind: str, session: tf1.Session, tmp_path: Path
) -> None:
    kernel = _variable([1.0, 3.0], dtype=tf.float16)
    optimizer = _OPTIMIZERS[kind](2.0**-12, weight_decay_rate=1.0)
    train_op = _train_op(optimizer, (tf.zeros([2]), kernel))
    shadow, saver = optimizer.get_slot(kernel, "shadow"), tf1.train.Saver([kernel])
    session.run(tf1.global_variables_initializer())
    path = saver.save(session, str(tmp_path / "weights.ckpt"))
    set_first = kernel.assign(tf.constant([0.5, 3.0], tf.float16))
    session.run(train_op)
    moved = session.run(shadow)
    session.run(set_first)
    session.run(train_op)
    # The second element was set to the rounded value of its float32 copy, so training goes on from the copy.
    assert abs(session.run(shadow)[0] - 0.5) < 2.0**-10
    assert session.run(shadow)[1] < moved[1] < 3.0
    for _ in range(16):
        session.run(train_op)
    assert session.run(kernel)[1] < 3.0
    saver.restore(session, path)
    session.run(train_op)
    np.testing.assert_allclose(session.run(shadow), [1.0, 3.0], rtol=2.0**-10)
    np.testing.assert_array_equal(session.run(kernel), session.run(tf.cast(shadow, tf.float16)))


class _Horovods(tf1.train.Optimizer):
    """A stand-in for Horovod's optimizer, which forwards methods but no attributes."""

    __module__ = "horovod.tensorflow"

    def __init__(self, optimizer: tf1.train.Optimizer) -> None:
        super().__init__(use_locking=False, name="wrapper")
        self._optimizer = optimizer
        self.compute_gradients, self.apply_gradients = optimizer.compute_gradients, optimizer.apply_gradients


@pytest.mark.parametrize("wrap", [lambda optimizer: optimizer, _Horovods], ids=["plain", "horovods"])
@pytest.mark.parametrize("steps", [1, 2])
def test_the_gradient_of_a_float16_weight_stays_in_float32(steps: int, wrap: Any, session: tf1.Session) -> None:
    kernel, inner = _variable([1.0], dtype=tf.float16), bert.AdamWeightDecayOptimizer(0.1)
    optimizer = tfmp.LossScaleOptimizer(wrap(inner), tfmp.FixedLossScaleManager(2.0**20), accumulation_steps=steps)
    # In float16 the gradient would be 0.
    train_op = optimizer.minimize(tf.cast(kernel, tf.float32) * 2.0**-30)
    _run(session, train_op, steps)
    np.testing.assert_allclose(session.run(inner.get_slot(kernel, "adam_m")), 0.1 * 2.0**-30, rtol=1e-6)
