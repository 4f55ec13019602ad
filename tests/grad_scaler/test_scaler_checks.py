"""How often a scaler reads gradients: once, wherever they are checked."""

import math
from collections.abc import Callable

import pytest
import tensorflow as tf

import tfmp
from tfmp.types import Gradients


class _Recorder(tfmp.NonFiniteDetector):
    """Keeps how many gradients it read at each check."""

    def __init__(self) -> None:
        self.read: list[int] = []

    def all_finite(self, grads: Gradients, loss_scale: tf.Tensor) -> tf.Tensor:
        self.read.append(sum(grad is not None for grad in grads))
        return super().all_finite(grads, loss_scale)


class _Loop:
    def __init__(self) -> None:
        self.detector = _Recorder()
        self.scaler = tfmp.GradScaler(8, overflow_detector=self.detector)
        self.optimizer = tf.compat.v1.train.GradientDescentOptimizer(1.0)
        self.weights = [tf.Variable(0.0), tf.Variable(0.0), tf.Variable([0.0, 0.0])]

    def unscale(self, first: float = 8.0) -> list:
        rows = tf.IndexedSlices(tf.constant([16.0]), tf.constant([1]), tf.constant([2]))
        return self.scaler.unscale(self.optimizer, [tf.constant(first), None, rows])

    def step(self, grads: Gradients) -> None:
        self.scaler.step(self.optimizer, zip(grads, self.weights, strict=True))
        self.scaler.update()

    def values(self) -> list:
        return [weight.numpy().tolist() for weight in self.weights]


def test_gradients_that_nobody_unscaled_are_read_once() -> None:
    loop = _Loop()
    loop.step([tf.constant(8.0), None, tf.constant([0.0, 16.0])])
    assert loop.detector.read == [2]
    assert loop.values() == [-1, 0, [0, -2]]


def test_unscaled_gradients_that_reach_the_step_unchanged_are_not_read_again() -> None:
    loop = _Loop()
    grads = loop.unscale()
    assert loop.detector.read == [2]
    loop.step(grads)
    assert loop.detector.read == [2]
    assert loop.values() == [-1, 0, [0, -2]]


def test_gradients_that_were_changed_since_are_read_once_and_the_others_not() -> None:
    loop = _Loop()
    first, none, rows = loop.unscale()
    loop.step([first * 2, none, rows])
    assert loop.detector.read == [2, 1]
    assert loop.values() == [-2, 0, [0, -2]]
    clipped, norm = tf.clip_by_global_norm([each for each in loop.unscale() if each is not None], 1e6)
    assert math.isfinite(norm)
    loop.step([clipped[0], None, clipped[1]])
    assert loop.detector.read == [2, 1, 2, 2]


@pytest.mark.parametrize("change", [lambda grad: grad, tf.zeros_like], ids=["unchanged", "zeroed"])
def test_overflow_that_was_found_skips_the_step_whatever_becomes_of_the_gradient(
    change: Callable[[tf.Tensor], tf.Tensor],
) -> None:
    loop = _Loop()
    first, none, rows = loop.unscale(math.inf)
    loop.step([change(first), none, rows])
    assert loop.values() == [0, 0, [0, 0]]
    assert float(loop.scaler.loss_scale) == 4


def test_overflow_that_the_user_brings_in_skips_the_step() -> None:
    loop = _Loop()
    first, none, rows = loop.unscale()
    loop.step([first * math.inf, none, rows])
    assert loop.values() == [0, 0, [0, 0]]
    assert float(loop.scaler.loss_scale) == 4


def test_function_reads_unchanged_gradients_once_and_changed_ones_again() -> None:
    loop = _Loop()

    @tf.function
    def iterate(factor: tf.Tensor) -> None:
        first, none, rows = loop.unscale()
        loop.step([first * factor, none, rows])

    iterate(tf.constant(2.0))
    iterate(tf.constant(math.nan))
    # Both calls run one trace.
    assert loop.detector.read == [2, 1]
    assert loop.values() == [-2, 0, [0, -2]]
