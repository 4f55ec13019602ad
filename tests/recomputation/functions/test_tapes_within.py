"""Tapes that a recomputed function opens itself, as a gradient penalty does."""

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import tfmp

_KERNEL = [[0.3, -0.2], [0.5, 0.7]]
_INPUT = [[0.2, 0.4], [-0.3, 0.1]]
_W = tf.Variable(_KERNEL)
_X = tf.constant(_INPUT)


def _eager(function: Callable[..., Any]) -> Callable[..., Any]:
    return function


_WAYS = pytest.mark.parametrize(
    "way", [_eager, tf.function, functools.partial(tf.function, jit_compile=True)], ids=["eager", "function", "xla"]
)


def _penalty_of_the_input(x: tf.Tensor) -> tf.Tensor:
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = tf.reduce_sum(tf.tanh(x @ _W))
    return tf.reduce_sum(tape.gradient(y, x) ** 2)


def _penalty_of_the_variable(x: tf.Tensor) -> tf.Tensor:
    with tf.GradientTape(persistent=True) as tape:
        y = tf.tanh(x @ _W)
        z = tf.reduce_sum(y**2)
    return tf.reduce_sum(tape.gradient(z, _W) ** 2) + tf.reduce_sum(tape.gradient(y, _W))


def _tape_of_a_tape(x: tf.Tensor) -> tf.Tensor:
    with tf.GradientTape() as outer:
        outer.watch(x)
        with tf.GradientTape() as inner:
            inner.watch(x)
            y = tf.reduce_sum(tf.tanh(x @ _W))
        slope = inner.gradient(y, x)
    return tf.reduce_sum(outer.gradient(slope, x) * slope)


def _forward_mode(x: tf.Tensor) -> tf.Tensor:
    with tf.autodiff.ForwardAccumulator(x, tf.ones_like(x)) as accumulator:
        y = tf.tanh(x @ _W)
    return tf.reduce_sum(y * accumulator.jvp(y))


@tf.custom_gradient
def _square(x: tf.Tensor) -> tuple[tf.Tensor, Callable[[tf.Tensor], tf.Tensor]]:
    return x**2, lambda upstream: upstream * 7.0 * tf.sin(x)


def _tape_around_a_custom_gradient(x: tf.Tensor) -> tf.Tensor:
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = _square(x @ _W)
    return tf.reduce_sum(tape.gradient(y, x) * x)


@_WAYS
@pytest.mark.parametrize(
    "block",
    [
        _penalty_of_the_input,
        _penalty_of_the_variable,
        _tape_of_a_tape,
        _forward_mode,
        _tape_around_a_custom_gradient,
    ],
    ids=lambda block: block.__name__.strip("_"),
)
def test_values_and_gradients_are_those_of_the_plain_function(way: Any, block: Callable[..., tf.Tensor]) -> None:
    def gradients(block: Callable[..., tf.Tensor], x: tf.Tensor) -> list[tf.Tensor]:
        with tf.GradientTape(persistent=True) as second:
            second.watch(x)
            with tf.GradientTape() as tape:
                tape.watch(x)
                y = block(x)
            grads = tape.gradient(y, [x, _W])
            norm = tf.reduce_sum(grads[0] ** 2)
        return [y, *grads, second.gradient(norm, x)]

    plain = way(functools.partial(gradients, block))(_X)
    recomputed = way(functools.partial(gradients, tfmp.recompute(block)))(_X)
    for each, other in zip(plain, recomputed, strict=True):
        np.testing.assert_allclose(tf.convert_to_tensor(other), tf.convert_to_tensor(each), rtol=1e-4, atol=1e-5)


@_WAYS
def test_no_tape_outside_is_needed(way: Any) -> None:
    value = way(tfmp.recompute(_penalty_of_the_input))(_X)
    np.testing.assert_allclose(value, _penalty_of_the_input(_X), rtol=1e-6)


def test_gradients_of_tf1_graphs_are_those_of_the_plain_function() -> None:
    def gradients(wrap: Callable[..., Any]) -> list[np.ndarray]:
        with tf.Graph().as_default(), tf.compat.v1.Session() as session:
            x = tf.constant(_INPUT)
            w = tf.compat.v1.get_variable("w", initializer=_KERNEL, use_resource=True)

            def block(x: tf.Tensor) -> tf.Tensor:
                y = tf.reduce_sum(tf.tanh(x @ w))
                return tf.reduce_sum(tf.gradients(y, x)[0] ** 2)

            y = wrap(block)(x)
            grads = tf.gradients(y, [x, w])
            session.run(tf.compat.v1.global_variables_initializer())
            return session.run([y, *grads])

    for each, other in zip(gradients(_eager), gradients(tfmp.recompute), strict=True):
        np.testing.assert_allclose(other, each, rtol=1e-5)
