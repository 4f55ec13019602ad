"""Levels in graphs of TensorFlow 1: the types of variables, of what layers compute, what trains, and what is told."""

import functools
import logging
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import tfmp

tf1 = tf.compat.v1

pytestmark = pytest.mark.graph

needs_tf_layers = pytest.mark.skipif(
    not hasattr(tf1.layers, "conv2d"), reason="tf.compat.v1.layers is not available with Keras 3"
)


@pytest.fixture(autouse=True)
def graph() -> Iterator[tf.Graph]:
    with tf.Graph().as_default() as graph:
        yield graph


def _stored() -> dict[str, str]:
    return {each.op.name: each.dtype.base_dtype.name for each in tf1.global_variables()}


_LEVELS = {
    "O0": ("float32", "float32"),
    "O1": ("float32", "float32"),
    "O2": ("float16", "float32"),
    "O3": ("float16", "float16"),
    "O2-bfloat16": ("bfloat16", "float32"),
    "O3-bfloat16": ("bfloat16", "bfloat16"),
}
_HALF = {"O0": "float32", "O2-bfloat16": "bfloat16"}


@pytest.mark.parametrize("level", _LEVELS)
def test_variable_of_no_type_has_that_of_the_level_and_others_have_their_own(level: str) -> None:
    seen, stored = _LEVELS[level]
    with tfmp.precision(level), tf1.variable_scope("net"):
        assert tf1.get_variable("w", [2, 3]).dtype.base_dtype.name == seen
        assert tf1.get_variable("wide", [2], tf.float32).dtype.base_dtype == tf.float32
        tf1.get_variable("n", [], tf.int32, tf1.zeros_initializer(), trainable=False)
        tf1.get_variable("count", initializer=3)
        tf1.get_variable("double", initializer=tf.constant(3.0, tf.float64))
        with tf1.variable_scope("inner", dtype=tf.float64), tfmp.precision("O0"):
            tf1.get_variable("w", [2])
    assert _stored() == {
        "net/w": stored,
        "net/wide": "float32",
        "net/n": "int32",
        "net/count": "int32",
        "net/double": "float64",
        "net/inner/w": "float64",
    }


def test_variables_outside_of_the_scope_are_as_without_it() -> None:
    before = tf1.get_variable_scope()
    dtype, getter = before.dtype, before.custom_getter
    with tfmp.precision("O3"):
        pass
    with pytest.raises(ZeroDivisionError), tfmp.precision("O2"):
        raise ZeroDivisionError
    assert (before.dtype, before.custom_getter) == (dtype, getter)
    assert tf1.get_variable("w", [2]).dtype.base_dtype == tf.float32


def test_names_are_those_without_a_level() -> None:
    def names() -> list[str]:
        with tf.Graph().as_default():
            for level in ("O2", "O1"):
                with tfmp.precision(level) if with_levels else tf1.name_scope(""), tf1.variable_scope(None, "block"):
                    tf1.get_variable("w", [2])
            return [each.op.name for each in tf1.global_variables()]

    with_levels = True
    found = names()
    with_levels = False
    assert found == names() == ["block/w", "block_1/w"]


def test_innermost_level_decides_through_scopes_of_the_user() -> None:
    seen = []

    def getter(getter: Callable[..., Any], name: str, *args: Any, **kwargs: Any) -> Any:
        seen.append(kwargs["dtype"].name)
        return getter(name, *args, **kwargs)

    with tfmp.precision("O2"), tf1.variable_scope("outer", custom_getter=getter):
        tf1.get_variable("w", [2])
        with tfmp.precision("O3"):
            tf1.get_variable("x", [2])
            with tf1.variable_scope("inner"), tfmp.precision("O0"):
                tf1.get_variable("y", [2])
            tf1.get_variable("z", [2])
        tf1.get_variable("last", [2])
    assert _stored() == {
        "outer/w": "float32",
        "outer/x": "float16",
        "outer/inner/y": "float32",
        "outer/z": "float16",
        "outer/last": "float32",
    }
    # A getter of the user within a level is asked first; one outside of it sees what is stored.
    assert seen == ["float16", "float16", "float32", "float16", "float16"]


def test_variables_are_shared_by_levels() -> None:
    with tf1.variable_scope("net", reuse=tf1.AUTO_REUSE):
        for level in ("O0", "O1", "O2"):
            with tfmp.precision(level):
                tf1.get_variable("w", [2])
    assert _stored() == {"net/w": "float32"}


def test_level_acts_in_its_thread_and_graph_only(graph: tf.Graph) -> None:
    def build() -> None:
        with graph.as_default():
            tf1.get_variable("in_thread", [2])

    with tfmp.precision("O3"):
        thread = threading.Thread(target=build)
        thread.start()
        thread.join()
        with tf.Graph().as_default():
            tf1.get_variable("elsewhere", [2])
            assert _stored() == {"elsewhere": "float32"}
        tf1.get_variable("here", [2])
    assert _stored() == {"in_thread": "float32", "here": "float16"}


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3", "O2-bfloat16"])
def test_products_and_losses_have_the_types_of_the_level(level: str) -> None:
    with tfmp.precision(level) as precision:
        w, b = tf1.get_variable("w", [3, 2]), tf1.get_variable("b", [2])
        y = precision.cast(tf.ones([4, 3])) @ w + b
        loss = tf.reduce_mean(tf.cast(y, tf.float32) ** 2)
    assert (y.dtype.name, loss.dtype.name) == (_HALF.get(level, "float16"), "float32")
    grads = tf.gradients(loss, tf1.trainable_variables())
    assert [each.dtype.name for each in grads] == list(_stored().values())


def test_island_computes_in_float32_within_autocast() -> None:
    x = tf.ones([4, 3])
    with tfmp.precision("O1"):
        w = tf1.get_variable("w", [3, 3])
        y = x @ w
        with tfmp.precision("O0") as island:
            z = island.cast(y) @ w
        last = z @ w
    assert [each.dtype.name for each in (y, z, last)] == ["float16", "float32", "float16"]


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
def test_cast_changes_floats_alone(level: str) -> None:
    given = {
        "x": tf.ones([2]),
        "half": [tf.ones([2], tf.bfloat16)],
        "wide": tf.ones([2], tf.float64),
        "n": tf.constant(1),
        "name": "text",
        "none": None,
    }
    found = tfmp.precision(level).cast(given)
    to = {"O0": "float32", "O2": "float16", "O3": "float16"}
    assert found["x"].dtype.name == to.get(level, "float32")
    assert found["half"][0].dtype.name == to.get(level, "bfloat16")
    assert (found["wide"].dtype, found["n"].dtype, found["name"], found["none"]) == (tf.float64, tf.int32, "text", None)


@needs_tf_layers
@pytest.mark.filterwarnings("ignore:`tf.layers.*:UserWarning")
@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
def test_layers_of_tensorflow_1_compute_in_the_type_of_the_level(level: str, graph: tf.Graph) -> None:
    expected = tf.float32 if level == "O0" else tf.float16
    with tfmp.precision(level) as precision:
        x = precision.cast(tf.ones([2, 8, 8, 3]))
        x = tf1.layers.conv2d(x, 4, 3)
        x = tf1.layers.batch_normalization(x, training=True)
        x = tf1.layers.dense(tf1.layers.dropout(tf1.layers.flatten(tf.nn.relu(x)), 0.5, training=True), 5)
        loss = tf.reduce_mean(tf.cast(x, tf.float32) ** 2)
    assert x.dtype == expected
    opt = tfmp.LossScaleOptimizer(tf1.train.GradientDescentOptimizer(0.125), 1024.0)
    grads_and_vars = opt.compute_gradients(loss)
    assert {grad.dtype for grad, _ in grads_and_vars} == {tf.float32}
    weights = {name: dtype for name, dtype in _stored().items() if "batch_normalization" not in name}
    assert len(weights) == 4
    assert set(weights.values()) == {"float16" if level == "O3" else "float32"}
    normalizing = {name: dtype for name, dtype in _stored().items() if "batch_normalization" in name}
    assert len(normalizing) == 4
    assert set(normalizing.values()) == {"float32"}
    (normalized,) = (op for op in graph.get_operations() if op.type == "FusedBatchNormV3")
    assert (normalized.get_attr("T"), normalized.get_attr("U")) == (expected, tf.float32)
    for op in graph.get_operations():
        if op.type in ("Conv2D", "MatMul"):
            assert op.get_attr("T") == expected, op.name
    steps = [opt.apply_gradients(grads_and_vars), tf1.get_collection(tf1.GraphKeys.UPDATE_OPS)]
    with tf1.Session() as session:
        session.run(tf1.global_variables_initializer())
        assert np.isfinite(session.run([loss, steps])[0])
        assert session.run(opt.applied_steps) == 1


@functools.cache
def _trained(level: str) -> tuple[list[np.ndarray], list[float], int]:
    """Return the first weights, the losses and the applied steps of a net as tf.contrib.slim writes them.

    It has scopes, regularizers, and variables that are asked for by name.
    """
    images = np.random.default_rng(0).normal(size=(8, 6, 6, 1)).astype(np.float32)
    labels = (images.mean(axis=(1, 2, 3)) > 0).astype(np.int32)

    def conv(x: tf.Tensor, channels: int, scope: str) -> tf.Tensor:
        with tf1.variable_scope(scope):
            shape, initializer = [3, 3, x.shape[-1], channels], tf1.truncated_normal_initializer(stddev=0.1, seed=1)
            regularizer = lambda w: 1e-4 * tf.nn.l2_loss(w)  # noqa: E731
            kernel = tf1.get_variable("weights", shape, initializer=initializer, regularizer=regularizer)
            bias = tf1.get_variable("biases", [channels], initializer=tf1.zeros_initializer())
            return tf.nn.relu(tf.nn.bias_add(tf.nn.conv2d(x, kernel, strides=1, padding="SAME"), bias))

    with tf.Graph().as_default(), tf1.Session() as session:
        with tfmp.precision(level) as precision:
            x = conv(precision.cast(tf.constant(images)), 4, "Conv_1a")
            with tf1.variable_scope("Mixed"):
                x = tf.concat([conv(x, 2, "Branch_0"), tf.nn.max_pool2d(x, 3, 1, "SAME")], axis=-1)
            kernel = tf1.get_variable("weights", [6, 2], initializer=tf1.zeros_initializer())
            logits = tf.cast(tf.reduce_mean(x, axis=[1, 2]) @ kernel, tf.float32)
        losses = [tf.nn.sparse_softmax_cross_entropy_with_logits(labels=labels, logits=logits)]
        # At O3, the stored weights that the regularizers see are half-precision.
        losses += [tf.cast(each, tf.float32) for each in tf1.losses.get_regularization_losses()]
        loss = tf.add_n([tf.reduce_mean(each) for each in losses])
        manager = tfmp.ExponentialUpdateLossScaleManager(2.0**20, incr_every_n_steps=100)
        step = tf1.train.get_or_create_global_step()
        train_op = tfmp.LossScaleOptimizer(tf1.train.MomentumOptimizer(0.1, 0.9), manager).minimize(loss, step)
        session.run(tf1.global_variables_initializer())
        weights = session.run(tf1.trainable_variables())
        return weights, [session.run([loss, train_op])[0] for _ in range(80)], session.run(step)


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3", "O2-bfloat16"])
def test_net_with_loss_scaling_learns_from_the_same_weights(level: str) -> None:
    weights, losses, applied = _trained(level)
    assert np.isfinite(losses).all()
    assert losses[-1] < 0.7 * losses[0]
    assert (applied < 80) == (level in ("O1", "O2", "O3"))
    if level != "O3":
        for found, expected in zip(weights, _trained("O0")[0], strict=True):
            np.testing.assert_array_equal(found, expected)


def _told(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [each.getMessage() for each in caplog.records if "is in half precision" in each.getMessage()]


def _in_float32() -> list[tf.Tensor]:
    tf.matmul(tf.ones([2, 3]), tf1.get_variable("w", [3, 2], tf.float32))
    return []


@pytest.mark.parametrize("level", ["O2", "O3", "O2-bfloat16"])
def test_level_that_changes_nothing_is_told_once_for_a_graph(level: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "tfmp")
    for name in ("one", "two"):
        with tfmp.precision(level), tf1.variable_scope(name):
            _in_float32()
    (message,) = _told(caplog)
    assert f"tfmp.precision('{level}')" in message
    assert "cast the inputs of the model with the scope's `cast`" in message
    with tf.Graph().as_default(), tfmp.precision(level):
        _in_float32()
    assert len(_told(caplog)) == 2


def test_nothing_is_told_where_the_level_acts_or_cannot_be_seen_to(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "tfmp")
    with tfmp.precision("O2") as precision:
        tf.matmul(precision.cast(tf.ones([2, 3])), tf.ones([3, 2], tf.float16))
    with tfmp.precision("O2"):
        tf1.get_variable("w", [3, 2])
    with tfmp.precision("O2"):
        tf.constant(3) + 1
    with tfmp.precision("O2"), tf1.variable_scope("with_a_layer"):
        # It may be called after the scope.
        tf.keras.layers.Dense(2)
        _in_float32()
    for level in ("O0", "O1"):
        with tfmp.precision(level), tf1.variable_scope(level):
            _in_float32()
    with pytest.raises(ZeroDivisionError), tfmp.precision("O2"), tf1.variable_scope("error"):
        _ = 1 / len(_in_float32())
    with tfmp.precision("O2"):
        tf.function(lambda: tf.cast(tf.ones([2]), tf.float16))()

    @tf.function
    def step() -> tf.Tensor:
        with tfmp.precision("O2"):
            return tf.ones([2]) * 2.0

    step()
    assert _told(caplog) == []
