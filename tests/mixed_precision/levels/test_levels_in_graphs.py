"""Levels in graphs of TensorFlow 1: the types of variables, of what layers compute, and what trains."""

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


@pytest.mark.parametrize(
    ("level", "seen", "stored"),
    [
        ("O0", "float32", "float32"),
        ("O1", "float32", "float32"),
        ("O2", "float16", "float32"),
        ("O3", "float16", "float16"),
        ("O2-bfloat16", "bfloat16", "float32"),
        ("O3-bfloat16", "bfloat16", "bfloat16"),
    ],
)
def test_variable_of_no_type_has_that_of_the_level(level: str, seen: str, stored: str) -> None:
    with tfmp.precision(level), tf1.variable_scope("net"):
        weights = tf1.get_variable("w", [2, 3])
    assert weights.dtype.base_dtype.name == seen
    assert _stored() == {"net/w": stored}


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
def test_variable_of_a_type_has_this_type(level: str) -> None:
    with tfmp.precision(level):
        weights = tf1.get_variable("w", [2], tf.float32)
        count = tf1.get_variable("n", [], tf.int32, tf1.zeros_initializer(), trainable=False)
    assert (weights.dtype.base_dtype, count.dtype.base_dtype) == (tf.float32, tf.int32)


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
def test_value_to_begin_with_gives_its_type(level: str) -> None:
    with tfmp.precision(level):
        tf1.get_variable("count", initializer=3)
        tf1.get_variable("wide", initializer=tf.constant(3.0, tf.float64))
        with tf1.variable_scope("double", dtype=tf.float64), tfmp.precision("O0"):
            tf1.get_variable("w", [2])
    assert _stored() == {"count": "int32", "wide": "float64", "double/w": "float64"}


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
        seen.append((name, kwargs["dtype"].name))
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
    assert seen == [
        ("outer/w", "float16"),
        ("outer/x", "float16"),
        ("outer/inner/y", "float32"),
        ("outer/z", "float16"),
        ("outer/last", "float16"),
    ]


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


@pytest.mark.parametrize(
    ("level", "expected"),
    [("O0", "float32"), ("O1", "float16"), ("O2", "float16"), ("O3", "float16"), ("O2-bfloat16", "bfloat16")],
)
def test_products_and_losses_have_the_types_of_the_level(level: str, expected: str) -> None:
    x = tf.ones([4, 3])
    with tfmp.precision(level) as precision:
        w, b = tf1.get_variable("w", [3, 2]), tf1.get_variable("b", [2])
        y = precision.cast(x) @ w + b
        loss = tf.reduce_mean(tf.cast(y, tf.float32) ** 2)
    assert y.dtype.name == expected
    assert loss.dtype == tf.float32
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
@pytest.mark.parametrize(
    ("level", "expected"), [("O0", tf.float32), ("O1", tf.float16), ("O2", tf.float16), ("O3", tf.float16)]
)
def test_layers_of_tensorflow_1_compute_in_the_type_of_the_level(
    level: str, expected: tf.DType, graph: tf.Graph
) -> None:
    with tfmp.precision(level) as precision:
        x = precision.cast(tf.ones([2, 8, 8, 3]))
        x = tf1.layers.conv2d(x, 4, 3)
        x = tf1.layers.batch_normalization(x, training=True)
        x = tf1.layers.dense(tf1.layers.flatten(tf.nn.relu(x)), 5)
    assert x.dtype == expected
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


def _inception(images: tf.Tensor, classes: int) -> tf.Tensor:
    """Return the logits of a net as tf.contrib.slim writes them: scopes, regularizers, variables asked for by name."""

    def conv(x: tf.Tensor, channels: int, scope: str) -> tf.Tensor:
        with tf1.variable_scope(scope):
            kernel = tf1.get_variable(
                "weights",
                [3, 3, x.shape[-1], channels],
                initializer=tf1.truncated_normal_initializer(stddev=0.1, seed=1),
                regularizer=lambda w: 1e-4 * tf.nn.l2_loss(w),
            )
            bias = tf1.get_variable("biases", [channels], initializer=tf1.zeros_initializer())
            return tf.nn.relu(tf.nn.bias_add(tf.nn.conv2d(x, kernel, strides=1, padding="SAME"), bias))

    x = conv(images, 4, "Conv_1a")
    with tf1.variable_scope("Mixed"):
        x = tf.concat([conv(x, 2, "Branch_0"), tf.nn.max_pool2d(x, 3, 1, "SAME")], axis=-1)
    pooled = tf.reduce_mean(x, axis=[1, 2])
    with tf1.variable_scope("Logits"):
        kernel = tf1.get_variable("weights", [pooled.shape[-1], classes], initializer=tf1.zeros_initializer())
        return tf.cast(pooled @ kernel, tf.float32)


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3", "O2-bfloat16"])
def test_net_with_loss_scaling_learns(level: str) -> None:
    images = np.random.default_rng(0).normal(size=(8, 6, 6, 1)).astype(np.float32)
    labels = (images.mean(axis=(1, 2, 3)) > 0).astype(np.int32)
    with tfmp.precision(level) as precision:
        logits = _inception(precision.cast(tf.constant(images)), 2)
    losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels=labels, logits=logits)
    # At O3, the stored weights that the regularizers see are half-precision.
    loss = tf.add_n(
        [tf.reduce_mean(losses), *(tf.cast(each, tf.float32) for each in tf1.losses.get_regularization_losses())]
    )
    manager = tfmp.ExponentialUpdateLossScaleManager(2.0**20, incr_every_n_steps=100)
    optimizer = tfmp.LossScaleOptimizer(tf1.train.MomentumOptimizer(0.1, 0.9), manager)
    step = tf1.train.get_or_create_global_step()
    train_op = optimizer.minimize(loss, step)
    with tf1.Session() as session:
        session.run(tf1.global_variables_initializer())
        trained = [session.run([loss, train_op])[0] for _ in range(80)]
        applied = session.run(step)
    assert np.isfinite(trained).all()
    assert trained[-1] < 0.7 * trained[0]
    assert (applied < 80) == (level in ("O1", "O2", "O3"))


_LOSSES: dict[str, Callable[[tf.Tensor, tf.Tensor], tf.Tensor]] = {
    "absolute_difference": tf1.losses.absolute_difference,
    "cosine_distance": lambda labels, logits: tf1.losses.cosine_distance(labels, logits, axis=1),
    "hinge_loss": tf1.losses.hinge_loss,
    "huber_loss": tf1.losses.huber_loss,
    "log_loss": lambda labels, logits: tf1.losses.log_loss(labels, tf.sigmoid(logits)),
    "mean_pairwise_squared_error": tf1.losses.mean_pairwise_squared_error,
    "mean_squared_error": tf1.losses.mean_squared_error,
    "sigmoid_cross_entropy": tf1.losses.sigmoid_cross_entropy,
    "softmax_cross_entropy": tf1.losses.softmax_cross_entropy,
    "sparse_softmax_cross_entropy": lambda labels, logits: tf1.losses.sparse_softmax_cross_entropy(
        tf.argmax(labels, 1), logits
    ),
}


def test_the_losses_below_are_those_of_tensorflow_1() -> None:
    others = {"add_loss", "compute_weighted_loss"}
    named = {name for name in dir(tf1.losses) if name.islower() and not name.startswith(("get_", "_"))}
    assert named - others == set(_LOSSES)


@pytest.mark.parametrize("name", _LOSSES)
def test_losses_of_half_precision_logits_are_float32_at_o1(name: str) -> None:
    labels = np.eye(5, dtype=np.float32)[:4]
    features = np.random.default_rng(0).normal(size=(4, 8)).astype(np.float32)

    def loss_and_gradient(level: str) -> tuple[tf.Tensor, tf.Tensor]:
        with tf1.variable_scope(level), tfmp.precision(level):
            kernel = tf1.get_variable("kernel", initializer=np.full((8, 5), 0.25, np.float32))
            logits = tf.matmul(tf.constant(features), kernel)
            assert logits.dtype == (tf.float32 if level == "O0" else tf.float16)
            loss = _LOSSES[name](tf.constant(labels), logits)
        return loss, tf1.gradients(loss, kernel, 2.0**10)[0] / 2.0**10

    both = [loss_and_gradient(level) for level in ("O0", "O1")]
    assert both[1][0].dtype == tf.float32
    with tf1.Session() as session:
        session.run(tf1.global_variables_initializer())
        (loss, grad), (half_loss, half_grad) = session.run(both)
    # The logits are rounded to 11 bits.
    assert half_loss == pytest.approx(loss, rel=2e-3)
    np.testing.assert_allclose(half_grad, grad, rtol=1e-2, atol=1e-3)


def test_levels_begin_with_the_same_weights() -> None:
    def weights(level: str) -> list[np.ndarray]:
        with tf.Graph().as_default(), tf1.Session() as session:
            with tfmp.precision(level) as precision:
                _inception(precision.cast(tf.ones([1, 6, 6, 1])), 2)
            session.run(tf1.global_variables_initializer())
            return session.run(tf1.trainable_variables())

    expected = weights("O0")
    for level in ("O1", "O2"):
        for found, value in zip(weights(level), expected, strict=True):
            np.testing.assert_array_equal(found, value)
