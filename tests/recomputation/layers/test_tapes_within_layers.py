"""Tapes that a layer opens itself, and tapes around a layer that watch what the layer captures, with every Keras."""

import functools
import weakref
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from kerases import for_every_keras

import tfmp

_X = tf.constant([[0.2, 0.4], [-0.3, 0.1]])

_WAYS = pytest.mark.parametrize(
    "way",
    [lambda step: step, tf.function, functools.partial(tf.function, jit_compile=True)],
    ids=["eager", "function", "xla"],
)


def _layer(keras: ModuleType, call: Callable[[Any, tf.Tensor], tf.Tensor]) -> Any:
    """Return a layer with a Dense layer and BatchNormalization, of which the function makes the results."""

    class Layer(keras.layers.Layer):  # type: ignore[name-defined, misc]
        def __init__(self) -> None:
            super().__init__()
            self.dense = keras.layers.Dense(2, "tanh", kernel_initializer=keras.initializers.GlorotUniform(seed=1))
            self.norm = keras.layers.BatchNormalization(momentum=0.5)

        def call(self, x: tf.Tensor, training: bool | None = None) -> tf.Tensor:
            return self.norm(call(self.dense, x), training=training)

    layer = Layer()
    layer(_X)
    return layer


def _penalized(dense: Any, x: tf.Tensor) -> tf.Tensor:
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = tf.reduce_sum(dense(x) ** 2)
    return x * tf.reduce_sum(tape.gradient(y, x) ** 2)


def _forward_mode(dense: Any, x: tf.Tensor) -> tf.Tensor:
    with tf.autodiff.ForwardAccumulator(x, tf.ones_like(x)) as accumulator:
        y = dense(x)
    return y * accumulator.jvp(y)


@_WAYS
@pytest.mark.parametrize("call", [_penalized, _forward_mode], ids=["penalty", "forward_mode"])
@for_every_keras()
def test_values_and_gradients_are_those_of_the_plain_layer(keras: ModuleType, call: Any, way: Any) -> None:
    def trained(wrap: Callable[[Any], Any]) -> list[np.ndarray]:
        layer = _layer(keras, call)
        called = wrap(layer)
        weights = [getattr(weight, "value", weight) if keras.__version__ >= "3" else weight for weight in layer.weights]

        def step() -> list[tf.Tensor | None]:
            with tf.GradientTape() as tape:
                tape.watch(_X)
                y = called(_X, training=True)
                loss = tf.reduce_sum(y**3)
            return [y, *tape.gradient(loss, [_X, weights[0]])]

        values = [tf.convert_to_tensor(each).numpy() for each in way(step)()]
        return [*values, *(weight.numpy() for weight in weights)]

    for each, other in zip(trained(lambda layer: layer), trained(tfmp.Recompute), strict=True):
        np.testing.assert_allclose(other, each, rtol=2e-4, atol=1e-5)


@for_every_keras("keras3")
def test_eager_code_keeps_no_activation_of_keras3(keras: ModuleType) -> None:
    def alive_after(wrap: Callable[[Any], Any]) -> int:
        activations = []

        def call(dense: Any, x: tf.Tensor) -> tf.Tensor:
            y = dense(x)
            if tf.executing_eagerly():
                activations.append(weakref.ref(y))
            return tf.exp(y)

        layer = wrap(_layer(keras, call))
        activations.clear()
        with tf.GradientTape() as tape:
            y = layer(_X, training=False)
        assert activations
        alive = sum(activation() is not None for activation in activations)
        assert tape.gradient(y, _X) is None
        return alive

    assert (alive_after(lambda layer: layer), alive_after(tfmp.Recompute)) == (1, 0)


@for_every_keras()
def test_gradient_of_a_captured_tensor_is_right_or_refused(keras: ModuleType) -> None:
    captured = tf.constant([2.0, 3.0])
    layer = tfmp.Recompute(_layer(keras, lambda dense, x: dense(x) * captured))

    def gradient() -> tf.Tensor:
        with tf.GradientTape() as tape:
            tape.watch(captured)
            y = layer(_X, training=False)
        return tape.gradient(y, captured)

    message = r"uses a tensor \(float32, shape \(2,\)\) that is not among its arguments"
    with pytest.raises(ValueError, match=message):
        tf.function(gradient)()
    if keras.__version__ >= "3":
        with pytest.raises(ValueError, match=message):
            gradient()
    else:
        expected = tf.reduce_sum(layer(_X, training=False), 0) / captured
        np.testing.assert_allclose(gradient(), expected, rtol=1e-5)


@pytest.mark.parametrize("way", [lambda step: step, tf.function], ids=["eager", "function"])
@for_every_keras()
def test_frozen_weights_are_no_captured_tensors(keras: ModuleType, way: Any) -> None:
    block = _layer(keras, lambda dense, x: dense(x))
    layer = tfmp.Recompute(block, trainable=False)
    block.trainable = False

    def gradient() -> tf.Tensor:
        with tf.GradientTape() as tape:
            tape.watch(_X)
            y = layer(_X, training=True)
        return tape.gradient(y, _X)

    with tf.GradientTape() as tape:
        tape.watch(_X)
        y = block(_X, training=True)
    np.testing.assert_allclose(way(gradient)(), tape.gradient(y, _X), rtol=1e-5)
