"""Gradients are computed in the types of the forward pass, are those of plain code, and of weights are in float32."""

import contextlib
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import tensorflow as tf
from autocast_ways import Way, assert_as_plain, each_way, eager, in_graph, matrix, types

import tfmp

_W = [[1.0, 0.5], [2.0, 1.0]]
_PLAIN = contextlib.nullcontext()

#: Takes a scope, a variable and a tensor, and returns what it computes of them.
_Program = Callable[[Any, Any, tf.Tensor], Any]


def _run(way: Way, program: _Program, scope: Any) -> Any:
    if way is not in_graph:
        return way(functools.partial(program, scope, tf.Variable(_W)))(matrix())

    def code() -> Any:
        return program(scope, tf.compat.v1.get_variable("w", initializer=np.float32(_W), use_resource=True), matrix())

    return in_graph(code)


def _gradients(
    scope: Any, w: Any, x: tf.Tensor, compute: Callable[..., Any], after: Any = _PLAIN, within: bool = False
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


def _of(compute: Callable[..., Any], **settings: Any) -> _Program:
    return functools.partial(_gradients, compute=compute, **settings)


def _loss(w: Any, x: tf.Tensor) -> tf.Tensor:
    return tf.reduce_sum(tf.nn.relu(x @ w) * tf.constant(0.5))


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


def _by_tf_gradients(scope: Any, w: Any, x: tf.Tensor, within: bool) -> Any:
    with scope:
        y = tf.nn.relu(x @ w)
        losses = [_loss(w, x), y]
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
        w = tf.constant(_W)
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


class _Row(NamedTuple):
    """A program and the types of its results, with "half" for the type of the scope."""

    program: _Program
    types: str
    ways: str = "eager function graph"


_WAYS: dict[str, Way] = {"eager": eager, "function": tf.function, "graph": in_graph}
_PROGRAMS = {
    "inside": _Row(_of(_loss, within=True), "float32 float32 float32"),
    "outside": _Row(_of(_loss), "float32 float32 float32"),
    "in another scope": _Row(_of(_loss, after=tfmp.autocast("bfloat16")), "float32 float32 float32"),
    "persistent tape": _Row(_of_a_persistent_tape, "float32 half float32 float32 float32 float32 half float32"),
    "second": _Row(_second, "float32 float32"),
    **{
        f"jacobians {'inside' if within else 'outside'}, {'vectorized' if pfor else 'in a loop'}": _Row(
            functools.partial(_jacobians, within=within, pfor=pfor), "float32 float32 float32"
        )
        for within, pfor in [(True, True), (False, True), (False, False)]
    },
    "forward mode": _Row(_forward_mode, "half float32", "eager function"),
    "sparse": _Row(_of_an_embedding, "float32"),
    "nest": _Row(_of(lambda w, x: _first_of((x, x + 0.0), w * 1.0, tf.constant([1]))), "half float32 float32 float32"),
    "sparse gradient of a function": _Row(
        _of(lambda w, x: _first_row(x) @ w), "half float32 float32", "eager function"
    ),
    "method": _Row(_of(lambda w, x: _Layer().outer(x) @ w), "half float32 float32"),
    "variables": _Row(_of_variables, "half float32 float32"),
    **{
        f"tf.gradients {'inside' if within else 'outside'}": _Row(
            functools.partial(_by_tf_gradients, within=within), "float32 float32 half", "function graph"
        )
        for within in (True, False)
    },
    "second by tf.gradients": _Row(_second_by_tf_gradients, "float32", "function graph"),
}


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize(("name", "way"), [(name, way) for name, row in _PROGRAMS.items() for way in row.ways.split()])
def test_gradients_are_those_of_plain_code(name: str, way: str, dtype: str) -> None:
    program, expected, _ = _PROGRAMS[name]
    # All are computed of small integers.
    found, plain = _run(_WAYS[way], program, tfmp.autocast(dtype)), _run(_WAYS[way], program, _PLAIN)
    assert_as_plain(found, plain, expected.replace("half", dtype).split())


@pytest.mark.parametrize("name", ["inside", "outside", "tf.gradients inside", "tf.gradients outside"])
def test_products_of_gradients_are_in_half_precision(name: str) -> None:
    w = tf.Variable(_W)
    program = tf.function(functools.partial(_PROGRAMS[name][0], tfmp.autocast(), w))
    products = [op for op in program.get_concrete_function(matrix()).graph.get_operations() if op.type == "MatMul"]
    assert len(products) >= 3
    assert {op.get_attr("T") for op in products} == {tf.float16}


@each_way
def test_custom_gradient_is_computed_in_the_scope_of_the_call(way: Way) -> None:
    found = []

    @tf.custom_gradient
    def product(x: tf.Tensor, y: tf.Tensor) -> Any:
        def gradient(dy: tf.Tensor) -> Any:
            found.append((dy.dtype.name, (x @ x).dtype.name))
            return tf.matmul(dy, y, transpose_b=True), tf.matmul(x, dy, transpose_a=True)

        return x @ y, gradient

    def program(scope: Any, w: Any, x: tf.Tensor) -> Any:
        return _gradients(scope, w, x, lambda w, x: product(x, w), after=tfmp.autocast("bfloat16"))

    assert types(_run(way, program, tfmp.autocast())) == ["float16", "float32", "float32"]
    assert set(found) == {("float16", "float16")}
    found.clear()
    assert types(_run(way, program, tfmp.autocast(enabled=False))) == ["float32"] * 3
    assert set(found) == {("float32", "float32")}


_RECOMPUTED: dict[str, Callable[..., Any]] = {
    "tfmp": tfmp.recompute,
    "tensorflow": tf.recompute_grad,
    "with a scope of its own": lambda block: tfmp.recompute(tfmp.autocast()(block)),
}


@pytest.mark.parametrize("way", _WAYS)
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

    plain = _run(_WAYS[way], functools.partial(program, eager), tfmp.autocast())
    num_plain = len(products)
    scope = _PLAIN if name == "with a scope of its own" else tfmp.autocast()
    found = _run(_WAYS[way], functools.partial(program, _RECOMPUTED[name]), scope)
    assert set(products) == {"float16"}
    assert len(products) >= 3 * num_plain
    assert_as_plain(found, plain, ["float16", "float32", "float32"], 1e-3)
