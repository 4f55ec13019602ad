"""Gradients are computed in the types of the forward pass, and weights have gradients in float32."""

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from kerases import for_every_keras

import tfmp

_Way = Callable[[Callable[..., Any]], Callable[..., Any]]


def _eager(function: Callable[..., Any]) -> Callable[..., Any]:
    return function


_WAYS = pytest.mark.parametrize("way", [_eager, tf.function], ids=["eager", "function"])


def _x() -> tf.Tensor:
    return tf.constant([[1.0, 2.0], [3.0, 4.0]])


def _types(tensors: Any) -> list[str]:
    return [each.dtype.name for each in tf.nest.flatten(tensors)]


def _values(tensors: Any) -> list[Any]:
    return [each.numpy().tolist() for each in tf.nest.flatten(tensors)]


def _loss(w: Any, x: tf.Tensor) -> tf.Tensor:
    return tf.reduce_sum(tf.nn.relu(x @ w) * tf.constant(0.5))


_GRADS = ([[2.0, 2.0], [3.0, 3.0]], [[1.0, 1.0], [1.0, 1.0]])


@_WAYS
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_gradients_are_the_same_inside_and_outside_of_the_scope(way: _Way, dtype: str) -> None:
    w, scope = tf.Variable(tf.ones([2, 2])), tfmp.autocast(dtype)

    def inside(x: tf.Tensor) -> Any:
        with scope, tf.GradientTape() as tape:
            tape.watch(x)
            loss = _loss(w, x)
            return tape.gradient(loss, [w, x])

    def outside(x: tf.Tensor) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            with scope:
                loss = _loss(w, x)
        return tape.gradient(loss, [w, x])

    def in_another(x: tf.Tensor) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            with scope:
                loss = _loss(w, x)
        with tfmp.autocast("bfloat16" if dtype == "float16" else "float16"):
            return tape.gradient(loss, [w, x])

    for gradients in (inside, outside, in_another):
        grads = way(gradients)(_x())
        assert _types(grads) == ["float32"] * 2
        assert _values(grads) == list(_GRADS)


def test_products_of_gradients_are_in_half_precision() -> None:
    w = tf.Variable(tf.ones([2, 2]))

    @tf.function
    def gradient(x: tf.Tensor) -> Any:
        with tf.GradientTape() as tape, tfmp.autocast():
            tape.watch(x)
            loss = _loss(w, x)
            return tape.gradient(loss, [w, x])

    ops = gradient.get_concrete_function(_x()).graph.get_operations()
    assert [op.get_attr("T") for op in ops if op.type == "MatMul"] == [tf.float16] * 3


@_WAYS
def test_persistent_tape_gives_gradients_inside_and_outside(way: _Way) -> None:
    w = tf.Variable(tf.ones([2, 2]))

    def gradients(x: tf.Tensor) -> Any:
        with tf.GradientTape(persistent=True) as tape:
            tape.watch(x)
            with tfmp.autocast():
                y = x @ w
                loss = tf.reduce_sum(y)
                inside = tape.gradient(loss, [w, y])
        outside = tape.gradient(loss, [w, y])
        of_half = tape.gradient(y, x)
        return inside, outside, of_half

    inside, outside, of_half = way(gradients)(_x())
    assert _types([inside, outside, of_half]) == ["float32", "float16"] * 2 + ["float32"]
    assert _values(inside) == _values(outside) == [[[4, 4], [6, 6]], [[1, 1], [1, 1]]]


@_WAYS
def test_output_gradients_may_be_given(way: _Way) -> None:
    w = tf.Variable(tf.ones([2, 2]))

    def gradient(x: tf.Tensor) -> Any:
        with tfmp.autocast(), tf.GradientTape() as tape:
            y = x @ w
            return tape.gradient(y, w, output_gradients=tf.cast(tf.fill([2, 2], 2.0), tf.float16))

    assert _values(way(gradient)(_x())) == [[[8, 8], [12, 12]]]


@_WAYS
def test_unconnected_gradients_are_none_or_zeros(way: _Way) -> None:
    w = tf.Variable(tf.ones([2, 2]))

    def gradients(x: tf.Tensor) -> Any:
        with tfmp.autocast(), tf.GradientTape(persistent=True) as tape:
            loss = tf.reduce_sum(x @ x)
            assert tape.gradient(loss, w) is None
            return tape.gradient(loss, w, unconnected_gradients="zero")

    grad = way(gradients)(_x())
    assert (grad.dtype, grad.numpy().tolist()) == (tf.float32, [[0, 0], [0, 0]])


@_WAYS
def test_second_derivatives(way: _Way) -> None:
    w = tf.Variable(tf.ones([2, 2]))

    def second(x: tf.Tensor) -> Any:
        with tfmp.autocast(), tf.GradientTape() as outer:
            with tf.GradientTape() as tape:
                tape.watch(x)
                y = x @ w
                loss = tf.reduce_sum(y * y)
            grad = tape.gradient(loss, x)
            norm = tf.reduce_sum(grad)
        return norm, outer.gradient(norm, w)

    norm, grad = way(second)(_x())
    # The sum of 2 (x w) w', by w.
    expected = 2 * _second(np.array([[1.0, 2.0], [3.0, 4.0]]))
    assert (norm.dtype, float(norm)) == (tf.float32, 80.0)
    assert (grad.dtype, grad.numpy().tolist()) == (tf.float32, expected.tolist())


def _second(x: np.ndarray) -> np.ndarray:
    # d/dw_kl of sum_ij (x w w')_ij, which is u'x w w' u with u all ones, is (x'u)(u'w)_kl + (u)(u'x w)_kl.
    u, w = np.ones([2, 1]), np.ones([2, 2])
    return x.T @ u @ (u.T @ w) + u @ (u.T @ x @ w)


@_WAYS
@pytest.mark.parametrize("pfor", [True, False], ids=["pfor", "loop"])
def test_jacobians_are_those_of_plain_code(way: _Way, pfor: bool) -> None:
    def jacobians(w: tf.Variable, scope: Any, within: bool, x: tf.Tensor) -> Any:
        with tf.GradientTape(persistent=True) as tape:
            tape.watch(x)
            with scope:
                y = tf.nn.relu(x @ w) * 2.0
                z = y + tf.exp(x * 0.0)
                if within:
                    return [
                        tape.jacobian(z, w, experimental_use_pfor=pfor),
                        tape.batch_jacobian(z, x, experimental_use_pfor=pfor),
                    ]
        return [
            tape.jacobian(z, w, experimental_use_pfor=pfor),
            tape.batch_jacobian(z, x, experimental_use_pfor=pfor),
        ]

    w = tf.Variable([[1.0, 0.5], [2.0, 1.0]])
    plain = way(functools.partial(jacobians, w, tfmp.autocast(enabled=False), False))(_x())
    for within in (False, True):
        found = way(functools.partial(jacobians, w, tfmp.autocast(), within))(_x())
        assert _types(found) == ["float32"] * 2
        assert _values(found) == _values(plain)


@_WAYS
def test_jacobian_of_a_half_result(way: _Way) -> None:
    w = tf.Variable([[1.0, 0.5], [2.0, 1.0]])

    def jacobian(x: tf.Tensor) -> Any:
        with tf.GradientTape() as tape, tfmp.autocast():
            y = x @ w
        return tape.jacobian(y, w)

    found = way(jacobian)(_x())
    assert (found.dtype, found.shape) == (tf.float32, [2, 2, 2, 2])
    assert found.numpy()[1, 0].tolist() == [[3, 0], [4, 0]]


@pytest.mark.parametrize("within", [False, True], ids=["outside", "inside"])
def test_gradients_of_graphs(session: tf.compat.v1.Session, within: bool) -> None:
    w = tf.compat.v1.get_variable("w", initializer=np.ones([2, 2], np.float32))
    scope = tfmp.autocast()
    with scope:
        x = _x()
        loss = _loss(w, x)
        hidden = tf.nn.relu(x @ w)
        grads = tf.gradients([loss, hidden], [w, x, hidden], stop_gradients=[]) if within else None
    grads = grads or tf.gradients([loss, hidden], [w, x, hidden])
    session.run(tf.compat.v1.global_variables_initializer())
    assert _types(grads) == ["float32", "float32", "float16"]
    assert session.run(grads)[0].tolist() == [[6, 6], [9, 9]]
    products = [op for op in session.graph.get_operations() if op.type == "MatMul"]
    assert len(products) > 4
    assert {op.get_attr("T") for op in products} == {tf.float16}


def test_second_derivatives_of_graphs(session: tf.compat.v1.Session) -> None:
    w = tf.compat.v1.get_variable("w", initializer=np.ones([2, 2], np.float32))
    x = _x()
    with tfmp.autocast():
        y = x @ w
        grad = tf.gradients(tf.reduce_sum(y * y), x)[0]
        second = tf.gradients(tf.reduce_sum(grad), w)[0]
    session.run(tf.compat.v1.global_variables_initializer())
    assert session.run(second).tolist() == (2 * _second(np.array([[1.0, 2.0], [3.0, 4.0]]))).tolist()


def test_function_computes_its_gradients_by_tf_gradients() -> None:
    w = tf.Variable(tf.ones([2, 2]))

    @tf.function
    @tfmp.autocast()
    def gradients(x: tf.Tensor) -> Any:
        return tf.gradients(_loss(w, x), [w, x])

    grads = gradients(_x())
    assert (_types(grads), _values(grads)) == (["float32"] * 2, list(_GRADS))


@_WAYS
def test_custom_gradient_is_computed_in_the_scope_of_the_call(way: _Way) -> None:
    found = []

    @tf.custom_gradient
    def product(x: tf.Tensor, y: tf.Tensor) -> Any:
        def gradient(dy: tf.Tensor) -> Any:
            found.append((dy.dtype.name, (x @ x).dtype.name))
            return tf.matmul(dy, y, transpose_b=True), tf.matmul(x, dy, transpose_a=True)

        return x @ y, gradient

    def gradients(x: tf.Tensor) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            with tfmp.autocast():
                y = product(x, x * 0.0 + 1.0)
                loss = tf.reduce_sum(y)
        return y, tape.gradient(loss, x)

    y, grad = way(gradients)(_x())
    assert _types([y, grad]) == ["float16", "float32"]
    assert grad.numpy().tolist() == [[2, 2], [2, 2]]
    assert set(found) == {("float16", "float16")}
    found.clear()

    def off(x: tf.Tensor) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            with tfmp.autocast(), tfmp.autocast(enabled=False):
                loss = tf.reduce_sum(product(x, x))
            with tfmp.autocast():
                return tape.gradient(loss, x)

    assert way(off)(_x()).dtype == tf.float32
    assert set(found) == {("float32", "float32")}


@_WAYS
def test_custom_gradient_with_variables(way: _Way) -> None:
    w, b = tf.Variable(tf.ones([2, 2])), tf.Variable(tf.zeros([2]))
    names = []

    @tf.custom_gradient
    def dense(x: tf.Tensor) -> Any:
        def gradient(dy: tf.Tensor, variables: Any = None) -> Any:
            names.append([each is w for each in variables])
            by_variable = {id(w): tf.matmul(x, dy, transpose_a=True), id(b): tf.reduce_sum(dy, 0)}
            return tf.matmul(dy, w, transpose_b=True), [by_variable[id(each)] for each in variables]

        return x @ w + b, gradient

    def gradients(x: tf.Tensor) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            with tfmp.autocast():
                y = dense(x)
                loss = tf.reduce_sum(y)
        return y, tape.gradient(loss, [x, w, b])

    y, grads = way(gradients)(_x())
    assert (y.dtype, _types(grads)) == (tf.float16, ["float32"] * 3)
    assert _values(grads) == [[[2, 2], [2, 2]], [[4, 4], [6, 6]], [2, 2]]
    assert sorted(names[0]) == [False, True]


@_WAYS
def test_custom_gradient_of_nests_and_of_nothing(way: _Way) -> None:
    @tf.custom_gradient
    def first_of(pair: tuple[tf.Tensor, tf.Tensor], other: tf.Tensor, ids: tf.Tensor) -> Any:
        def gradient(dy: tf.Tensor, dz: tf.Tensor) -> Any:
            return (dy * 2.0, None), dz, None

        return (pair[0] @ pair[1], other + 1.0), gradient

    def gradients(x: tf.Tensor) -> Any:
        other = x * 1.0
        with tf.GradientTape() as tape:
            tape.watch([x, other])
            with tfmp.autocast():
                y, z = first_of((x, x + 0.0), other, tf.constant([1]))
                loss = tf.reduce_sum(y) + tf.reduce_sum(z)
        return [y, z, *tape.gradient(loss, [x, other])]

    found = way(gradients)(_x())
    assert _types(found) == ["float16", "float32", "float32", "float32"]
    assert _values(found)[2:] == [[[2, 2], [2, 2]], [[1, 1], [1, 1]]]


def test_custom_gradient_with_keywords() -> None:
    @tf.custom_gradient
    def product(x: tf.Tensor, *, y: tf.Tensor) -> Any:
        def gradient(dy: tf.Tensor) -> Any:
            return tf.matmul(dy, y, transpose_b=True)

        return x @ y, gradient

    def gradient(scope: Any) -> Any:
        x, y = _x(), tf.ones([2, 2])
        with tf.GradientTape() as tape:
            tape.watch(x)
            with scope:
                loss = tf.reduce_sum(product(x, y=y))
        return tape.gradient(loss, x)

    assert _values(gradient(tfmp.autocast(enabled=False))) == [[[2, 2], [2, 2]]]
    found = gradient(tfmp.autocast())
    assert (found.dtype, _values(found)) == (tf.float32, [[[2, 2], [2, 2]]])


@_WAYS
def test_custom_gradient_of_a_method_and_of_a_nested_function(way: _Way) -> None:
    class Layer:
        def __init__(self) -> None:
            self.w = tf.constant([[1.0, 1.0], [1.0, 1.0]])

        @tf.custom_gradient
        def outer(self, x: tf.Tensor) -> Any:
            @tf.custom_gradient
            def inner(x: tf.Tensor) -> Any:
                return x @ self.w, lambda dy: tf.matmul(dy, self.w, transpose_b=True)

            def gradient(dy: tf.Tensor) -> tf.Tensor:
                with tf.GradientTape() as tape:
                    tape.watch(x)
                    y = inner(x)
                return tape.gradient(y, x, output_gradients=tf.cast(dy, y.dtype))

            return inner(x), gradient

    layer = Layer()

    def gradients(x: tf.Tensor) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            with tfmp.autocast():
                y = layer.outer(x)
                loss = tf.reduce_sum(y)
        return y, tape.gradient(loss, x)

    y, grad = way(gradients)(_x())
    assert (_types([y, grad]), _values(grad)) == (["float16", "float32"], [[[2, 2], [2, 2]]])


def test_custom_gradient_of_graphs(session: tf.compat.v1.Session) -> None:
    w = tf.compat.v1.get_variable("w", initializer=np.ones([2, 2], np.float32), use_resource=True)

    @tf.custom_gradient
    def dense(x: tf.Tensor) -> Any:
        def gradient(dy: tf.Tensor, variables: Any = None) -> Any:
            return tf.matmul(dy, w, transpose_b=True), [tf.matmul(x, dy, transpose_a=True)]

        return x @ w, gradient

    with tfmp.autocast():
        x = _x()
        loss = tf.reduce_sum(dense(x))
    grads = tf.gradients(loss, [x, w])
    session.run(tf.compat.v1.global_variables_initializer())
    assert _types(grads) == ["float32"] * 2
    assert [each.tolist() for each in session.run(grads)] == [[[2, 2], [2, 2]], [[4, 4], [6, 6]]]


@_WAYS
def test_custom_gradient_gives_a_sparse_gradient(way: _Way) -> None:
    @tf.custom_gradient
    def first_row(x: tf.Tensor) -> Any:
        y = tf.nn.relu(x @ tf.eye(2))
        return y[:1], lambda dy: tf.IndexedSlices(dy, tf.constant([0]), tf.constant([2, 2]))

    def gradient(x: tf.Tensor) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            with tfmp.autocast():
                loss = tf.reduce_sum(first_row(x))
        return tf.convert_to_tensor(tape.gradient(loss, x))

    found = way(gradient)(_x())
    assert (found.dtype, _values(found)) == (tf.float32, [[[1, 1], [0, 0]]])


@_WAYS
def test_functions_of_tensorflow_with_custom_gradients(way: _Way) -> None:
    w = tf.Variable(tf.ones([2, 2]))

    def gradient(x: tf.Tensor) -> Any:
        with tf.GradientTape() as tape, tfmp.autocast():
            tape.watch(x)
            y = x @ w
            results = [
                tf.nn.silu(y),
                tf.grad_pass_through(tf.round)(y),
                tf.clip_by_norm(y, 1.0),
                tf.math.reduce_logsumexp(y, -1),
                tf.nn.l2_normalize(y, -1),
                tf.math.divide_no_nan(y, y),
                tf.linalg.norm(y),
                tf.nn.gelu(y),
            ]
            loss = tf.add_n([tf.reduce_sum(tf.cast(each, tf.float32)) for each in results])
        return tape.gradient(loss, [x, w])

    grads = way(gradient)(_x())
    assert _types(grads) == ["float32"] * 2
    assert np.isfinite([each.numpy() for each in grads]).all()
    assert all(np.abs(each.numpy()).max() > 0.1 for each in grads)


@_WAYS
def test_gradient_of_an_embedding_is_sparse_and_float32(way: _Way) -> None:
    table, w = tf.Variable(tf.ones([3, 2])), tf.Variable(tf.ones([2, 2]))

    def gradient(ids: tf.Tensor) -> Any:
        with tf.GradientTape() as tape, tfmp.autocast():
            loss = tf.reduce_sum(tf.nn.embedding_lookup(table, ids) @ w)
        return tape.gradient(loss, [table, w])

    sparse, dense = way(gradient)(tf.constant([1, 1]))
    assert isinstance(sparse, tf.IndexedSlices)
    assert (sparse.dtype, dense.dtype) == (tf.float32, tf.float32)
    assert tf.convert_to_tensor(sparse).numpy().tolist() == [[0, 0], [4, 4], [0, 0]]


def _hidden(w: tf.Variable, x: tf.Tensor) -> tf.Tensor:
    return tf.nn.elu(x @ w)


def _recomputed_gradients(wrap: _Way, way: _Way, within: bool) -> Any:
    w = tf.Variable([[0.5, 0.25], [0.25, 0.5]])
    products = []

    def block(x: tf.Tensor) -> tf.Tensor:
        y = x @ w
        products.append(y.dtype.name)
        return tf.nn.elu(y)

    recomputed = wrap(block)

    def gradients(x: tf.Tensor) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            with tfmp.autocast():
                y = recomputed(recomputed(x))
                loss = tf.reduce_sum(y)
                if within:
                    return [y, loss, *tape.gradient(loss, [x, w])]
        return [y, loss, *tape.gradient(loss, [x, w])]

    found = way(gradients)(_x())
    assert set(products) == {"float16"}
    return found, len(products)


@_WAYS
@pytest.mark.parametrize("within", [False, True], ids=["outside", "inside"])
@pytest.mark.parametrize("wrap", [tfmp.recompute, tf.recompute_grad], ids=["tfmp", "tensorflow"])
def test_recomputed_functions_are_recomputed_in_the_same_types(wrap: _Way, way: _Way, within: bool) -> None:
    plain, calls = _recomputed_gradients(_eager, way, within)
    found, more_calls = _recomputed_gradients(wrap, way, within)
    assert more_calls >= 2 * calls
    assert _types(found) == _types(plain) == ["float16", "float32", "float32", "float32"]
    for one, other in zip(plain, found, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-3)


@_WAYS
def test_recomputed_function_enters_the_scope_itself(way: _Way) -> None:
    w = tf.Variable([[0.5, 0.25], [0.25, 0.5]])
    products = []

    @tfmp.recompute
    @tfmp.autocast()
    def block(x: tf.Tensor) -> tf.Tensor:
        y = x @ w
        products.append(y.dtype.name)
        return tf.nn.elu(y)

    def gradients(x: tf.Tensor) -> Any:
        with tf.GradientTape() as tape:
            y = block(x)
            loss = tf.reduce_sum(tf.cast(y, tf.float32))
        return [y, tape.gradient(loss, w)]

    assert _types(way(gradients)(_x())) == ["float16", "float32"]
    assert set(products) == {"float16"}


def test_recomputed_function_of_graphs(session: tf.compat.v1.Session) -> None:
    w = tf.compat.v1.get_variable("w", initializer=np.ones([2, 2], np.float32), use_resource=True)
    with tfmp.autocast():
        y = tfmp.recompute(functools.partial(_hidden, w))(_x() * 0.0)
        loss = tf.reduce_sum(y)
    grads = tf.gradients(loss, [w])
    session.run(tf.compat.v1.global_variables_initializer())
    assert (y.dtype, grads[0].dtype) == (tf.float16, tf.float32)
    assert session.run(grads[0]).tolist() == [[0, 0], [0, 0]]
    assert {op.get_attr("T") for op in session.graph.get_operations() if op.type == "MatMul"} == {tf.float16}


def _block_model(keras: ModuleType, wrapped: bool) -> Any:
    keras.utils.set_random_seed(0)

    def block(name: str) -> Any:
        layer = functools.partial(keras.layers.Dense, kernel_initializer="ones")
        inner = keras.Sequential([layer(3, "tanh"), layer(2)], name=name)
        return tfmp.Recompute(inner) if wrapped else inner

    inputs = keras.Input([2])
    model = keras.Model(inputs, block("two")(block("one")(inputs)))
    rng = np.random.default_rng(0)
    model.set_weights([rng.normal(size=weight.shape) * 0.3 for weight in model.weights])
    return model


@for_every_keras()
@_WAYS
@pytest.mark.parametrize("rebuilt", [False, True], ids=["Recompute", "recompute_layers"])
def test_recomputed_layers_have_the_gradients_of_plain_ones(keras: ModuleType, way: _Way, rebuilt: bool) -> None:
    def gradients(model: Any, x: tf.Tensor) -> Any:
        variables = list(model.trainable_variables)
        with tf.GradientTape() as tape, tfmp.autocast():
            y = model(x, training=True)
            loss = tf.reduce_mean(tf.square(y))
        return y, tape.gradient(loss, variables)

    plain = _block_model(keras, wrapped=False)
    other = tfmp.recompute_layers(plain, "one", "two") if rebuilt else _block_model(keras, wrapped=True)
    y, grads = way(functools.partial(gradients, plain))(_x())
    other_y, other_grads = way(functools.partial(gradients, other))(_x())
    assert (y.dtype, _types(grads)) == (other_y.dtype, _types(other_grads))
    assert _types(grads) == ["float32"] * 8
    for one, another in zip([y, *grads], [other_y, *other_grads], strict=True):
        np.testing.assert_allclose(one, another, rtol=1e-2, atol=1e-3)


@_WAYS
def test_forward_mode_derivatives(way: _Way) -> None:
    w = tf.constant([[1.0, 0.5], [2.0, 1.0]])

    def derivative(scope: Any, x: tf.Tensor) -> Any:
        with tf.autodiff.ForwardAccumulator(x, tf.ones([2, 2])) as accumulator, scope:
            y = tf.nn.relu(x @ w)
            loss = tf.reduce_sum(y)
            return [accumulator.jvp(y), accumulator.jvp(loss)]

    plain = way(functools.partial(derivative, tfmp.autocast(enabled=False)))(_x())
    found = way(functools.partial(derivative, tfmp.autocast()))(_x())
    assert _types(found) == ["float16", "float32"]
    assert _values(found) == _values(plain)


@_WAYS
def test_stopped_gradients_stay_stopped(way: _Way) -> None:
    w = tf.Variable(tf.ones([2, 2]))

    def gradient(x: tf.Tensor) -> Any:
        with tf.GradientTape(persistent=True) as tape, tfmp.autocast():
            tape.watch(x)
            loss = tf.reduce_sum(tf.stop_gradient(x @ w) * x)
            with tape.stop_recording():
                unseen = x @ w
            assert tape.gradient(unseen, w) is None
            assert tape.gradient(loss, w) is None
            return tape.gradient(loss, x)

    assert _values(way(gradient)(_x())) == [[[3, 3], [7, 7]]]


@_WAYS
def test_small_gradients_of_float16_need_the_scaled_loss(way: _Way) -> None:
    w = tf.Variable(tf.ones([2, 2]))

    def gradients(x: tf.Tensor) -> Any:
        grads = []
        for scale in (1.0, 2.0**20):
            with tf.GradientTape() as tape, tfmp.autocast():
                loss = tf.reduce_sum(x @ w) * (2.0**-30)
                scaled = loss * scale
            grads.append(tape.gradient(scaled, w) / scale)
        return grads

    plain, scaled = way(gradients)(_x())
    assert plain.numpy().tolist() == [[0, 0], [0, 0]]
    assert scaled.numpy().tolist() == [[4 * 2.0**-30] * 2, [6 * 2.0**-30] * 2]
