"""Every front-end refuses complex gradients by name, and trains the real variables that the error advises."""

import importlib
from collections.abc import Callable
from typing import Any

import kerases
import numpy as np
import pytest
import tensorflow as tf

import tfmp

_OF_PHASE = r"the gradient of .*phase.* is of type complex64, and loss scaling is for real numbers: train the real"
_OF_ONE = r"gradient 0 is of type complex64, and loss scaling is for real numbers: train the real"


def _loss(value: tf.Tensor) -> tf.Tensor:
    return tf.reduce_sum(tf.abs(value) ** 2)


def _sgd(host: str) -> Any:
    if host == "tf1":
        return tf.compat.v1.train.GradientDescentOptimizer(0.25)
    return kerases.installed()[host].optimizers.SGD(0.25)


def _minimize(host: str, variables: list[tf.Variable], loss: Callable[[], tf.Tensor]) -> None:
    tfmp.LossScaleOptimizer(_sgd(host), tfmp.FixedLossScaleManager(8)).minimize(loss, var_list=variables)


def _apply_gradients(host: str, variables: list[tf.Variable], loss: Callable[[], tf.Tensor]) -> None:
    opt = tfmp.LossScaleOptimizer(_sgd(host), tfmp.FixedLossScaleManager(8))
    with tf.GradientTape() as tape:
        scaled = loss() * 8
    grads = tape.gradient(scaled, variables)
    if host == "tf1":
        grads = [grad / 8 for grad in grads]
    elif host != "keras3":
        grads = opt.get_unscaled_gradients(grads) if grads[0].dtype.is_floating else grads
    opt.apply_gradients(zip(grads, variables, strict=True))


def _scaler_step(host: str, variables: list[tf.Variable], loss: Callable[[], tf.Tensor]) -> None:
    scaler, optimizer = tfmp.GradScaler(8), _sgd(host)
    with tf.GradientTape() as tape:
        scaled = scaler.scale(loss())
    scaler.step(optimizer, zip(tape.gradient(scaled, variables), variables, strict=True))


_WAYS = [_minimize, _apply_gradients, _scaler_step]


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "function"])
@pytest.mark.parametrize("way", _WAYS)
@pytest.mark.parametrize("host", ["tf1", *kerases.installed()])
def test_complex_variable_is_refused_by_name_and_its_parts_are_trained(host: str, way: Any, compiled: bool) -> None:
    phase = tf.Variable(tf.constant([1 + 2j], tf.complex64), name="phase")
    parts = [tf.Variable([1.0]), tf.Variable([2.0])]
    run = tf.function(way) if compiled else way
    with pytest.raises(TypeError, match=_OF_PHASE):
        run(host, [phase], lambda: _loss(phase))
    assert phase.numpy().tolist() == [1 + 2j]
    if not compiled:
        run(host, parts, lambda: _loss(tf.complex(*parts)))
        assert [part.numpy().tolist() for part in parts] == [[0.5], [1.0]]


@pytest.mark.parametrize("host", kerases.installed())
def test_complex_gradients_are_refused_when_they_are_unscaled(host: str) -> None:
    grads = [tf.constant([1j], tf.complex64)]
    with pytest.raises(TypeError, match=_OF_ONE):
        tfmp.LossScaleOptimizer(_sgd(host), tfmp.FixedLossScaleManager(8)).get_unscaled_gradients(grads)
    with pytest.raises(TypeError, match=_OF_ONE):
        tfmp.GradScaler(8).unscale(_sgd(host), grads)
    with pytest.raises(TypeError, match=_OF_ONE):
        tfmp.GradientAccumulator([tf.Variable([1j], dtype=tf.complex64)], 2).add(grads)


@pytest.mark.parametrize("host", kerases.installed())
def test_fit_names_the_complex_weight_of_a_layer(host: str) -> None:
    layers = importlib.import_module(kerases.installed()[host].__name__).layers

    class Rotation(layers.Layer):  # type: ignore[name-defined, misc] # one of two packages
        def build(self, shape: Any) -> None:
            del shape

            def initial(*_: Any, **__: Any) -> tf.Tensor:
                return tf.constant([1 + 2j], tf.complex64)

            self.phase = self.add_weight(name="phase", shape=[1], dtype="complex64", initializer=initial)

        def call(self, inputs: tf.Tensor) -> tf.Tensor:
            return tf.abs(tf.convert_to_tensor(self.phase)) * inputs

    model = kerases.installed()[host].Sequential([Rotation()])
    model.compile(tfmp.LossScaleOptimizer(_sgd(host), tfmp.FixedLossScaleManager(8)), "mse")
    ones = np.ones([2, 1], np.float32)
    with pytest.raises(TypeError, match=_OF_PHASE):
        model.fit(ones, ones, verbose=0)


def test_scaler_that_is_not_enabled_trains_complex_variables() -> None:
    host = next(iter(kerases.installed()))
    scaler, optimizer = tfmp.GradScaler(enabled=False), _sgd(host)
    phase = tf.Variable(tf.constant([1 + 2j], tf.complex64), name="phase")
    grads = scaler.unscale(optimizer, [tf.constant([4j], tf.complex64)])
    scaler.step(optimizer, zip(grads, [phase], strict=True))
    scaler.update()
    assert phase.numpy().tolist() == [1 + 1j]
