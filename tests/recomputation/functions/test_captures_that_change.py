"""What a recomputed function captures is found at each call, in eager code too."""

import functools
from collections.abc import Callable
from typing import Any

import keras
import pytest
import tensorflow as tf

import tfmp

Case = tuple[Callable[[tf.Tensor], tf.Tensor], Callable[[], None], Callable[[], Any]]
_GLOBAL: dict[str, Any] = {}


def _variable(weight: Any) -> tf.Variable:
    return weight if isinstance(weight, tf.Variable) else weight.value


def _closure() -> Case:
    """A tensor that is captured later."""
    factor: tf.Tensor | None = None

    def set_factor() -> None:
        nonlocal factor
        factor = tf.constant(3.0)

    return lambda x: tf.sin(x) if factor is None else tf.sin(x) * factor, set_factor, lambda: factor


def _untrainable_attribute() -> Case:
    module = tf.Module()
    module.bias = None

    def block(module: Any, x: tf.Tensor) -> tf.Tensor:
        return tf.tanh(x) if module.bias is None else tf.tanh(x + module.bias)

    def set_bias() -> None:
        module.bias = tf.Variable(0.5, trainable=False)

    return functools.partial(block, module), set_bias, lambda: module.bias


def _replaced_global() -> Case:
    _GLOBAL["w"] = tf.Variable(1.0)
    return lambda x: x**2 * _GLOBAL["w"], lambda: _GLOBAL.update(w=tf.Variable(2.0)), lambda: _GLOBAL["w"]


class _Model:
    scale: tf.Tensor = tf.constant(2.0)

    def block(self, x: tf.Tensor) -> tf.Tensor:
        return tf.exp(x) * self.scale


def _method() -> Case:
    model = _Model()
    return model.block, lambda: setattr(model, "scale", tf.constant(3.0)), lambda: model.scale


def _inner_function() -> Case:
    block, change, captured = _closure()
    inner = tfmp.recompute(block)
    return lambda x: tf.exp(inner(tf.exp(x))), change, captured


def _layer_that_is_unfrozen() -> Case:
    layer = keras.layers.Dense(1, use_bias=False, kernel_initializer="ones")
    layer.build([None, 1])
    layer.trainable = False

    def thaw() -> None:
        layer.trainable = True

    return lambda x: layer(x[:, None])[:, 0] ** 2, thaw, lambda: _variable(layer.kernel)


_CASES = [_closure, _untrainable_attribute, _replaced_global, _method, _inner_function, _layer_that_is_unfrozen]


@pytest.mark.parametrize("case", _CASES, ids=lambda case: case.__name__.strip("_"))
def test_gradient_reaches_what_is_captured_after_the_first_call(case: Callable[[], Case]) -> None:
    block, change, captured = case()
    recomputed, x = tfmp.recompute(block), tf.constant([1.0, 2.0])
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = recomputed(x)
    assert tape.gradient(y, x) is not None
    change()

    def gradients(function: Callable[[tf.Tensor], tf.Tensor]) -> list[list[float]]:
        with tf.GradientTape() as tape:
            tape.watch([x, captured()])
            y = function(x)
        return [tf.reshape(grad, [-1]).numpy().tolist() for grad in tape.gradient(y, [x, captured()])]

    for grad, expected in zip(gradients(recomputed), gradients(block), strict=True):
        assert grad == pytest.approx(expected, rel=1e-6)


def test_state_that_a_function_keeps_after_the_first_call_is_refused() -> None:
    rate = 0.0

    @tfmp.recompute
    def block(x: tf.Tensor) -> tf.Tensor:
        return tf.nn.dropout(x, rate) if rate else x

    with tf.GradientTape():
        block(tf.ones([2]))
        rate = 0.5
        with pytest.raises(ValueError, match=r"\(RandomUniform\) draws other random numbers"):
            block(tf.ones([2]))


def test_layer_that_is_built_by_a_later_call_is_trained() -> None:
    layers: list[Any] = []
    recomputed = tfmp.recompute(lambda x: layers[0](x) if layers else x * 2.0)
    with tf.GradientTape() as tape:
        recomputed(tf.ones([1, 2]))
        layers.append(keras.layers.Dense(1, kernel_initializer="ones"))
        y = recomputed(tf.ones([1, 2]))
    assert tape.gradient(y, _variable(layers[0].kernel)).numpy().tolist() == [[1.0], [1.0]]
