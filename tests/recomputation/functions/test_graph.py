"""Recomputed functions in graphs of TF1 that make their variables themselves, by `get_variable`."""

from collections.abc import Callable

import numpy as np
import pytest
import tensorflow as tf
from graph_ops import needed_for, read_for

import tfmp

tf1 = tf.compat.v1
pytestmark = pytest.mark.graph

_X = np.random.default_rng(1).normal(size=[3, 4]).astype(np.float32)

Block = Callable[[tf.Tensor], tf.Tensor]
Build = Callable[[Callable[[Block], Block], tf.Tensor], list[tf.Tensor]]


def _dense(x: tf.Tensor, use_resource: bool | None = None) -> tf.Tensor:
    with tf1.variable_scope(None, default_name="dense"):
        kernel = tf1.get_variable(
            "kernel", [4, 4], initializer=tf1.glorot_uniform_initializer(seed=1), use_resource=use_resource
        )
        bias = tf1.get_variable("bias", [4], initializer=tf1.ones_initializer(), use_resource=use_resource)
    return tf.tanh(x @ kernel + bias)


def _numbers(build: Build, wrap: Callable[[Block], Block]) -> list[np.ndarray]:
    """Build a graph with what `wrap` makes of its blocks, and compute the tensors that `build` returns."""
    with tf.Graph().as_default(), tf1.Session() as session:
        fetched = [tf.convert_to_tensor(each) for each in build(wrap, tf.constant(_X))]
        session.run(tf1.global_variables_initializer())
        return session.run(fetched)


def _assert_same(build: Build, rtol: float = 1e-6) -> None:
    plain, again = _numbers(build, lambda block: block), _numbers(build, tfmp.recompute)
    assert len(plain) == len(again) > 1
    for each, other in zip(plain, again, strict=True):
        np.testing.assert_allclose(other, each, rtol, atol=rtol / 10)


@pytest.mark.parametrize("use_resource", [False, True])
def test_second_run_gets_the_variables_of_the_first_in_their_order(use_resource: bool) -> None:
    def build(wrap: Callable[[Block], Block], x: tf.Tensor) -> list[tf.Tensor]:
        block = wrap(lambda x: _dense(x, use_resource))
        with tf1.variable_scope("net"):
            y = block(block(x))
        names = [f"net/{layer}/{name}" for layer in ("dense", "dense_1") for name in ("kernel", "bias")]
        assert [v.op.name for v in tf1.trainable_variables()] == names
        grads = tf.gradients(tf.reduce_sum(y**2), [x, *tf1.trainable_variables()])
        assert len(tf1.trainable_variables()) == 4
        return [y, *grads]

    _assert_same(build)


def test_recomputed_functions_call_recomputed_functions() -> None:
    def build(wrap: Callable[[Block], Block], x: tf.Tensor) -> list[tf.Tensor]:
        inner = wrap(_dense)
        y = wrap(lambda x: inner(_dense(inner(x))))(x)
        return [y, *tf.gradients(tf.gather(y, [0, 0, 2]), [x, *tf1.trainable_variables()])]

    _assert_same(build)


def test_float32_storage_keeps_its_variables() -> None:
    def build(wrap: Callable[[Block], Block], x: tf.Tensor) -> list[tf.Tensor]:
        def block(x: tf.Tensor) -> tf.Tensor:
            with tf1.variable_scope("half", dtype=tf.float16, custom_getter=tfmp.float32_variable_storage_getter):
                w = tf1.get_variable("w", [4], initializer=tf1.ones_initializer())
            assert w.dtype == tf.float16
            return tf.cast(tf.cast(x, tf.float16) * w, tf.float32)

        y = wrap(block)(x)
        (w,) = tf1.trainable_variables()
        assert w.dtype.base_dtype == tf.float32
        return [y, *tf.gradients(y, [x, w])]

    _assert_same(build)


def test_custom_getter_of_the_scope_stays(session: tf1.Session) -> None:
    asked = []

    def getter(getter: Callable[..., tf.Variable], name: str, **kwargs: object) -> tf.Variable:
        asked.append(name)
        return getter(name, **kwargs)

    with tf1.variable_scope("net", custom_getter=getter) as scope:
        before = scope.custom_getter
        y = tfmp.recompute(_dense)(tf.constant(_X))
        assert scope.custom_getter is before
    tf.gradients(y, tf1.trainable_variables())
    assert asked == ["net/dense/kernel", "net/dense/bias"]
    assert tf1.get_variable_scope().name == ""


def test_second_run_adds_nothing_to_collections(session: tf1.Session) -> None:
    def block(x: tf.Tensor) -> tf.Tensor:
        w = tf1.get_variable("w", [4], regularizer=tf.nn.l2_loss)
        moving = tf1.get_variable("moving", [], trainable=False)
        tf1.add_to_collection(tf1.GraphKeys.UPDATE_OPS, tf1.assign(moving, tf.reduce_mean(x)))
        tf1.losses.add_loss(tf.reduce_sum(x))
        tf1.summary.scalar("mean", tf.reduce_mean(x))
        return x * w

    y = tfmp.recompute(block)(tf.constant(_X))
    keys = ("update_ops", "losses", "regularization_losses", "summaries", "variables", "trainable_variables")
    before = [len(tf1.get_collection(key)) for key in keys]
    assert before == [1, 1, 1, 1, 2, 1]
    tf.gradients(y, tf1.trainable_variables())
    assert [len(tf1.get_collection(key)) for key in keys] == before


def _backward(block: Block) -> tuple[list[tf.Operation], list[tf.Operation]]:
    """Return the ops that a call of a block adds, and those that its gradients add."""
    graph = tf1.get_default_graph()
    x = tf.constant(_X)
    start = len(graph.get_operations())
    y = block(x)
    middle = len(graph.get_operations())
    tf.gradients(y, [x, *tf1.trainable_variables()])
    return graph.get_operations()[start:middle], graph.get_operations()[middle:]


def test_gradients_use_no_activation_and_their_run_waits_for_those_of_the_results(session: tf1.Session) -> None:
    def computed(forward: list[tf.Operation], backward: list[tf.Operation]) -> set[str]:
        activations = {op.name for op in forward if op.type in {"MatMul", "Add", "AddV2", "Tanh", "BiasAdd"}}
        return activations & {tensor.op.name for op in backward for tensor in op.inputs}

    assert computed(*_backward(_dense))
    forward, backward = _backward(tfmp.recompute(_dense))
    # The zeros that stand for gradients of what no loss uses have the shape of the results.
    assert computed(forward, backward) == set()
    (product,) = [op for op in backward if op.type == "MatMul" and "grad" not in op.name.split("/")[-1].lower()][:1]
    assert any("grad_ys_0" in op.name for op in needed_for(product))


def test_each_gradient_waits_until_the_second_run_has_read_all_variables(session: tf1.Session) -> None:
    """A session would order neither the updates nor the reads."""
    first, second = (tf1.get_variable(name, [], use_resource=True) for name in ("first", "second"))
    y = tfmp.recompute(lambda x: x * first * second)(tf.constant(_X))
    # The gradient of each factor is computed from the other one.
    grads = tf.gradients(y, [first, second])
    assert read_for(grads[0]) == read_for(grads[1])
    assert len(read_for(grads[0])) > 1


@pytest.mark.skipif(not tf.__version__.startswith("2.15."), reason="tf.compat.v1.layers needs Keras 2.15")
@pytest.mark.filterwarnings("ignore:`tf.layers.:UserWarning")
def test_layers_of_tf1_are_recomputed() -> None:
    def block(x: tf.Tensor) -> tf.Tensor:
        hidden = tf1.layers.dense(x, 4, tf.nn.relu, kernel_initializer=tf1.glorot_uniform_initializer(seed=1))
        return x + tf1.layers.batch_normalization(hidden, training=True)

    def build(wrap: Callable[[Block], Block], x: tf.Tensor) -> list[tf.Tensor]:
        y = wrap(block)(wrap(block)(x))
        weights = tf1.trainable_variables()
        assert [v.op.name for v in weights[4:6]] == ["dense_1/kernel", "dense_1/bias"]
        grads = tf.gradients(tf.reduce_sum(y**2), weights)
        # The mean and the variance of each block.
        assert len(tf1.get_collection("update_ops")) == 4
        return [y, *grads]

    # The variance of a few numbers magnifies what is rounded.
    _assert_same(build, rtol=1e-4)
