"""The gradients of a transformer block whose code names no types, and its training with a loss scale."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import tfmp

_WIDTH, _HEADS, _LENGTH, _WORDS, _BATCH = 8, 2, 4, 6, 2

#: Of a gradient's norm. bfloat16 has three bits less than float16.
_TOLERANCES = {"float16": 3e-3, "bfloat16": 2.4e-2}


class _Transformer(tf.Module):
    """One block between an embedding and logits, in raw TensorFlow."""

    def __init__(self) -> None:
        super().__init__()
        random = np.random.default_rng(0)

        def weight(*shape: int) -> tf.Variable:
            return tf.Variable(random.normal(size=shape, scale=shape[0] ** -0.5), dtype=tf.float32)

        self.table = weight(_WORDS, _WIDTH)
        self.positions = weight(_LENGTH, _WIDTH)
        self.projections = weight(_WIDTH, 3 * _WIDTH)
        self.projections_bias = weight(3 * _WIDTH)
        self.output = weight(_WIDTH, _WIDTH)
        self.inner = weight(_WIDTH, 2 * _WIDTH)
        self.inner_bias = weight(2 * _WIDTH)
        self.outer = weight(2 * _WIDTH, _WIDTH)
        self.norms = [(tf.Variable(tf.ones([_WIDTH])), tf.Variable(tf.zeros([_WIDTH]))) for _ in range(2)]
        self.logits = weight(_WIDTH, _WORDS)

    def __call__(self, ids: tf.Tensor) -> tf.Tensor:
        x = tf.gather(self.table, ids) + self.positions
        x = _normalized(x + self._attention(x), *self.norms[0])
        x = _normalized(x + tf.nn.gelu(x @ self.inner + self.inner_bias) @ self.outer, *self.norms[1])
        return x @ self.logits

    def loss(self, ids: tf.Tensor) -> tf.Tensor:
        labels = tf.roll(ids, -1, axis=1)
        return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels, self(ids)))

    def _attention(self, x: tf.Tensor) -> tf.Tensor:
        heads = tf.reshape(x @ self.projections + self.projections_bias, [_BATCH, _LENGTH, 3, _HEADS, -1])
        q, k, v = tf.unstack(tf.transpose(heads, [2, 0, 3, 1, 4]))
        scores = tf.matmul(q, k, transpose_b=True) / (_WIDTH // _HEADS) ** 0.5
        mask = tf.linalg.band_part(tf.ones([_LENGTH, _LENGTH]), -1, 0)
        mixed = tf.einsum("bhij,bhjd->bihd", tf.nn.softmax(scores - 1e4 * (1 - mask)), v)
        return tf.reshape(mixed, [_BATCH, _LENGTH, _WIDTH]) @ self.output


def _normalized(x: tf.Tensor, scale: tf.Variable, offset: tf.Variable) -> tf.Tensor:
    mean, variance = tf.nn.moments(x, [-1], keepdims=True)
    return tf.nn.batch_normalization(x, mean, variance, offset, scale, 1e-5)


def _ids() -> tf.Tensor:
    return tf.constant([[0, 1, 2, 3], [5, 4, 3, 2]])


def _loss_and_grads(model: _Transformer, scope: Any = None) -> tuple[tf.Tensor, list[tf.Tensor]]:
    """Return the loss and its gradients, as dense tensors."""
    with tf.GradientTape() as tape:
        if scope is None:
            loss = model.loss(_ids())
        else:
            with scope:
                loss = model.loss(_ids())
    return loss, [tf.convert_to_tensor(grad) for grad in tape.gradient(loss, model.trainable_variables)]


def _relative_error(grads: list[tf.Tensor], expected: list[tf.Tensor]) -> float:
    flat, known = (np.concatenate([np.ravel(grad) for grad in each]) for each in (grads, expected))
    return float(np.linalg.norm(flat - known) / np.linalg.norm(known))


_WAYS: dict[str, Callable[..., Any]] = {
    "eager": lambda function: function,
    "function": tf.function,
    "xla": lambda function: tf.function(function, jit_compile=True),
}


@pytest.mark.parametrize("dtype", list(_TOLERANCES))
@pytest.mark.parametrize("way", list(_WAYS))
def test_gradients_of_a_transformer_are_those_of_float32(way: str, dtype: str) -> None:
    model = _Transformer()
    expected_loss, expected = _loss_and_grads(model)
    loss, grads = _WAYS[way](lambda: _loss_and_grads(model, tfmp.autocast(dtype)))()
    assert {grad.dtype for grad in grads} == {tf.float32}
    assert loss.dtype == tf.float32
    assert float(loss) == pytest.approx(float(expected_loss), rel=_TOLERANCES[dtype])
    assert 0 < _relative_error(grads, expected) < _TOLERANCES[dtype]


def test_each_gradient_is_near_that_of_float32() -> None:
    model = _Transformer()
    _, expected = _loss_and_grads(model)
    _, grads = _loss_and_grads(model, tfmp.autocast())
    names = [variable.shape for variable in model.trainable_variables]
    errors = {
        f"{index} {shape}": _relative_error([grad], [known])
        for index, (shape, grad, known) in enumerate(zip(names, grads, expected, strict=True))
        # The gradient of the bias of keys is zero but for rounding: it is compared with the others, above.
        if np.linalg.norm(known) > 1e-4
    }
    assert {name: error for name, error in errors.items() if error > 3e-3} == {}


def test_most_of_the_transformer_computes_in_half_precision() -> None:
    model = _Transformer()

    @tf.function
    def step() -> tf.Tensor:
        return _loss_and_grads(model, tfmp.autocast())[0]

    operations = step.get_concrete_function().graph.get_operations()
    products = [op for op in operations if op.type in ("MatMul", "BatchMatMulV2", "Einsum")]
    assert len(products) > 12
    assert {op.outputs[0].dtype for op in products} == {tf.float16}
    softmax = [op.inputs[0].dtype for op in operations if op.type == "SparseSoftmaxCrossEntropyWithLogits"]
    assert softmax == [tf.float32]


@pytest.mark.parametrize("is_within", [True, False], ids=["within", "outside"])
def test_gradients_are_the_same_within_the_scope_and_outside(is_within: bool) -> None:
    model = _Transformer()
    _, expected = _loss_and_grads(model, tfmp.autocast())
    with tfmp.autocast(enabled=is_within), tf.GradientTape() as tape:
        with tfmp.autocast():
            loss = model.loss(_ids())
        grads = [tf.convert_to_tensor(grad) for grad in tape.gradient(loss, model.trainable_variables)]
    assert all(bool(tf.reduce_all(grad == known)) for grad, known in zip(grads, expected, strict=True))


def test_gradient_of_a_table_is_sparse_and_float32() -> None:
    table, w = tf.Variable(tf.ones([4, 2])), tf.Variable([[1.0], [2.0]])
    with tf.GradientTape() as tape, tfmp.autocast():
        loss = tf.reduce_sum(tf.nn.embedding_lookup(table, [1, 3, 1]) @ w)
    grad = tape.gradient(loss, table)
    assert isinstance(grad, tf.IndexedSlices)
    assert grad.dtype == tf.float32
    assert tf.convert_to_tensor(grad).numpy().tolist() == [[0, 0], [2, 4], [0, 0], [1, 2]]


def _hessian(w: tf.Variable, scope: Any) -> tf.Tensor:
    with tf.GradientTape() as outer:
        with tf.GradientTape() as inner, scope:
            loss = tf.reduce_sum(tf.tanh(tf.constant([[1.0, 2.0]]) @ w))
        grad = inner.gradient(loss, w)
    return outer.gradient(grad, w)


def test_second_gradients_are_those_of_float32() -> None:
    w = tf.Variable([[0.25], [0.125]])
    found = _hessian(w, tfmp.autocast())
    assert found.dtype == tf.float32
    np.testing.assert_allclose(found, _hessian(w, tfmp.autocast(enabled=False)), rtol=1e-2)


def test_jacobian_is_that_of_float32() -> None:
    w = tf.Variable([[0.25, 0.5], [0.125, 1.0]])

    def jacobian(scope: Any) -> tf.Tensor:
        with tf.GradientTape() as tape, scope:
            y = tf.tanh(tf.constant([[1.0, 2.0]]) @ w)
        return tape.jacobian(y, w)

    found = jacobian(tfmp.autocast())
    assert found.dtype == tf.float32
    np.testing.assert_allclose(found, jacobian(tfmp.autocast(enabled=False)), rtol=2e-2)


@pytest.mark.parametrize("way", [lambda function: function, tf.function], ids=["eager", "function"])
def test_jacobians_within_the_scope_are_those_of_float32(way: Callable[..., Any]) -> None:
    w, x = tf.Variable([[0.25, 0.5], [0.125, 1.0]]), tf.constant([[1.0, 2.0], [0.5, -1.0]])

    def jacobians(scope: Any) -> tuple[tf.Tensor, tf.Tensor]:
        with scope, tf.GradientTape(persistent=True) as tape:
            tape.watch(x)
            y = tf.nn.softmax(tf.tanh(x @ w) @ w)
            return tape.jacobian(y, w), tape.batch_jacobian(y, x)

    for found, known in zip(
        way(lambda: jacobians(tfmp.autocast()))(), jacobians(tfmp.autocast(enabled=False)), strict=True
    ):
        assert found.dtype == tf.float32
        np.testing.assert_allclose(found, known, rtol=2e-2, atol=2e-3)


@pytest.mark.parametrize("way", [lambda function: function, tf.function], ids=["eager", "function"])
def test_forward_gradient_is_that_of_float32(way: Callable[..., Any]) -> None:
    w = tf.Variable([[0.25, 0.5], [0.125, 1.0]])
    x = tf.constant([[1.0, 2.0]])

    def product(scope: Any) -> tf.Tensor:
        with tf.autodiff.ForwardAccumulator(x, tf.constant([[1.0, 0.5]])) as accumulator, scope:
            y = tf.tanh(x @ w)
        return accumulator.jvp(y)

    found = way(lambda: product(tfmp.autocast()))()
    np.testing.assert_allclose(tf.cast(found, tf.float32), product(tfmp.autocast(enabled=False)), rtol=1e-2)


def _trained(way: Callable[..., Any], scope: Any, scaler: tfmp.GradScaler, steps: int) -> tuple[_Transformer, float]:
    model = _Transformer()
    optimizer = tf.compat.v1.train.GradientDescentOptimizer(0.2)
    variables = list(model.trainable_variables)

    @way
    def step(ids: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            with scope:
                loss = model.loss(ids)
            scaled = scaler.scale(loss)
        grads = scaler.unscale(optimizer, tape.gradient(scaled, variables))
        grads, _ = tfmp.clip_by_global_norm(grads, 5.0)
        scaler.step(optimizer, list(zip(grads, variables, strict=True)))
        scaler.update()
        return loss

    losses = [float(step(_ids())) for _ in range(steps)]
    assert losses[0] > 1.5
    return model, losses[-1]


@pytest.mark.parametrize("way", [lambda function: function, tf.function], ids=["eager", "function"])
def test_recipe_of_torch_trains_as_float32_does(way: Callable[..., Any]) -> None:
    scaler = tfmp.GradScaler(init_scale=2.0**10)
    model, loss = _trained(way, tfmp.autocast(), scaler, steps=10)
    known, expected = _trained(tf.function, tfmp.autocast(enabled=False), tfmp.GradScaler(enabled=False), steps=10)
    assert expected < 1.5
    assert loss == pytest.approx(expected, rel=2e-2)
    assert float(scaler.loss_scale) == 2**10
    assert {variable.dtype for variable in model.trainable_variables} == {tf.float32}
    assert 0 < _relative_error(list(model.trainable_variables), list(known.trainable_variables)) < 1e-2


def test_overflow_in_half_precision_is_seen_and_the_step_left_out() -> None:
    scaler = tfmp.GradScaler(init_scale=2.0**30)
    w = tf.Variable([[1.0], [2.0]])
    optimizer = tf.compat.v1.train.GradientDescentOptimizer(0.5)
    with tf.GradientTape() as tape:
        with tfmp.autocast():
            loss = tf.reduce_mean(tf.ones([4, 2]) @ w)
        scaled = scaler.scale(loss)
    grad = tape.gradient(scaled, w)
    assert not np.isfinite(grad.numpy()).any()
    scaler.step(optimizer, [(grad, w)])
    scaler.update()
    assert w.numpy().tolist() == [[1], [2]]
    assert float(scaler.loss_scale) == 2**29


def test_small_gradients_need_the_loss_scale() -> None:
    w = tf.Variable([[1.0]])

    def grad(scale: float) -> float:
        with tf.GradientTape() as tape:
            with tfmp.autocast():
                loss = tf.reduce_sum(tf.ones([1, 1]) @ w) * 2.0**-30
            scaled = loss * scale
        return tape.gradient(scaled, w).numpy().item() / scale

    assert grad(1.0) == 0
    assert grad(2.0**12) == 2**-30
