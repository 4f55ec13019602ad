"""Calls of recomputed layers of every Keras: what they take and return, compute again, and let tapes see."""

import copy
import functools
import weakref
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from gradient_forms import MODES, in_every_mode
from graph_ops import ops_of_a_gradient
from keras_models import Wrap, assert_close, dense, dropout, is_keras3, plain, stateful_block, values
from kerases import for_every_keras
from kit.keras_hosts import of_tensorflow

import tfmp

_X = tf.constant(np.random.default_rng(1).normal(size=[3, 4]).astype(np.float32))


def _layer(keras: ModuleType, call: Callable[..., Any]) -> Any:
    """Make a built layer that normalizes what a function makes of its Dense layer and of its input."""

    class Layer(keras.layers.Layer):  # type: ignore[name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.dense = dense(keras, 4, "tanh", activity_regularizer="l2")
            self.norm = keras.layers.BatchNormalization(momentum=0.5)

        def call(self, x: tf.Tensor, training: bool | None = None) -> tf.Tensor:
            return self.norm(call(self.dense, x), training=training)

    layer = Layer()
    layer(_X)
    return layer


def _ordinary(layer: Any, x: tf.Tensor) -> tf.Tensor:
    return layer(x)


def _penalized(layer: Any, x: tf.Tensor) -> tf.Tensor:
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = tf.reduce_sum(layer(x) ** 2)
    return x * tf.reduce_sum(tape.gradient(y, x) ** 2)


def _forward_mode(layer: Any, x: tf.Tensor) -> tf.Tensor:
    with tf.autodiff.ForwardAccumulator(x, tf.ones_like(x)) as accumulator:
        y = layer(x)
    return y * accumulator.jvp(y)


@in_every_mode
@pytest.mark.parametrize("call", [_ordinary, _penalized, _forward_mode], ids=["own loop", "penalty", "forward mode"])
@for_every_keras()
def test_values_losses_and_gradients_are_those_of_the_plain_layer(keras: ModuleType, call: Any, mode: str) -> None:
    def trained(wrap: Wrap) -> list[Any]:
        layer = _layer(keras, call)
        called, weights = wrap(layer), [*map(of_tensorflow, layer.trainable_variables)]

        def step() -> list[tf.Tensor | None]:
            with tf.GradientTape() as tape:
                tape.watch(_X)
                y = called(_X, training=True)
                before = tf.add_n(called.losses)
                loss = tf.reduce_sum(y**3) + before
            grads = tape.gradient(loss, [_X, *weights])
            return [y, before, tf.add_n(called.losses), *grads]

        found = [None if each is None else tf.convert_to_tensor(each).numpy() for each in MODES[mode](step)()]
        assert [each is None for each in found] == [False] * len(found)
        return [*found, *values(layer)]

    assert_close(trained(tfmp.Recompute), trained(plain), 2e-4)


@in_every_mode
@for_every_keras()
@pytest.mark.usefixtures("same_rounding")
def test_nests_integers_booleans_and_options_pass_through(keras: ModuleType, mode: str) -> None:
    class ManyArguments(keras.layers.Layer):  # type: ignore[name-defined]
        def __init__(self) -> None:
            super().__init__(name="many")
            self.embedding, self.dense = keras.layers.Embedding(5, 4, "ones"), dense(keras, 4)
            self.drop = dropout(keras, 0.5)

        def call(self, pair: Any, ids: Any = None, *, scale: Any = 1.0, keep: Any = None, training: Any = None) -> Any:
            first, (second, _) = pair["first"], pair["second"]
            total = self.drop(self.dense(first), training=training) * scale + second
            total = total * tf.cast(keep, total.dtype)[:, None] + self.embedding(ids)
            return {"total": total, "ids": ids, "parts": (first, None)}

    def results(wrap: Wrap) -> list[Any]:
        keras.utils.set_random_seed(0)
        layer = ManyArguments()
        called = wrap(layer)
        ids, keep = tf.constant([1, 1, 4]), tf.constant([True, True, False])
        call = functools.partial(called, {"first": _X, "second": (2 * _X, ids)}, ids, scale=0.5, keep=keep)
        call()

        def compute() -> Any:
            with tf.GradientTape() as tape:
                tape.watch(_X)
                found = call(training=True)
                loss = tf.reduce_sum(found["total"] ** 2) + tf.reduce_sum(found["parts"][0])
            assert (type(found["parts"]), found["parts"][1]) == (tuple, None)
            grads = tape.gradient(loss, [_X, *map(of_tensorflow, layer.trainable_variables)])
            # That of the embedding.
            assert [type(grad) for grad in grads].count(tf.IndexedSlices) == 1
            return [found["total"], found["ids"], *map(tf.convert_to_tensor, grads)]

        return [each.numpy() for each in MODES[mode](compute)()]

    assert_close(results(tfmp.Recompute), results(plain), 1e-6)


@for_every_keras()
def test_without_a_tape_the_layer_is_called_once(keras: ModuleType) -> None:
    calls = list[str]()
    block = tfmp.Recompute(_layer(keras, lambda layer, x: calls.append("call") or layer(x)))
    block(_X)
    calls.clear()
    block(_X)
    assert calls == ["call"]


@for_every_keras("keras3")
def test_eager_code_keeps_no_activation_of_keras3(keras: ModuleType) -> None:
    def alive_after(wrap: Wrap) -> int:
        activations = []

        def call(layer: Any, x: tf.Tensor) -> tf.Tensor:
            y = layer(x)
            activations.extend([weakref.ref(y)] if tf.executing_eagerly() else [])
            return tf.exp(y)

        layer = wrap(_layer(keras, call))
        activations.clear()
        with tf.GradientTape() as tape:
            y = layer(_X, training=False)
        assert activations
        alive = sum(activation() is not None for activation in activations)
        assert tape.gradient(y, _X) is None
        return alive

    assert (alive_after(plain), alive_after(tfmp.Recompute)) == (1, 0)


@for_every_keras()
def test_gradients_in_a_function_read_no_activation_of_the_first_call(keras: ModuleType) -> None:
    def activations_read(wrap: Wrap) -> set[str]:
        block = wrap(keras.Sequential([keras.Input([4]), dense(keras, 4, "exponential"), dense(keras, 4, "tanh")]))
        first_call, backward = ops_of_a_gradient(block, tf.TensorSpec([2, 4]))
        computed = {op.name for op in first_call if op.type in {"MatMul", "BiasAdd", "AddV2", "Exp", "Tanh"}}
        return computed & {tensor.op.name for op in backward for tensor in op.inputs}

    assert activations_read(plain)
    # What is computed from the results is no part of the block.
    assert activations_read(tfmp.Recompute) == set()


@for_every_keras("keras3")
def test_second_derivatives_are_those_of_the_layer(keras: ModuleType) -> None:
    def second(wrap: Wrap) -> list[Any]:
        block = wrap(keras.Sequential([keras.Input([4]), dense(keras, 4, "tanh"), dense(keras, 1)]))
        # The last is a bias, on which the gradient of the inputs does not depend.
        sources = [_X, *map(of_tensorflow, block.trainable_variables[:-1])]
        with tf.GradientTape() as outer:
            outer.watch(_X)
            with tf.GradientTape() as tape:
                tape.watch(_X)
                y = block(_X)
            penalty = tf.reduce_sum(tape.gradient(y, _X) ** 2)
        return outer.gradient(penalty, sources)

    assert_close(second(tfmp.Recompute), second(plain), 1e-6)


@for_every_keras()
def test_gradient_of_a_captured_tensor_is_right_or_refused(keras: ModuleType) -> None:
    captured = tf.constant([2.0, 3.0, 4.0, 5.0])
    layer = tfmp.Recompute(_layer(keras, lambda layer, x: layer(x) * captured))

    def gradient() -> tf.Tensor:
        with tf.GradientTape() as tape:
            tape.watch(captured)
            y = layer(_X, training=False)
        return tape.gradient(y, captured)

    message = r"uses a tensor \(float32, shape \(4,\)\) that is not among its arguments"
    with pytest.raises(ValueError, match=message):
        tf.function(gradient)()
    if is_keras3(keras):
        with pytest.raises(ValueError, match=message):
            gradient()
    else:
        expected = tf.reduce_sum(layer(_X, training=False), 0) / captured
        np.testing.assert_allclose(gradient(), expected, rtol=1e-5)


@for_every_keras("keras3")
def test_numbers_drawn_without_a_seed_differ_from_step_to_step(keras: ModuleType) -> None:
    block = tfmp.Recompute(keras.layers.Lambda(lambda x: x + keras.random.normal([1])))
    with tf.GradientTape(persistent=True):
        assert float(block(tf.zeros([1]))[0]) != float(block(tf.zeros([1]))[0])


@for_every_keras("keras3")
def test_symbolic_results_have_the_types_and_shapes_of_the_layer(keras: ModuleType) -> None:
    class Raw(keras.layers.Layer):  # type: ignore[name-defined]
        """Computes by ops of TensorFlow, which do not cast."""

        def build(self, *_: Any) -> None:
            self.kernel = self.add_weight(name="kernel", shape=(8, 3))

        def call(self, pair: Any, scale: Any = None, *, mask: Any = None, negative: bool = False) -> Any:
            product = tf.matmul(pair["x"], tf.convert_to_tensor(self.kernel)) * scale
            parts = [-product if negative else product, tf.cast(pair["y"], "float32")]
            return {"parts": parts, "ids": tf.argmax(product)}

    def described(wrap: Wrap) -> list[Any]:
        x, y, scale = keras.Input([8]), keras.Input([1], dtype="float64"), keras.Input([3])
        results = wrap(Raw(dtype="mixed_float16"))({"x": x, "y": y}, scale, negative=True)
        called = keras.Model([x, y, scale], results)([tf.ones([2, 8]), tf.ones([2, 1]), tf.ones([2, 3])])
        return [
            keras.tree.map_structure(lambda each: (keras.backend.standardize_dtype(each.dtype), each.shape[1:]), nest)
            for nest in (results, called)
        ]

    assert described(tfmp.Recompute) == described(plain)
    assert described(plain)[0]["parts"][0] == ("float16", (3,))


@for_every_keras("keras2", "tf_keras")
def test_copies_are_independent(keras: ModuleType) -> None:
    # A copy of Dropout of Keras 2 has no state.
    block = tfmp.Recompute(stateful_block(keras, rate=0), name="mine", trainable=False)
    clone = type(block).from_config(block.get_config())
    assert (clone.name, clone.trainable, clone.layer is block.layer) == ("mine", False, False)
    block.trainable = True
    block(tf.ones([3, 8]))
    copied, before = copy.deepcopy(block), values(block)
    with tf.GradientTape() as tape:
        y = copied(tf.ones([3, 8]), training=True)
    tape.gradient(y, copied.trainable_variables)
    assert_close(values(block), before, 0)
    assert any(np.any(one != other) for one, other in zip(values(copied), before, strict=True))
