"""The public function, in eager code and in functions of TensorFlow; test_graph.py has the graphs of TF1."""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import tfmp

Way = Callable[[Callable[..., Any]], Callable[..., Any]]


def _eager(function: Callable[..., Any]) -> Callable[..., Any]:
    return function


def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return tf.function(function, jit_compile=True)


#: Each way in which TensorFlow runs a step, and the largest relative difference of its numbers.
_WAYS = pytest.mark.parametrize(
    ("way", "tolerance"), [(_eager, 0.0), (tf.function, 1e-6), (_compiled, 0.0)], ids=["eager", "function", "xla"]
)

#: Where a gradient is a sum of several, whose order is another.
_SUMMED = 1e-5


def _normal(*shape: int) -> tf.Tensor:
    return tf.constant(np.random.default_rng(7).normal(size=shape), tf.float32)


class _Block:
    """A block that uses everything that a gradient may flow to."""

    def __init__(self) -> None:
        self.kernel = tf.Variable(_normal(4, 4))
        self.table = tf.Variable(_normal(5, 4))
        self.fixed = tf.Variable(2.0, trainable=False)
        self.captured = _normal(4) + 1
        self.sources = [self.kernel, self.table, self.fixed, self.captured]

    def __call__(self, x: tf.Tensor, ids: tf.Tensor, flag: bool, *, scale: float | None = None) -> dict[str, Any]:
        assert flag is True
        y = tf.tanh(x @ self.kernel) * self.captured * self.fixed * (scale or 1.0)
        return {"y": y + tf.gather(self.table, ids), "next": ids + 1, "others": (y * 2, None, "name")}


def _gradients(call: Callable[..., Any], block: _Block, x: tf.Tensor) -> list[tf.Tensor | None]:
    with tf.GradientTape() as tape:
        tape.watch([x, block.captured, block.fixed])
        results = call(x, tf.constant([1, 1, 3]), True, scale=0.5)
        loss = tf.reduce_sum(results["y"] ** 2) + tf.reduce_sum(results["others"][0])
    assert results["others"][1:] == (None, "name")
    return [loss, tf.cast(results["next"], tf.float32), *tape.gradient(loss, [x, *block.sources])]


def _assert_same(plain: Any, recomputed: Any, tolerance: float) -> None:
    assert len(plain) == len(recomputed) > 1
    for each, other in zip(plain, recomputed, strict=True):
        assert type(each) is type(other)
        np.testing.assert_allclose(tf.convert_to_tensor(other), tf.convert_to_tensor(each), rtol=tolerance)


def _assert_same_both_ways(way: Way, gradients: Callable[[Way, tf.Tensor], list[tf.Tensor]], tolerance: float) -> None:
    plain, again = (way(functools.partial(gradients, wrap)) for wrap in (_eager, tfmp.recompute))
    _assert_same(plain(_normal(3, 4)), again(_normal(3, 4)), tolerance)


@_WAYS
def test_results_and_gradients_are_those_of_the_plain_function(way: Way, tolerance: float) -> None:
    block = _Block()
    _assert_same_both_ways(way, lambda wrap, x: _gradients(wrap(block), block, x), tolerance)


def test_gradients_of_a_function_are_those_of_the_plain_function_from_outside() -> None:
    block, x = _Block(), _normal(3, 4)
    # The tape is outside of the function, whose gradients are then computed by a function of their own.
    plain, again = tf.function(block), tf.function(tfmp.recompute(block))
    _assert_same(_gradients(plain, block, x), _gradients(again, block, x), 1e-6)


@_WAYS
def test_tensors_of_the_same_function_may_be_captured(way: Way, tolerance: float) -> None:
    def gradients(wrap: Way, x: tf.Tensor) -> list[tf.Tensor]:
        with tf.GradientTape() as tape:
            tape.watch(x)
            captured = tf.exp(x)
            y = tf.cond(x[0, 0] > -9, lambda: wrap(lambda x: tf.tanh(x * captured))(x), lambda: x)
        return [y, tape.gradient(y, x)]

    _assert_same_both_ways(way, gradients, tolerance)


@_WAYS
def test_second_derivatives_are_those_of_the_plain_function(way: Way, tolerance: float) -> None:
    block = _Block()

    def second(wrap: Way, x: tf.Tensor) -> list[tf.Tensor]:
        with tf.GradientTape() as outer:
            outer.watch([x, block.captured])
            with tf.GradientTape() as tape:
                tape.watch(x)
                y = wrap(block)(x, tf.constant([1, 1, 3]), True)["y"] ** 2
            loss = tf.reduce_sum(tape.gradient(y, x) ** 2)
        return [loss, *outer.gradient(loss, [x, block.kernel, block.captured])]

    _assert_same_both_ways(way, second, tolerance or _SUMMED)


@_WAYS
def test_recomputed_functions_call_recomputed_functions(way: Way, tolerance: float) -> None:
    w = tf.Variable(_normal(4, 4))

    def gradients(wrap: Way, x: tf.Tensor) -> list[tf.Tensor]:
        inner = wrap(lambda x: tf.tanh(x @ w))
        outer = wrap(lambda x: inner(tf.exp(inner(x))))
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = outer(outer(x))
        return [y, *tape.gradient(y, [x, w])]

    _assert_same_both_ways(way, gradients, tolerance or _SUMMED)


@_WAYS
def test_argument_without_influence_has_no_gradient(way: Way, tolerance: float) -> None:
    def gradient(x: tf.Tensor) -> tf.Tensor:
        unused = tf.constant(1.0)
        with tf.GradientTape() as tape:
            tape.watch([x, unused])
            y = tfmp.recompute(lambda x, unused: x * 2)(x, unused)
        grad, none = tape.gradient(y, [x, unused])
        assert none is None
        return grad

    assert way(gradient)(tf.constant([1.0])).numpy().tolist() == [2.0]


@_WAYS
def test_sparse_gradients_of_results_are_taken(way: Way, tolerance: float) -> None:
    def gradient(wrap: Way, x: tf.Tensor) -> list[tf.Tensor]:
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = tf.gather(wrap(tf.tanh)(x), [0, 0, 2])
        return [y, tape.gradient(y, x)]

    _assert_same_both_ways(way, gradient, tolerance)


def test_composite_tensors_pass() -> None:
    x = tf.ragged.constant([[1.0, 2.0], [3.0]])
    with tf.GradientTape() as tape:
        tape.watch(x.values)
        y = tfmp.recompute(lambda x: tf.sparse.from_dense((x**2).to_tensor()))(x)
    assert isinstance(y, tf.SparseTensor)
    assert tape.gradient(y.values, x.values).numpy().tolist() == [2, 4, 6]


def test_function_without_floating_results_is_called_once() -> None:
    calls = []
    y = tf.function(tfmp.recompute(lambda x: calls.append(x) or tf.cast(x, tf.int32)))(tf.constant(3.7))
    assert (int(y), len(calls)) == (3, 1)
    assert int(tfmp.recompute(lambda x: tf.cast(x, tf.int32))(tf.constant(3.7))) == 3


def test_autograph_converts_both_runs() -> None:
    def block(x: tf.Tensor) -> tf.Tensor:
        if tf.reduce_sum(x) > 0:
            x = x**2
        return x

    @tf.function
    def gradient(x: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = tfmp.recompute(block)(x)
        return tape.gradient(y, x)

    assert [float(gradient(tf.constant(value))) for value in (3.0, -3.0)] == [6, 1]
    assert float(tfmp.recompute(block)(tf.constant(3.0))) == 9


def test_block_may_make_its_variables_in_its_first_call() -> None:
    class Lazy:
        w: tf.Variable | None = None

        def __call__(self, x: tf.Tensor) -> tf.Tensor:
            if self.w is None:
                self.w = tf.Variable(tf.ones([x.shape[-1]]))
            return x * self.w

    for way in (_eager, tf.function):
        block = Lazy()
        call = way(tfmp.recompute(block))
        with tf.GradientTape() as tape:
            y = call(_normal(3, 4))
        np.testing.assert_allclose(tape.gradient(y, block.w), tf.reduce_sum(_normal(3, 4), 0), rtol=1e-6)


def test_methods_are_recomputed() -> None:
    class Model(tf.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = tf.Variable(3.0)

        @tfmp.recompute
        def block(self, x: tf.Tensor) -> tf.Tensor:
            return self.w * x**2

    model, x = Model(), tf.constant(2.0)
    with tf.GradientTape() as tape:
        y = model.block(x)
    assert float(tape.gradient(y, model.w)) == 4
    with pytest.raises(ValueError, match="is recomputed already"):
        tfmp.recompute(model.block)


def test_dropout_without_state_has_the_same_mask_both_times() -> None:
    def block(x: tf.Tensor, seed: tf.Tensor) -> tf.Tensor:
        return tf.nn.experimental.stateless_dropout(x, 0.5, seed)

    x = tf.ones([100])
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = tfmp.recompute(block)(x, tf.constant([1, 2]))
    assert tape.gradient(y, x).numpy().tolist() == y.numpy().tolist()


def test_eager_code_keeps_no_activation() -> None:
    """The first run is that of a trace, so no tensor of eager code exists until the gradients are computed."""

    def made_until_the_gradients(wrap: Way) -> int:
        activations = []

        def block(x: tf.Tensor) -> tf.Tensor:
            activations.append(tf.exp(x))
            return tf.exp(activations[-1])

        x = _normal(3)
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = wrap(block)(x)
        made = sum(tf.is_tensor(activation) and hasattr(activation, "numpy") for activation in activations)
        assert tape.gradient(y, x) is not None
        return made

    assert (made_until_the_gradients(_eager), made_until_the_gradients(tfmp.recompute)) == (1, 0)


def test_gradients_in_a_function_use_no_activation_of_the_first_run() -> None:
    def ops(wrap: Way) -> tuple[list[tf.Operation], list[tf.Operation]]:
        def gradient(x: tf.Tensor) -> tf.Tensor:
            with tf.GradientTape() as tape:
                tape.watch(x)
                y = wrap(lambda x: tf.exp(tf.exp(x)))(x)
            marks.append(len(tf.compat.v1.get_default_graph().get_operations()))
            return tape.gradient(y, x)

        marks: list[int] = []
        operations = tf.function(gradient).get_concrete_function(tf.TensorSpec([3])).graph.get_operations()
        return operations[: marks[-1]], operations[marks[-1] :]

    def used(wrap: Way) -> set[str]:
        forward, backward = ops(wrap)
        names = {op.name for op in forward if op.type == "Exp"}
        return names & {tensor.op.name for op in backward for tensor in op.inputs}

    assert used(_eager)
    assert used(tfmp.recompute) == set()


def test_loss_scale_optimizer_trains_the_same_weights() -> None:
    def trained(wrap: Way) -> list[np.ndarray]:
        w = tf.Variable(_normal(4, 4))
        opt = tfmp.LossScaleOptimizer(tf.compat.v1.train.MomentumOptimizer(0.01, 0.9), "dynamic")
        block = wrap(lambda x: tf.tanh(x @ w))

        for _ in range(3):
            opt.minimize(lambda: tf.reduce_mean(block(block(_normal(3, 4))) ** 2), var_list=[w])
        return [w.numpy(), w.numpy()]

    _assert_same(trained(_eager), trained(tfmp.recompute), 0)


@pytest.mark.parametrize("way", [_eager, tf.function], ids=["eager", "function"])
def test_replicas_train_the_same_weights(two_replicas: tf.distribute.MirroredStrategy, way: Way) -> None:
    def trained(wrap: Way) -> list[np.ndarray]:
        with two_replicas.scope():
            w = tf.Variable(_normal(4, 4))
            scaler = tfmp.GradScaler()
            opt = tf.keras.optimizers.SGD(0.01)
        block = wrap(lambda x: tf.tanh(x @ w))

        def replica_step() -> None:
            offset = tf.cast(tf.distribute.get_replica_context().replica_id_in_sync_group, tf.float32)
            with tf.GradientTape() as tape:
                loss = scaler.scale(tf.reduce_mean(block(block(_normal(3, 4) + offset)) ** 2))
            scaler.step(opt, zip(scaler.unscale(opt, tape.gradient(loss, [w])), [w], strict=True))
            scaler.update()

        step = way(lambda: two_replicas.run(replica_step))
        for _ in range(3):
            step()
        return [w.numpy(), w.numpy()]

    _assert_same(trained(_eager), trained(tfmp.recompute), 1e-6)


def test_name_docstring_and_signature_stay() -> None:
    def block(x: tf.Tensor, *, flag: bool = True) -> tf.Tensor:
        """Do it."""
        return x

    wrapped = tfmp.recompute(block)
    assert (wrapped.__name__, wrapped.__doc__) == ("block", "Do it.")
    assert inspect.signature(wrapped) == inspect.signature(block)


def test_what_is_no_function_is_refused() -> None:
    with pytest.raises(TypeError, match=r"function must be callable, got 3: pass the function itself"):
        tfmp.recompute(3)


def test_layer_of_keras_is_refused_with_advice() -> None:
    keras = pytest.importorskip("keras")
    with pytest.raises(TypeError, match=r"got the Keras layer 'head': write tfmp\.Recompute\(layer\)"):
        tfmp.recompute(keras.layers.Dense(2, name="head"))


def test_wrapper_around_a_wrapper_is_refused() -> None:
    with pytest.raises(ValueError, match="tanh is recomputed already: a wrapper around a wrapper"):
        tfmp.recompute(tfmp.recompute(tf.tanh))
