"""What is traced in a scope, outside of one, and around one keeps the types that it was made for."""

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from autocast_ways import Way, assert_as_plain, each_way, matrix, types

import tfmp

_REFUSED = r"a tf.function is traced within tfmp.autocast.* Enter the scope inside of the function"
_PRODUCT = [[7, 10], [15, 22]]


def _square(x: tf.Tensor) -> tf.Tensor:
    return x @ x


_in_scope = tfmp.autocast()(_square)


def _of_ops(function: Any, *args: Any) -> list[tuple[str, str]]:
    """Return the ops of a trace that compute, and their types."""
    ops = function.get_concrete_function(*args).graph.get_operations()
    return [(op.type, op.get_attr("T").name) for op in ops if op.type in ("MatMul", "BatchMatMulV2", "Mean", "AddV2")]


@pytest.mark.parametrize("jit_compile", [False, True], ids=["function", "xla"])
def test_trace_within_a_scope_of_eager_code_is_refused_and_what_was_traced_outside_is_called(jit_compile: bool) -> None:
    square = tf.function(_square, jit_compile=jit_compile)
    for _ in range(2):
        with tfmp.autocast():
            with pytest.raises(RuntimeError, match=_REFUSED):
                square(matrix())
            with pytest.raises(RuntimeError, match=_REFUSED):
                square.get_concrete_function(tf.TensorSpec([2, 2]))
            assert (matrix() @ matrix()).dtype == tf.float16
    assert square(matrix()).numpy().tolist() == _PRODUCT
    with tfmp.autocast():
        assert (square(matrix()).dtype, square(matrix()).numpy().tolist()) == (tf.float32, _PRODUCT)
        with pytest.raises(RuntimeError, match=_REFUSED):
            square(tf.ones([3, 3]))
        assert square(matrix()).dtype == tf.float32
    assert square(tf.ones([3, 3])).dtype == tf.float32
    assert _of_ops(square, matrix()) == [("MatMul", "float32")]


def _half() -> tf.Tensor:
    return tf.constant([[1.0]], tf.float16)


_CASTS: dict[str, Callable[[tf.Tensor, tf.Variable], Any]] = {
    "sum": lambda x, w: tf.reduce_sum(x),
    "quotient": lambda x, w: x / w,
    "sum with a variable": lambda x, w: x + w,
    "exp": lambda x, w: tf.exp(x),
    "moments": lambda x, w: tf.nn.moments(x, [0])[0],
    "softmax loss": lambda x, w: tf.nn.softmax_cross_entropy_with_logits(x, x),
    "sparse softmax loss": lambda x, w: tf.nn.sparse_softmax_cross_entropy_with_logits([0], x),
    "branch": lambda x, w: tf.cond(tf.constant(True), lambda: tf.exp(x), lambda: x),
    "loop": lambda x, w: tf.while_loop(lambda i, y: i < 2, lambda i, y: (i + 1, tf.exp(y)), [0, x])[1],
    "types of branches": lambda x, w: tf.cond(tf.constant(True), lambda: tf.cast(x, tf.float32), lambda: x),
    "type of a loop": lambda x, w: tf.while_loop(
        lambda i, y: i < 2, lambda i, y: (i + 1, tf.cast(y, tf.float32)), [0, x]
    )[1],
    "custom gradient": lambda x, w: tf.custom_gradient(lambda x: (tf.exp(x), lambda dy: dy))(x),
    "inner function": lambda x, w: tf.function(tf.exp)(x),
}


@pytest.mark.parametrize("name", _CASTS)
def test_trace_is_refused_whichever_way_a_cast_would_come_about(name: str) -> None:
    w = tf.Variable([[2.0]])
    function = tf.function(lambda x: _CASTS[name](x, w), autograph=False)
    with tfmp.autocast(), pytest.raises((RuntimeError, TypeError)):
        function(_half())


def test_gradient_of_a_trace_within_a_scope_is_a_plain_one_or_refused() -> None:
    @tf.custom_gradient
    def exp_of_gradient(x: tf.Tensor) -> Any:
        return x * 1.0, tf.exp

    @tf.function
    def gradient(x: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = exp_of_gradient(x)
        return tape.gradient(y, x)

    with tfmp.autocast(), contextlib.suppress(RuntimeError):
        gradient(_half())
    ops = gradient.get_concrete_function(_half()).graph.get_operations()
    assert [op.get_attr("T") for op in ops if op.type == "Exp"] == [tf.float16]


def test_functions_without_anything_to_cast_may_be_traced_within_a_scope() -> None:
    @tf.function
    def integers(x: tf.Tensor) -> tf.Tensor:
        y = tf.cond(x[0] > 0, lambda: x * 2, lambda: x)
        y = tf.while_loop(lambda i, y: i < 2, lambda i, y: (i + 1, y + i), [0, y])[1]
        return tf.reduce_sum(tf.linalg.matvec([[1, 2], [3, 4]], y))

    copies = tf.function(lambda x: tf.reshape(tf.concat([x, x], 0), [-1]))
    with tfmp.autocast():
        assert types([copies(matrix()), copies(tf.cast(matrix(), tf.float16))]) == ["float32", "float16"]
        assert int(integers(tf.constant([1, 2]))) == 4 * 3 + 6 * 5


def test_function_whose_scope_is_inside_may_be_traced_within_another() -> None:
    inner, off = tf.function(_in_scope), tf.function(tfmp.autocast(enabled=False)(_square))
    # What an inner function returns in half precision goes on so in the scope of its caller, and is none outside.
    outer = tf.function(lambda x: [inner(x), x @ x, tfmp.autocast()(lambda y: [y + 1.0, tf.reduce_mean(y)])(inner(x))])
    other = tf.function(tfmp.autocast("bfloat16")(lambda x: (inner(x), x @ x)))
    plain = tf.function(_square)
    with tfmp.autocast("bfloat16"):
        assert types([inner(matrix()), off(matrix()), other(matrix())]) == ["float16", "float32", "float16", "bfloat16"]
        with tfmp.autocast(enabled=False):
            assert types(plain(matrix())) == ["float32"]
    assert types([inner(matrix()), off(matrix()), other(matrix())]) == ["float16", "float32", "float16", "bfloat16"]
    assert types([plain(matrix()), outer(matrix())]) == ["float32", "float16", "float32", "float16", "float32"]


def test_inner_function_is_refused_in_the_scope_of_an_outer_one_unless_it_was_traced() -> None:
    inner = tf.function(_square)

    @tf.function
    def outer(x: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        with tfmp.autocast():
            return inner(x), x @ x

    with pytest.raises(RuntimeError, match=_REFUSED):
        outer(matrix())
    assert inner(matrix()).dtype == tf.float32
    assert [each.dtype.name for each in outer(matrix())] == ["float32", "float16"]
    assert _of_ops(inner, matrix()) == [("MatMul", "float32")]


def test_scope_makes_no_further_traces() -> None:
    traced = []

    @tf.function(reduce_retracing=True)
    @tfmp.autocast()
    def square(x: tf.Tensor, times: int = 1) -> tf.Tensor:
        traced.append((x.shape.as_list(), times))
        return x @ x * times

    for _ in range(3):
        found = [square(matrix())]
        with tfmp.autocast("bfloat16"):
            found.append(square(matrix(), times=2))
        assert types(found) == ["float16", "float16"]
    assert traced == [([2, 2], 1), ([2, 2], 2)]


def test_functions_that_run_eagerly_run_in_the_scope() -> None:
    tf.config.run_functions_eagerly(True)
    try:
        with tfmp.autocast():
            assert tf.function(_square)(matrix()).dtype == tf.float16
        assert tf.function(tfmp.autocast("bfloat16")(_square))(matrix()).dtype == tf.bfloat16
        assert tf.function(_square)(matrix()).dtype == tf.float32
    finally:
        tf.config.run_functions_eagerly(False)


def test_saved_model_keeps_the_types(tmp_path: Path) -> None:
    class Model(tf.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = tf.Variable([[2.0], [3.0]])

        @tf.function(input_signature=[tf.TensorSpec([None, 2])])
        @tfmp.autocast()
        def __call__(self, x: tf.Tensor) -> dict[str, tf.Tensor]:
            y = x @ self.w
            return {"y": y, "loss": tf.reduce_mean(y)}

    model = Model()
    tf.saved_model.save(model, str(tmp_path))
    loaded = tf.saved_model.load(str(tmp_path))
    for call in (loaded, loaded.signatures["serving_default"]):
        found = call(x=matrix())
        assert {name: each.dtype.name for name, each in found.items()} == {"y": "float16", "loss": "float32"}
        assert found["y"].numpy().tolist() == [[8], [18]]
    assert loaded.w.dtype == tf.float32
    with tf.GradientTape() as tape:
        loss = loaded(matrix())["loss"]
    grad = tape.gradient(loss, loaded.w)
    assert (grad.dtype, grad.numpy().tolist()) == (tf.float32, [[2], [3]])
    with tfmp.autocast("bfloat16"):
        assert loaded(matrix())["y"].dtype == tf.float16


def test_map_of_a_data_set_has_a_scope_of_its_own() -> None:
    data = tf.data.Dataset.from_tensors(matrix())
    mapped = data.map(tfmp.autocast()(lambda x: (x @ x, tf.reduce_sum(x))), num_parallel_calls=2)
    assert [spec.dtype.name for spec in mapped.element_spec] == ["float16", "float32"]
    with tfmp.autocast():
        assert [[each.dtype.name for each in element] for element in mapped] == [["float16", "float32"]]
        assert [int(each) for each in tf.data.Dataset.range(3).map(lambda x: x * 2)] == [0, 2, 4]
        assert types([x @ x for x in data.shuffle(4).batch(1).prefetch(1)]) == ["float16"]
        # The function is traced for this data set alone.
        assert data.map(_square).element_spec.dtype == tf.float16
    assert data.map(_square).element_spec.dtype == tf.float32


def _rows() -> tf.data.Dataset:
    return tf.data.Dataset.from_tensor_slices(np.ones([4, 2, 2], np.float32))


def test_loops_over_data_run_in_a_scope() -> None:
    w = tf.Variable(tf.ones([2, 2]))

    @tf.function
    @tfmp.autocast()
    def summed(data: Any, iterator: Any) -> tf.Tensor:
        total = 0.0
        for x in data:
            total += tf.reduce_mean(x @ w) + tf.reduce_mean(next(iterator) @ w)
        return total

    assert float(summed(_rows(), iter(_rows()))) == 8 + 8


@each_way
def test_vectorized_map_runs_in_a_scope_and_around_one(way: Way) -> None:
    scope = tfmp.autocast()

    def of_rows(row: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        product = tf.tensordot(row, matrix(), 1)
        return product, tf.reduce_sum(product)

    plain = tf.vectorized_map(of_rows, matrix())
    for found in (
        way(scope(lambda x: tf.vectorized_map(of_rows, x))),
        way(lambda x: tf.vectorized_map(scope(of_rows), x)),
    ):
        assert_as_plain(found(matrix()), plain, ["float16", "float32"])


def test_graph_may_be_entered_within_a_scope() -> None:
    with tfmp.autocast(), tf.Graph().as_default(), tf.compat.v1.Session() as session:
        value = session.run(tf.constant([[2.0]]) @ tf.constant([[3.0]]))
    assert (value.dtype.name, value.tolist()) == ("float16", [[6]])


def test_init_scope_within_a_scope_is_eager_code_in_it() -> None:
    found = []

    @tf.function
    @tfmp.autocast()
    def forward(x: tf.Tensor) -> tf.Tensor:
        with tf.init_scope():
            found.append((tf.executing_eagerly(), (matrix() @ matrix()).dtype.name))
        return x @ x

    assert forward(matrix()).dtype == tf.float16
    assert found == [(True, "float16")]
