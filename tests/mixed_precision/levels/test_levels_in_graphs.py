"""Levels in graphs of TensorFlow 1: what is stored and computed in which type, what is told, and the getter alone."""

import concurrent.futures
import logging
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import tfmp

tf1 = tf.compat.v1

pytestmark = pytest.mark.graph


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


@pytest.mark.parametrize("level", _LEVELS)
def test_variables_of_no_type_products_and_gradients_have_that_of_the_level_and_others_their_own(level: str) -> None:
    seen, stored = _LEVELS[level]
    with tfmp.precision(level) as precision, tf1.variable_scope("net"):
        w = tf1.get_variable("w", [2, 3])
        y = precision.cast(tf.ones([4, 2])) @ w
        loss = tf.reduce_mean(tf.cast(y, tf.float32) ** 2)
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
    (grad,) = tf.gradients(loss, tf1.global_variables()[0])
    half = "bfloat16" if "bfloat16" in level else "float16"
    found = [w.dtype.base_dtype.name, y.dtype.name, loss.dtype.name, grad.dtype.name]
    assert found == [seen, "float32" if level == "O0" else half, "float32", stored]


def test_variables_outside_of_the_scope_are_as_without_it() -> None:
    before = tf1.get_variable_scope()
    dtype, getter = before.dtype, before.custom_getter
    with tfmp.precision("O3"):
        pass
    with pytest.raises(ZeroDivisionError), tfmp.precision("O2"):
        raise ZeroDivisionError
    assert (before.dtype, before.custom_getter) == (dtype, getter)
    assert tf1.get_variable("w", [2]).dtype.base_dtype == tf.float32


@pytest.mark.parametrize("with_levels", [True, False])
def test_names_are_those_without_a_level(with_levels: bool) -> None:
    for level in ("O2", "O1"):
        with tfmp.precision(level) if with_levels else tf1.name_scope(""), tf1.variable_scope(None, "block"):
            tf1.get_variable("w", [2])
    with tf1.variable_scope("block", reuse=True), tfmp.precision("O0"):
        assert tf1.get_variable("w", [2]).dtype.base_dtype == tf.float32
    assert _stored() == {"block/w": "float32", "block_1/w": "float32"}


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


def test_level_acts_in_its_thread_and_graph_only(graph: tf.Graph) -> None:
    def build() -> None:
        with graph.as_default():
            tf1.get_variable("in_thread", [2])

    with tfmp.precision("O3"):
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            pool.submit(build).result()
        with tf.Graph().as_default():
            tf1.get_variable("elsewhere", [2])
            assert _stored() == {"elsewhere": "float32"}
        tf1.get_variable("here", [2])
    assert _stored() == {"in_thread": "float32", "here": "float16"}


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
    x, half, wide, n = tf.ones([2]), tf.ones([2], tf.bfloat16), tf.ones([2], tf.float64), tf.constant(1)
    found = tfmp.precision(level).cast({"x": x, "half": [half], "others": [wide, n, "text", None]})
    to = {"O0": "float32", "O2": "float16", "O3": "float16"}
    assert (found["x"].dtype.name, found["half"][0].dtype.name) == (to.get(level, "float32"), to.get(level, "bfloat16"))
    assert found["others"] == [wide, n, "text", None]


@pytest.mark.skipif(not hasattr(tf1.layers, "conv2d"), reason="tf.compat.v1.layers is not available with Keras 3")
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
    for is_normalizing in (True, False):
        stored = [dtype for name, dtype in _stored().items() if ("batch_normalization" in name) == is_normalizing]
        assert stored == ["float16" if level == "O3" and not is_normalizing else "float32"] * 4
    for op in graph.get_operations():
        if op.type in ("Conv2D", "MatMul", "FusedBatchNormV3"):
            assert op.get_attr("T") == expected, op.name
    steps = [opt.apply_gradients(grads_and_vars), tf1.get_collection(tf1.GraphKeys.UPDATE_OPS)]
    with tf1.Session() as session:
        session.run(tf1.global_variables_initializer())
        assert np.isfinite(session.run([loss, steps])[0])
        assert session.run(opt.applied_steps) == 1


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
    for index, acts in enumerate(
        [
            lambda precision: tf.matmul(precision.cast(tf.ones([2, 3])), tf.ones([3, 2], tf.float16)),
            lambda _: tf1.get_variable("w", [3, 2]),
            lambda _: tf.constant(3) + 1,
            # It may be called after the scope.
            lambda _: [tf.keras.layers.Dense(2), _in_float32()],
            lambda _: tf.function(lambda: tf.cast(tf.ones([2]), tf.float16))(),
        ]
    ):
        with tfmp.precision("O2") as precision, tf1.variable_scope(f"acts_{index}"):
            acts(precision)
    for level in ("O0", "O1"):
        with tfmp.precision(level), tf1.variable_scope(level):
            _in_float32()
    with pytest.raises(ZeroDivisionError), tfmp.precision("O2"), tf1.variable_scope("error"):
        _ = 1 / len(_in_float32())

    @tf.function
    def step() -> tf.Tensor:
        with tfmp.precision("O2"):
            return tf.ones([2]) * 2.0

    step()
    assert _told(caplog) == []


def _storing(dtype: tf.DType = tf.float16, **settings: Any) -> Any:
    return tf1.variable_scope("net", dtype=dtype, custom_getter=tfmp.float32_variable_storage_getter, **settings)


@pytest.mark.parametrize(
    ("dtype", "trainable", "stored"),
    [
        *((dtype, True, tf.float32) for dtype in (tf.float16, tf.bfloat16, tf.float32)),
        (tf.float64, True, tf.float64),
        (tf.float16, False, tf.float16),
    ],
)
def test_trainable_half_variable_is_stored_in_float32_and_others_as_asked_for(
    dtype: tf.DType, trainable: bool, stored: tf.DType
) -> None:
    seen = []
    for reuse in (False, True):
        with _storing(dtype, reuse=reuse):
            tensor = tf1.get_variable("w", [3], trainable=trainable, regularizer=lambda w: seen.append(w.dtype))
    (variable,) = tf1.global_variables()
    assert (tensor.dtype.base_dtype, variable.dtype.base_dtype, variable.op.name) == (dtype, stored, "net/w")
    assert ([each.base_dtype for each in seen], tensor is variable) == ([stored], dtype == stored)


@pytest.mark.parametrize("form", ["tensor", "array", "function"])
def test_small_updates_of_a_half_variable_add_up_in_float32(form: str) -> None:
    initializers = {"tensor": tf.constant(1.0, tf.float16), "array": np.float16(1)}
    of_function = {"shape": [], "initializer": lambda shape, dtype, **_: tf.ones(shape, dtype)}
    with _storing():
        w = tf1.get_variable("w", **of_function if form == "function" else {"initializer": initializers[form]})
    opt = tfmp.LossScaleOptimizer(tf1.train.GradientDescentOptimizer(1.0), tfmp.FixedLossScaleManager(1024))
    train_op = opt.minimize(tf.cast(w, tf.float32) * 2.0**-12)
    with tf1.Session() as session:
        session.run(tf1.global_variables_initializer())
        for _ in range(16):
            session.run(train_op)
        # In float16, 1 - 2**-12 rounds to 1, so a float16 weight would still be 1.
        assert np.float16(1) - np.float16(2.0**-12) == 1
        assert session.run(w) == 1 - 2.0**-8
