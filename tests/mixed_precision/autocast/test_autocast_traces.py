"""What is traced in a scope, outside of one, and around one keeps the types that it was made for."""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import tfmp
from tfmp.mixed_precision.autocast import hooks, state

pytestmark = pytest.mark.essential

_REFUSED = r"a tf.function is traced within tfmp.autocast.* Enter the scope inside of the function"

_X = tf.constant([[1.0, 2.0], [3.0, 4.0]])


@pytest.fixture(autouse=True)
def no_scope_is_left_open() -> Iterator[None]:
    yield
    assert (hooks.open_scopes._count, state._thread.scopes) == (0, [None])
    assert (_X @ _X).dtype == tf.float32


def _square(x: tf.Tensor) -> tf.Tensor:
    return x @ x


def _with_scope(x: tf.Tensor) -> tf.Tensor:
    with tfmp.autocast():
        return x @ x


def _types(function: Any, *args: Any) -> list[tuple[str, str]]:
    """Return the ops of a trace that compute, and their types."""
    ops = function.get_concrete_function(*args).graph.get_operations()
    return [(op.type, op.get_attr("T").name) for op in ops if op.type in ("MatMul", "BatchMatMulV2", "Mean", "AddV2")]


@pytest.mark.parametrize("jit_compile", [False, True], ids=["function", "xla"])
def test_function_that_was_traced_outside_keeps_its_types(jit_compile: bool) -> None:
    traced = []

    @tf.function(jit_compile=jit_compile)
    def square(x: tf.Tensor) -> tf.Tensor:
        traced.append(x.dtype.name)
        return x @ x

    outside = square(_X)
    with tfmp.autocast():
        inside = square(_X)
    assert (inside.dtype, inside.numpy().tolist(), traced) == (tf.float32, outside.numpy().tolist(), ["float32"])
    assert square(_X).dtype == tf.float32


def test_trace_within_a_scope_of_eager_code_is_refused_and_nothing_else_suffers() -> None:
    square = tf.function(_square)
    for _ in range(2):
        with tfmp.autocast():
            with pytest.raises(RuntimeError, match=_REFUSED):
                square(_X)
            with pytest.raises(RuntimeError, match=_REFUSED):
                square.get_concrete_function(tf.TensorSpec([2, 2]))
            assert (_X @ _X).dtype == tf.float16
    assert square(_X).numpy().tolist() == [[7, 10], [15, 22]]
    with tfmp.autocast():
        assert square(_X).dtype == tf.float32
        with pytest.raises(RuntimeError, match=_REFUSED):
            square(tf.ones([3, 3]))
        assert square(_X).dtype == tf.float32
    assert square(tf.ones([3, 3])).dtype == tf.float32
    assert _types(square, _X) == [("MatMul", "float32")]


_HALF = tf.constant([[1.0]], tf.float16)
_W = tf.Variable([[2.0]])

_CASTS: dict[str, Callable[[tf.Tensor], Any]] = {
    "sum": tf.reduce_sum,
    "quotient": lambda x: x / _W,
    "quotient of a variable": lambda x: _W / x,
    "sum with a variable": lambda x: x + _W,
    "exp": tf.exp,
    "moments": lambda x: tf.nn.moments(x, [0])[0],
    "weighted moments": lambda x: tf.nn.weighted_moments(x, [0], tf.cast(_W, tf.float16))[0],
    "softmax loss": lambda x: tf.nn.softmax_cross_entropy_with_logits(x, x),
    "sparse softmax loss": lambda x: tf.nn.sparse_softmax_cross_entropy_with_logits([0], x),
    "branch": lambda x: tf.cond(tf.constant(True), lambda: tf.exp(x), lambda: x),
    "loop": lambda x: tf.while_loop(lambda i, y: i < 2, lambda i, y: (i + 1, tf.exp(y)), [0, x])[1],
    "types of branches": lambda x: tf.cond(tf.constant(True), lambda: tf.cast(x, tf.float32), lambda: x),
    "type of a loop": lambda x: tf.while_loop(lambda i, y: i < 2, lambda i, y: (i + 1, tf.cast(y, tf.float32)), [0, x])[
        1
    ],
    "custom gradient": tf.custom_gradient(lambda x: (tf.exp(x), lambda dy: dy)),
    "inner function": tf.function(tf.exp),
}


@pytest.mark.parametrize("name", _CASTS)
def test_trace_is_refused_whichever_way_a_cast_would_come_about(name: str) -> None:
    function = tf.function(_CASTS[name], autograph=False)
    with tfmp.autocast(), pytest.raises((RuntimeError, TypeError)):
        function(_HALF)


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
        gradient(_HALF)
    ops = gradient.get_concrete_function(_HALF).graph.get_operations()
    assert [op.get_attr("T") for op in ops if op.type == "Exp"] == [tf.float16]


def test_functions_without_anything_to_cast_may_be_traced_within_a_scope() -> None:
    @tf.function
    def integers(x: tf.Tensor) -> tf.Tensor:
        y = tf.cond(x[0] > 0, lambda: x * 2, lambda: x)
        y = tf.while_loop(lambda i, y: i < 2, lambda i, y: (i + 1, y + i), [0, y])[1]
        return tf.reduce_sum(tf.linalg.matvec([[1, 2], [3, 4]], y))

    @tf.function
    def copies(x: tf.Tensor) -> tf.Tensor:
        return tf.reshape(tf.concat([x, x], 0), [-1])

    with tfmp.autocast():
        assert int(integers(tf.constant([1, 2]))) == 4 * 3 + 6 * 5
        assert (copies(_X).dtype, copies(tf.cast(_X, tf.float16)).dtype) == (tf.float32, tf.float16)
    assert int(integers(tf.constant([1, 2]))) == 4 * 3 + 6 * 5


def test_function_whose_scope_is_inside_may_be_traced_within_another() -> None:
    functions = [tf.function(_with_scope), tf.function(tfmp.autocast()(_square))]
    off = tf.function(tfmp.autocast(enabled=False)(_square))
    with tfmp.autocast("bfloat16"):
        assert [function(_X).dtype for function in functions] == [tf.float16] * 2
        assert off(_X).dtype == tf.float32
    assert [function(_X).dtype for function in functions] == [tf.float16] * 2
    assert off(_X).dtype == tf.float32


def test_trace_where_autocast_is_off_is_a_plain_one() -> None:
    square = tf.function(_square)
    with tfmp.autocast(), tfmp.autocast(enabled=False):
        assert square(_X).dtype == tf.float32
    assert square(_X).dtype == tf.float32


def test_inner_function_is_refused_in_the_scope_of_an_outer_one_unless_it_was_traced() -> None:
    inner = tf.function(_square)

    @tf.function
    def outer(x: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        with tfmp.autocast():
            return inner(x), x @ x

    with pytest.raises(RuntimeError, match=_REFUSED):
        outer(_X)
    assert inner(_X).dtype == tf.float32
    assert [each.dtype.name for each in outer(_X)] == ["float32", "float16"]
    assert _types(inner, _X) == [("MatMul", "float32")]


def test_inner_function_has_a_scope_of_its_own() -> None:
    inner = tf.function(_with_scope)

    @tf.function
    def outer(x: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        return inner(x), x @ x

    @tf.function
    @tfmp.autocast("bfloat16")
    def other(x: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        return inner(x), x @ x

    assert [each.dtype.name for each in outer(_X)] == ["float16", "float32"]
    assert [each.dtype.name for each in other(_X)] == ["float16", "bfloat16"]


def test_half_result_of_a_function_goes_on_in_the_scope_of_its_caller() -> None:
    inner = tf.function(_with_scope)

    @tf.function
    def outer(x: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        y = inner(x)
        with tfmp.autocast():
            return y + 1.0, tf.reduce_mean(y)

    assert [each.dtype.name for each in outer(_X)] == ["float16", "float32"]


def test_scope_makes_no_further_traces() -> None:
    traced = []

    @tf.function(reduce_retracing=True)
    @tfmp.autocast()
    def square(x: tf.Tensor, times: int = 1) -> tf.Tensor:
        traced.append((x.shape.as_list(), times))
        return x @ x * times

    for _ in range(3):
        assert square(_X).dtype == tf.float16
        with tfmp.autocast("bfloat16"):
            assert square(_X, times=2).dtype == tf.float16
    assert traced == [([2, 2], 1), ([2, 2], 2)]
    assert square(tf.ones([3, 3])).dtype == tf.float16
    assert square(tf.ones([4, 4])).dtype == tf.float16
    assert square(tf.ones([5, 5])).dtype == tf.float16
    assert len(traced) <= 4


def test_function_with_a_signature_is_traced_in_its_scope() -> None:
    @tf.function(input_signature=[tf.TensorSpec([None, 2]), tf.TensorSpec([], tf.int32)])
    @tfmp.autocast()
    def forward(x: tf.Tensor, count: tf.Tensor) -> dict[str, tf.Tensor]:
        y = tf.matmul(x, x, transpose_b=True)
        return {"y": y, "mean": tf.reduce_mean(y), "count": count + 1}

    concrete = forward.get_concrete_function()
    expected = {"y": "float16", "mean": "float32", "count": "int32"}
    assert {name: each.dtype.name for name, each in concrete.structured_outputs.items()} == expected
    assert {name: each.dtype.name for name, each in forward(_X, tf.constant(2)).items()} == expected
    assert {name: each.dtype.name for name, each in concrete(x=_X, count=tf.constant(2)).items()} == expected
    assert _types(forward) == [("MatMul", "float16"), ("Mean", "float32"), ("AddV2", "int32")]
    with tfmp.autocast("bfloat16"):
        assert concrete(x=_X, count=tf.constant(2))["y"].dtype == tf.float16


def test_half_arguments_are_traced_for_themselves() -> None:
    add = tf.function(lambda x: x + 1.0)
    add(_X)
    add(tf.cast(_X, tf.float16))
    with tfmp.autocast():
        assert add(_X @ _X).dtype == tf.float16
        assert add(tf.exp(_X @ _X)).dtype == tf.float32


def test_function_makes_its_variables_in_its_scope() -> None:
    class Dense(tf.Module):
        w: tf.Variable | None = None

        @tf.function
        @tfmp.autocast()
        def __call__(self, x: tf.Tensor) -> tf.Tensor:
            if self.w is None:
                self.w = tf.Variable(tf.ones([x.shape[-1], 3]))
            return x @ self.w

    dense = Dense()
    assert dense(_X).dtype == tf.float16
    assert dense.w is not None
    assert dense.w.dtype == tf.float32
    assert dense(_X).numpy().tolist() == [[3] * 3, [7] * 3]


def test_variable_that_is_made_of_a_product_in_a_scope_can_be_assigned_in_both_types() -> None:
    v = tf.Variable(tf.zeros([2, 2]))

    @tf.function
    @tfmp.autocast()
    def assign() -> None:
        v.assign(_X @ _X)
        v.assign_add(_X @ _X)
        v.assign_sub(tf.ones([2, 2]))

    assign()
    assert (v.dtype, v.numpy().tolist()) == (tf.float32, [[13, 19], [29, 43]])
    with tfmp.autocast():
        v.assign(_X @ _X)
        v.scatter_nd_add([[0, 0]], (_X @ _X)[0, :1])
        v[1].assign((_X @ _X)[1])
    assert v.numpy().tolist() == [[14, 10], [15, 22]]


def test_functions_that_run_eagerly_run_in_the_scope() -> None:
    tf.config.run_functions_eagerly(True)
    try:
        with tfmp.autocast():
            assert tf.function(_square)(_X).dtype == tf.float16
        assert tf.function(tfmp.autocast("bfloat16")(_square))(_X).dtype == tf.bfloat16
        assert tf.function(_square)(_X).dtype == tf.float32
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
        found = call(x=_X)
        assert {name: each.dtype.name for name, each in found.items()} == {"y": "float16", "loss": "float32"}
        assert found["y"].numpy().tolist() == [[8], [18]]
    assert loaded.w.dtype == tf.float32
    with tf.GradientTape() as tape:
        loss = loaded(_X)["loss"]
    grad = tape.gradient(loss, loaded.w)
    assert (grad.dtype, grad.numpy().tolist()) == (tf.float32, [[2], [3]])
    with tfmp.autocast("bfloat16"):
        assert loaded(_X)["y"].dtype == tf.float16


def test_save_within_a_scope_is_refused_for_functions_without_one(tmp_path: Path) -> None:
    model = tf.Module()
    model.square = tf.function(_square, input_signature=[tf.TensorSpec([None, 2])])
    with tfmp.autocast(), pytest.raises(RuntimeError, match=_REFUSED):
        tf.saved_model.save(model, str(tmp_path / "refused"))
    tf.saved_model.save(model, str(tmp_path / "saved"))
    assert tf.saved_model.load(str(tmp_path / "saved")).square(_X).dtype == tf.float32


def test_map_of_a_data_set_has_a_scope_of_its_own() -> None:
    data = tf.data.Dataset.from_tensors(_X)
    mapped = data.map(tfmp.autocast()(lambda x: (x @ x, tf.reduce_sum(x))), num_parallel_calls=2)
    assert [spec.dtype.name for spec in mapped.element_spec] == ["float16", "float32"]
    with tfmp.autocast():
        assert [[each.dtype.name for each in element] for element in mapped] == [["float16", "float32"]]
        assert [int(each) for each in tf.data.Dataset.range(3).map(lambda x: x * 2)] == [0, 2, 4]
        assert data.batch(1).prefetch(1).take(1).element_spec.dtype == tf.float32
        # The function is traced for this data set alone.
        assert data.map(_square).element_spec.dtype == tf.float16
    assert data.map(_square).element_spec.dtype == tf.float32


def test_data_set_is_read_in_a_scope() -> None:
    data = tf.data.Dataset.from_tensor_slices(np.ones([4, 2, 2], np.float32)).map(lambda x: x / 2.0)
    with tfmp.autocast():
        assert [(x @ x).dtype.name for x in data.shuffle(4).batch(2)] == ["float16"] * 2
        iterator = iter(data)
        assert (next(iterator) @ next(iterator)).dtype == tf.float16


def test_loop_over_a_data_set_in_a_function_has_its_scope_inside() -> None:
    w, data = tf.Variable(tf.ones([2, 2])), tf.data.Dataset.from_tensor_slices(tf.ones([4, 2, 2]))

    @tf.function
    def train(data: tf.data.Dataset) -> tf.Tensor:
        total = 0.0
        for x in data:
            with tf.GradientTape() as tape, tfmp.autocast():
                y = x @ w
                loss = tf.reduce_mean(y)
            w.assign_sub(0.125 * tape.gradient(loss, w))
            total += loss
        return total

    assert float(train(data)) == 2 + 1.875 + 1.75 + 1.625


def test_loop_over_a_data_set_within_the_scope_of_a_function_runs() -> None:
    w, data = tf.Variable(tf.ones([2, 2])), tf.data.Dataset.from_tensor_slices(tf.ones([4, 2, 2]))

    @tf.function
    @tfmp.autocast()
    def evaluate(data: tf.data.Dataset) -> tf.Tensor:
        total = 0.0
        for x in data:
            total += tf.reduce_mean(x @ w)
        return total

    assert float(evaluate(data)) == 8


def test_loop_over_an_iterator_within_the_scope_of_a_function_runs() -> None:
    w, data = tf.Variable(tf.ones([2, 2])), tf.data.Dataset.from_tensor_slices(tf.ones([4, 2, 2]))

    @tf.function
    @tfmp.autocast()
    def evaluate(iterator: Any) -> tf.Tensor:
        total = 0.0
        for _ in tf.range(4):
            total += tf.reduce_mean(next(iterator) @ w)
        return total

    assert float(evaluate(iter(data))) == 8


@pytest.mark.parametrize("way", [lambda function: function, tf.function], ids=["eager", "function"])
def test_vectorized_map_runs_in_a_scope(way: Callable[..., Any]) -> None:
    w = tf.Variable(tf.ones([2, 3]))

    @tfmp.autocast()
    def forward(x: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        return tf.vectorized_map(lambda row: (tf.linalg.matvec(w, row, transpose_a=True), tf.reduce_sum(row)), x)

    products, sums = way(forward)(_X)
    assert (products.dtype, products.numpy().tolist()) == (tf.float16, [[3] * 3, [7] * 3])
    assert (sums.dtype, sums.numpy().tolist()) == (tf.float32, [3, 7])


def test_vectorized_map_of_a_function_with_a_scope() -> None:
    @tfmp.autocast()
    def row_product(row: tf.Tensor) -> tf.Tensor:
        return tf.exp(tf.tensordot(row, _X, 1) * 0.0)

    found = tf.vectorized_map(row_product, _X)
    assert (found.dtype, found.numpy().tolist()) == (tf.float32, [[1, 1], [1, 1]])


@pytest.mark.parametrize("way", [lambda function: function, tf.function], ids=["eager", "function"])
def test_python_functions_run_outside_of_the_scope_or_return_their_types(way: Callable[..., Any]) -> None:
    @tfmp.autocast()
    def forward(x: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        y = tf.py_function(lambda x: x @ x, [x], tf.float32)
        return y, tf.numpy_function(lambda x: x @ x, [x], tf.float32)

    first, second = way(forward)(_X)
    assert first.numpy().tolist() == second.numpy().tolist() == [[7, 10], [15, 22]]
    assert (first.dtype, second.dtype) == (tf.float32, tf.float32)


def test_init_scope_within_a_scope_is_eager_code_in_it() -> None:
    found = []

    @tf.function
    @tfmp.autocast()
    def forward(x: tf.Tensor) -> tf.Tensor:
        with tf.init_scope():
            found.append((tf.executing_eagerly(), (_X @ _X).dtype.name))
        return x @ x

    assert forward(_X).dtype == tf.float16
    assert found == [(True, "float16")]


def test_gradient_of_a_function_that_was_traced_outside_is_computed_in_a_scope() -> None:
    w = tf.Variable(_X)
    square = tf.function(lambda x: tf.reduce_sum(tf.exp(x @ w * 0.0)))
    square(_X)
    with tfmp.autocast(), tf.GradientTape() as tape:
        tape.watch(_X)
        loss = square(_X) * 2.0
        grads = tape.gradient(loss, [w, _X])
    assert [grad.dtype for grad in grads] == [tf.float32, tf.float32]


def test_graph_that_is_built_within_a_scope_of_eager_code_has_its_types() -> None:
    with tfmp.autocast():
        with tf.Graph().as_default(), tf.compat.v1.Session() as session:
            product = tf.constant([[2.0]]) @ tf.constant([[3.0]])
            value = session.run(product)
        assert (value.dtype.name, value.tolist()) == ("float16", [[6]])
        assert (_X @ _X).dtype == tf.float16


def test_scope_and_graph_are_entered_in_either_order() -> None:
    with tf.Graph().as_default():
        with tfmp.autocast():
            inside = tf.constant([[2.0]]) @ tf.constant([[3.0]])
        outside = tf.constant([[2.0]]) @ tf.constant([[3.0]])
        half = inside + tf.cast(outside, tf.float16)
        with tfmp.autocast():
            mixed = half + outside
    assert [each.dtype.name for each in (inside, outside, half, mixed)] == ["float16", "float32", "float16", "float32"]
