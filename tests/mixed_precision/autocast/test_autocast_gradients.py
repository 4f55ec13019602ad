"""Gradients are computed in the types of the forward pass, are those of plain code, and of weights are in float32."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import tensorflow as tf
from autocast_ways import PLAIN, Program, Row, W, assert_as_plain, assert_row, each_row, eager, matrix, run, types

import tfmp


def _gradients(
    scope: Any, w: Any, x: tf.Tensor, compute: Callable[..., Any], after: Any = PLAIN, within: bool = False
) -> list[Any]:
    """Return what is computed of a variable and a tensor in a scope, and the gradients of its sum."""
    with tf.GradientTape() as tape:
        tape.watch(x)
        with scope:
            results = tf.nest.flatten(compute(w, x))
            loss = tf.add_n([tf.reduce_sum(tf.cast(each, tf.float32)) for each in results])
            if within:
                return [*results, *tape.gradient(loss, [w, x])]
    with after:
        return [*results, *tape.gradient(loss, [w, x])]


def _of(compute: Callable[..., Any], **settings: Any) -> Program:
    return functools.partial(_gradients, compute=compute, **settings)


def _loss(w: Any, x: tf.Tensor) -> tf.Tensor:
    return tf.reduce_sum(tf.nn.relu(x @ w) * tf.constant(0.5))


def _branches(w: Any, x: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    y = tf.cond(x[0, 0] > 0.0, lambda: tf.nn.relu(x @ w), lambda: x * 2.0)
    return y, tf.cond(x[0, 0] < 0.0, lambda: y @ w, lambda: tf.exp(y * 0.0))


def _loop(w: Any, x: tf.Tensor) -> tf.Tensor:
    body = lambda i, y: (i + 1, tf.nn.relu(y @ w) * 0.5)  # noqa: E731
    # XLA must know how often a loop with a gradient runs; eager code counts in another way.
    most = None if tf.executing_eagerly() else 2
    return tf.while_loop(lambda i, y: i < 2, body, (0, x), maximum_iterations=most)[1]


def _of_a_function_from_outside(scope: Any, w: Any, x: tf.Tensor) -> Any:
    loss = tf.function(functools.partial(_loss, w))
    loss(x)
    return _gradients(scope, w, x, lambda w, x: loss(x) * 2.0, within=True)


def _of_a_persistent_tape(scope: Any, w: Any, x: tf.Tensor) -> Any:
    with tf.GradientTape(persistent=True) as tape:
        tape.watch(x)
        with scope:
            y = x @ w
            loss, stopped = tf.reduce_sum(y), tf.reduce_sum(tf.stop_gradient(y) * x)
            with tape.stop_recording():
                unseen = x @ w
            inside = tape.gradient(loss, [w, y])
            given = tape.gradient(y, w, output_gradients=tf.cast(tf.fill([2, 2], 2.0), y.dtype))
            zero = tape.gradient(tf.reduce_sum(x @ x), w, unconnected_gradients="zero")
            assert tape.gradient([unseen, stopped], w) is None
    return inside, given, zero, tape.gradient(stopped, x), tape.gradient(loss, [w, y]), tape.gradient(y, x)


def _second(scope: Any, w: Any, x: tf.Tensor) -> Any:
    with scope, tf.GradientTape() as outer:
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = x @ w
            loss = tf.reduce_sum(y * y)
        norm = tf.reduce_sum(tape.gradient(loss, x))
        return norm, outer.gradient(norm, w)


def _jacobians(scope: Any, w: Any, x: tf.Tensor, within: bool, pfor: bool) -> Any:
    with tf.GradientTape(persistent=True) as tape:
        tape.watch(x)

        def found() -> Any:
            # In its loop, TensorFlow takes no half-precision result of a variable in float32.
            of_w = [tape.jacobian(each, w, experimental_use_pfor=pfor) for each in ((y, z) if pfor else (z, z))]
            return [*of_w, tape.batch_jacobian(z, x, experimental_use_pfor=pfor)]

        with scope:
            y = tf.nn.relu(x @ w) * 2.0
            z = y + tf.exp(x * 0.0)
            if within:
                return found()
    return found()


def _by_tf_gradients(scope: Any, w: Any, x: tf.Tensor, within: bool, compute: Callable[..., Any] = _loss) -> Any:
    with scope:
        y = tf.nn.relu(x @ w)
        losses = [*tf.nest.flatten(compute(w, x)), y]
        if within:
            return tf.gradients(losses, [w, x, y], stop_gradients=[])
    return tf.gradients(losses, [w, x, y])


def _second_by_tf_gradients(scope: Any, w: Any, x: tf.Tensor) -> Any:
    with scope:
        y = x @ w
        return tf.gradients(tf.reduce_sum(tf.gradients(tf.reduce_sum(y * y), x)[0]), w)


def _forward_mode(scope: Any, w: Any, x: tf.Tensor) -> Any:
    with tf.autodiff.ForwardAccumulator(x, tf.ones([2, 2])) as accumulator, scope:
        y = tf.nn.relu(x @ w)
        loss = tf.reduce_sum(y)
        return accumulator.jvp(y), accumulator.jvp(loss)


def _of_an_embedding(scope: Any, w: Any, x: tf.Tensor) -> Any:
    with tf.GradientTape() as tape, scope:
        loss = tf.reduce_sum(tf.nn.embedding_lookup(w, [1, 1]) @ x)
    grad = tape.gradient(loss, w)
    assert isinstance(grad, tf.IndexedSlices)
    return tf.convert_to_tensor(grad)


@tf.custom_gradient
def _first_of(pair: tuple[tf.Tensor, tf.Tensor], other: tf.Tensor, ids: tf.Tensor) -> Any:
    """Return a nest, of whose parts not all have gradients."""
    return (pair[0] @ pair[1], other + 1.0), lambda dy, dz: ((dy * 2.0, None), dz, None)


@tf.custom_gradient
def _first_row(x: tf.Tensor) -> Any:
    """Return a row, whose gradient is sparse."""
    y = tf.nn.relu(x @ tf.eye(2))
    return y[:1], lambda dy: tf.IndexedSlices(dy, tf.constant([0]), tf.constant([2, 2]))


class _Layer:
    """An object whose method has a gradient of its own, and calls a function that has one."""

    @tf.custom_gradient
    def outer(self, x: tf.Tensor) -> Any:
        w = tf.constant(W)
        inner = tf.custom_gradient(lambda x: (x @ w, lambda dy: tf.matmul(dy, w, transpose_b=True)))

        def gradient(dy: tf.Tensor) -> tf.Tensor:
            with tf.GradientTape() as tape:
                tape.watch(x)
                y = inner(x)
            return tape.gradient(y, x, output_gradients=tf.cast(dy, y.dtype))

        return inner(x), gradient


def _of_variables(scope: Any, w: Any, x: tf.Tensor) -> Any:
    @tf.custom_gradient
    def product(x: tf.Tensor) -> Any:
        def gradient(dy: tf.Tensor, variables: Any = None) -> Any:
            assert len(variables) == 1
            return tf.matmul(dy, w, transpose_b=True), [tf.matmul(x, dy, transpose_a=True)]

        return x @ w, gradient

    return _gradients(scope, w, x, lambda w, x: product(x))


_PROGRAMS = {
    "inside": Row(_of(_loss, within=True), "F F F"),
    "outside": Row(_of(_loss), "F F F"),
    "in another scope": Row(_of(_loss, after=tfmp.autocast("bfloat16")), "F F F"),
    "persistent tape": Row(_of_a_persistent_tape, "F H F F F F H F"),
    "second": Row(_second, "F F"),
    **{
        f"jacobians {'inside' if within else 'outside'}, {'vectorized' if pfor else 'in a loop'}": Row(
            functools.partial(_jacobians, within=within, pfor=pfor), "F F F"
        )
        for within, pfor in [(True, True), (False, True), (False, False)]
    },
    "branches": Row(_of(_branches), "F F F F", "function xla graph"),
    "loop": Row(_of(_loop), "F F F", "eager function xla graph"),
    "function from outside": Row(_of_a_function_from_outside, "F F F", "eager"),
    "forward mode": Row(_forward_mode, "H F", "eager function"),
    "sparse": Row(_of_an_embedding, "F"),
    "nest": Row(_of(lambda w, x: _first_of((x, x + 0.0), w * 1.0, tf.constant([1]))), "H F F F"),
    "sparse gradient of a function": Row(_of(lambda w, x: _first_row(x) @ w), "H F F", "eager function"),
    "method": Row(_of(lambda w, x: _Layer().outer(x) @ w), "H F F"),
    "variables": Row(_of_variables, "H F F"),
    **{
        f"tf.gradients {'inside' if within else 'outside'}": Row(
            functools.partial(_by_tf_gradients, within=within), "F F H", "function graph"
        )
        for within in (True, False)
    },
    "control flow by tf.gradients": Row(
        functools.partial(_by_tf_gradients, within=False, compute=lambda w, x: [_branches(w, x), _loop(w, x)]),
        "F F H",
        "function graph graph_v1",
    ),
    "second by tf.gradients": Row(_second_by_tf_gradients, "F", "function graph"),
}


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@each_row(_PROGRAMS)
def test_gradients_are_those_of_plain_code(row: Row, way: str, dtype: str) -> None:
    # All are computed of small integers.
    assert_row(row, way, dtype)


@pytest.mark.parametrize("name", ["inside", "outside", "tf.gradients inside", "tf.gradients outside"])
def test_products_of_gradients_are_in_half_precision(name: str) -> None:
    w = tf.Variable(W)
    program = tf.function(functools.partial(_PROGRAMS[name][0], tfmp.autocast(), w))
    products = [op for op in program.get_concrete_function(matrix()).graph.get_operations() if op.type == "MatMul"]
    assert len(products) >= 3
    assert {op.get_attr("T") for op in products} == {tf.float16}


@pytest.mark.parametrize("way", ["eager", "function"])
def test_custom_gradient_is_computed_in_the_scope_of_the_call(way: str) -> None:
    found = []

    @tf.custom_gradient
    def product(x: tf.Tensor, y: tf.Tensor) -> Any:
        def gradient(dy: tf.Tensor) -> Any:
            found.append((dy.dtype.name, (x @ x).dtype.name))
            return tf.matmul(dy, y, transpose_b=True), tf.matmul(x, dy, transpose_a=True)

        return x @ y, gradient

    def program(scope: Any, w: Any, x: tf.Tensor) -> Any:
        return _gradients(scope, w, x, lambda w, x: product(x, w), after=tfmp.autocast("bfloat16"))

    assert types(run(way, program, tfmp.autocast())) == ["float16", "float32", "float32"]
    assert set(found) == {("float16", "float16")}
    found.clear()
    assert types(run(way, program, tfmp.autocast(enabled=False))) == ["float32"] * 3
    assert set(found) == {("float32", "float32")}


_RECOMPUTED: dict[str, Callable[..., Any]] = {
    "tfmp": tfmp.recompute,
    "tensorflow": tf.recompute_grad,
    "with a scope of its own": lambda block: tfmp.recompute(tfmp.autocast()(block)),
}


@pytest.mark.parametrize("way", ["eager", "function", "graph"])
@pytest.mark.parametrize("within", [False, True], ids=["outside", "inside"])
@pytest.mark.parametrize("name", _RECOMPUTED)
def test_recomputed_functions_are_recomputed_in_the_same_types(name: str, within: bool, way: str) -> None:
    products: list[str] = []

    def program(wrap: Any, scope: Any, w: Any, x: tf.Tensor) -> Any:
        def block(x: tf.Tensor) -> tf.Tensor:
            y = x @ (w * 0.125)
            products.append(y.dtype.name)
            return tf.nn.elu(y)

        recomputed = wrap(block)
        return _gradients(scope, w, x, lambda w, x: recomputed(x), within=within)

    plain = run(way, functools.partial(program, eager), tfmp.autocast())
    num_plain = len(products)
    scope = PLAIN if name == "with a scope of its own" else tfmp.autocast()
    found = run(way, functools.partial(program, _RECOMPUTED[name]), scope)
    assert set(products) == {"float16"}
    assert len(products) >= 3 * num_plain
    assert_as_plain(found, plain, ["float16", "float32", "float32"], 1e-3)
