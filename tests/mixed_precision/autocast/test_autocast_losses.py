"""Losses that are written by hand train in a scope as they do in float32: at their ends, nothing overflows for ever."""

import contextlib
import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from kerases import for_every_keras

import tfmp

_BATCH, _CLASSES, _STEPS = 16, 4, 25
_EPSILON = 1e-7

_Loss = Callable[[tf.Tensor, tf.Tensor], tf.Tensor]


def _cross_entropy(z: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
    return -tf.reduce_mean(tf.reduce_sum(y * tf.math.log(tf.nn.softmax(z) + _EPSILON), 1))


def _cross_entropy_of_clipped(z: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
    p = tf.clip_by_value(tf.nn.softmax(z), _EPSILON, 1 - _EPSILON)
    return -tf.reduce_mean(tf.reduce_sum(y * tf.math.log(p), 1))


def _softmax_by_hand(z: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
    shifted = tf.exp(z - tf.reduce_max(z, 1, keepdims=True))
    p = shifted / tf.reduce_sum(shifted, 1, keepdims=True)
    return -tf.reduce_mean(tf.math.log(tf.reduce_sum(p * y, 1) + _EPSILON))


def _kl(z: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
    target = y * 0.9 + 0.1 / _CLASSES
    log_p = tf.math.log(tf.nn.softmax(z) + _EPSILON)
    return tf.reduce_mean(tf.reduce_sum(target * (tf.math.log(target) - log_p), 1))


def _focal(z: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
    p = tf.nn.softmax(z)
    return -tf.reduce_mean(tf.reduce_sum(y * (1 - p) ** 2 * tf.math.log(p + _EPSILON), 1))


def _entropy_penalty(z: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
    p = tf.nn.softmax(z)
    entropy = -tf.reduce_sum(p * tf.math.log(p + _EPSILON), 1)
    return tf.reduce_mean(tf.nn.softmax_cross_entropy_with_logits(y, z)) - 0.1 * tf.reduce_mean(entropy)


def _binary_cross_entropy(z: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
    p = tf.sigmoid(z)
    return -tf.reduce_mean(y * tf.math.log(p + _EPSILON) + (1 - y) * tf.math.log(1 - p + _EPSILON))


def _binary_cross_entropy_of_clipped(z: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
    p = tf.clip_by_value(tf.sigmoid(z), _EPSILON, 1 - _EPSILON)
    return -tf.reduce_mean(tf.where(y > 0, tf.math.log(p), tf.math.log1p(-p)))


def _binary_focal(z: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
    p = tf.reshape(tf.nn.sigmoid(z), [-1])
    y = tf.reshape(y, [-1])
    p_true = y * p + (1 - y) * (1 - p)
    return -tf.reduce_mean((1 - p_true) ** 2 * tf.math.log(tf.maximum(p_true, _EPSILON)))


def _dice(z: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
    p = tf.sigmoid(z)
    return -tf.math.log((2 * tf.reduce_sum(p * y) + 1e-5) / (tf.reduce_sum(p + y) + 1e-5))


def _log_density_of_tanh(z: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
    return tf.reduce_mean((tf.tanh(z) - (2 * y - 1)) ** 2 - 0.01 * tf.math.log(1 - tf.tanh(z) ** 2 + _EPSILON))


def _softplus_hinge(z: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
    return tf.reduce_mean(tf.nn.softplus(1 - (2 * y - 1) * z))


def _log_cosh(z: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
    error = z - y
    return tf.reduce_mean(error + tf.nn.softplus(-2 * error) - tf.math.log(2.0)) + tf.reduce_mean(
        tf.math.log(tf.cosh(error))
    )


def _huber(z: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
    error = tf.abs(z - y)
    return tf.reduce_mean(tf.where(error < 1, 0.5 * tf.square(error), error - 0.5))


def _charbonnier(z: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
    return tf.reduce_mean(tf.sqrt((z - y) ** 2 + 1e-12))


def _cosine(z: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
    norms = tf.norm(z, axis=1) * tf.norm(y, axis=1)
    return 1 - tf.reduce_mean(tf.reduce_sum(z * y, 1) / (norms + _EPSILON))


def _contrastive(z: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
    unit = tf.nn.l2_normalize(z, 1)
    similarity = tf.matmul(unit, unit, transpose_b=True) / 0.05
    same = tf.matmul(y, y, transpose_b=True)
    positive = tf.reduce_logsumexp(similarity + tf.math.log(same + _EPSILON), 1)
    return tf.reduce_mean(tf.reduce_logsumexp(similarity, 1) - positive)


def _poisson(z: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
    rate = tf.exp(z / 8)
    return tf.reduce_mean(rate - 3 * y * tf.math.log(rate + _EPSILON))


def _gaussian(z: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
    mean, deviation = z[:, :2] / 8, tf.nn.softplus(z[:, 2:] / 8) + 0.3
    return tf.reduce_mean(tf.math.log(deviation) + 0.5 * tf.square((y[:, :2] - mean) / deviation))


def _ctc(z: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
    frames = tf.reshape(z, [4, _BATCH // 4, _CLASSES])
    labels = tf.reshape(tf.argmax(y[: _BATCH // 2, 1:], 1, tf.int32) + 1, [4, 2])
    return tf.reduce_mean(tf.nn.ctc_loss(labels, frames, [1] * 4, [4] * 4, blank_index=0))


_LOSSES: dict[str, _Loss] = {
    "cross_entropy": _cross_entropy,
    "cross_entropy_of_clipped": _cross_entropy_of_clipped,
    "softmax_by_hand": _softmax_by_hand,
    "kl": _kl,
    "focal": _focal,
    "entropy_penalty": _entropy_penalty,
    "binary_cross_entropy": _binary_cross_entropy,
    "binary_cross_entropy_of_clipped": _binary_cross_entropy_of_clipped,
    "binary_focal": _binary_focal,
    "dice": _dice,
    "log_density_of_tanh": _log_density_of_tanh,
    "softplus_hinge": _softplus_hinge,
    "log_cosh": _log_cosh,
    "huber": _huber,
    "charbonnier": _charbonnier,
    "cosine": _cosine,
    "contrastive": _contrastive,
    "poisson": _poisson,
    "gaussian": _gaussian,
    "ctc": _ctc,
}
_EACH_LOSS = pytest.mark.parametrize("name", list(_LOSSES))


def _problem(saturation: float = 1.0) -> tuple[tf.Tensor, tf.Tensor, list[tf.Variable]]:
    """Return inputs, labels, and the weights of a net whose wrong answers are sure of themselves."""
    random = np.random.default_rng(5)
    x = np.float32(random.normal(size=[_BATCH, 6]))
    y = np.eye(_CLASSES, dtype=np.float32)[np.argmax(x[:, :_CLASSES], 1)]
    w, u = np.float32(random.normal(size=[6, 8])), np.float32(random.normal(size=[8, _CLASSES]))
    return tf.constant(x), tf.constant(y), [tf.Variable(w), tf.Variable(saturation * u), tf.Variable(y[0] * 0)]


def _loss(name: str, x: tf.Tensor, y: tf.Tensor, weights: list[tf.Variable]) -> tf.Tensor:
    return _LOSSES[name](tf.nn.elu(x @ weights[0]) @ weights[1] + weights[2], y)


def _gradients(name: str, dtype: str | None, scale: float = 1.0) -> tuple[tf.Tensor, list[tf.Tensor]]:
    x, y, weights = _problem(saturation=3.0)
    return _gradients_of(name, dtype, x, y, weights, scale)


def _gradients_of(name: str, dtype: str | None, x: Any, y: Any, weights: Any, scale: float) -> Any:
    with tf.GradientTape() as tape:
        tape.watch(weights)
        with tfmp.autocast(dtype or "float16", enabled=dtype is not None):
            loss = _loss(name, x, y, weights)
        scaled = loss * scale
    return loss, [grad / scale for grad in tape.gradient(scaled, weights)]


def _trained(name: str, dtype: str | None, step_with: Callable[..., Any], scaler: Any) -> float:
    """Return the loss after some steps."""
    x, y, weights = _problem()
    optimizer = tf.compat.v1.train.GradientDescentOptimizer(0.05)

    @tf.function(autograph=False)
    def step() -> tf.Tensor:
        with tf.GradientTape() as tape:
            with tfmp.autocast(dtype or "float16", enabled=dtype is not None):
                loss = _loss(name, x, y, weights)
            scaled = scaler.scale(loss) if scaler is not None else loss
        step_with(optimizer, list(zip(tape.gradient(scaled, weights), weights, strict=True)))
        return loss

    losses = [float(step()) for _ in range(_STEPS)]
    assert losses[-1] < losses[0]
    return losses[-1]


@functools.cache
def _trained_in_float32(name: str) -> float:
    return _trained(name, None, lambda optimizer, grads: optimizer.apply_gradients(grads), None)


@pytest.mark.parametrize(
    ("name", "dtype"), [(name, "float16") for name in _LOSSES] + [("cross_entropy", "bfloat16"), ("ctc", "bfloat16")]
)
def test_loss_trains_as_in_float32(name: str, dtype: str) -> None:
    scaler = tfmp.GradScaler(init_scale=2.0**8)

    def step(optimizer: Any, grads: Any) -> None:
        scaler.step(optimizer, grads)
        scaler.update()

    loss = _trained(name, dtype, step, scaler)
    assert loss == pytest.approx(_trained_in_float32(name), rel=3e-2 if dtype == "float16" else 0.1, abs=2e-3)
    assert int(scaler.skipped_steps) == 0
    assert float(scaler.loss_scale) == 2**8


@pytest.mark.parametrize("name", ["cross_entropy", "binary_cross_entropy", "focal", "ctc"])
def test_loss_trains_with_a_wrapped_optimizer(name: str) -> None:
    x, y, weights = _problem()
    optimizer = tfmp.LossScaleOptimizer(tf.compat.v1.train.GradientDescentOptimizer(0.05))

    @tf.function(autograph=False)
    def step() -> tf.Tensor:
        def loss() -> tf.Tensor:
            with tfmp.autocast():
                return _loss(name, x, y, weights)

        optimizer.apply_gradients(optimizer.compute_gradients(loss, weights))
        return loss()

    for _ in range(_STEPS + 8):
        loss = float(step())
        if int(optimizer.applied_steps) == _STEPS - 1:
            break
    assert int(optimizer.skipped_steps) <= 8
    assert loss == pytest.approx(_trained_in_float32(name), rel=3e-2, abs=2e-3)


@_EACH_LOSS
def test_gradients_where_the_net_is_sure_and_wrong_are_those_of_float32(name: str) -> None:
    loss, grads = _gradients(name, "float16", 2.0**6)
    known_loss, known = _gradients(name, None)
    assert loss.dtype == tf.float32
    assert float(loss) == pytest.approx(float(known_loss), rel=1e-2, abs=1e-3)
    found, expected = (np.concatenate([np.ravel(grad) for grad in each]) for each in (grads, known))
    assert np.linalg.norm(found - expected) < 3e-2 * np.linalg.norm(expected) + 1e-4


def test_gradients_within_xla_are_those_of_float32() -> None:
    x, y, weights = _problem(saturation=3.0)
    names = ["cross_entropy", "kl", "focal", "binary_cross_entropy", "log_density_of_tanh", "contrastive"]

    @tf.function(jit_compile=True, autograph=False)
    def compute(x: tf.Tensor, y: tf.Tensor, weights: list[tf.Tensor]) -> Any:
        return [_gradients_of(name, "float16", x, y, weights, 2.0**6)[1] for name in names]

    for name, grads in zip(names, compute(x, y, [tf.convert_to_tensor(each) for each in weights]), strict=True):
        expected = _gradients(name, None)[1]
        for grad, known in zip(grads, expected, strict=True):
            assert np.linalg.norm(grad - known) < 3e-2 * np.linalg.norm(known) + 1e-4, name


_OF_KERAS: dict[str, Callable[..., Any]] = {
    "categorical": lambda keras, z, y: keras.losses.CategoricalCrossentropy()(y, tf.nn.softmax(z)),
    "sparse": lambda keras, z, y: keras.losses.SparseCategoricalCrossentropy()(tf.argmax(y, 1), tf.nn.softmax(z)),
    "binary": lambda keras, z, y: keras.losses.BinaryCrossentropy()(y, tf.sigmoid(z)),
    "binary focal": lambda keras, z, y: keras.losses.BinaryFocalCrossentropy()(y, tf.sigmoid(z)),
    "kl": lambda keras, z, y: keras.losses.KLDivergence()(y, tf.nn.softmax(z)),
    "poisson": lambda keras, z, y: keras.losses.Poisson()(y, tf.nn.softplus(z)),
    "log cosh": lambda keras, z, y: keras.losses.LogCosh()(y, z),
    "cosine": lambda keras, z, y: keras.losses.CosineSimilarity()(y, z),
    "huber": lambda keras, z, y: keras.losses.Huber()(y, z),
    "layer of probabilities": lambda keras, z, y: keras.losses.CategoricalCrossentropy()(
        y, keras.layers.Activation("softmax")(z)
    ),
    "layer of gates": lambda keras, z, y: keras.losses.BinaryCrossentropy()(y, keras.layers.Activation("sigmoid")(z)),
}


@for_every_keras()
@pytest.mark.parametrize("name", list(_OF_KERAS))
def test_losses_of_keras_on_probabilities_have_finite_gradients(keras: ModuleType, name: str) -> None:
    x, y, weights = _problem(saturation=3.0)

    def gradients(scope: Any) -> list[np.ndarray]:
        with tf.GradientTape() as tape, scope:
            loss = _OF_KERAS[name](keras, tf.nn.elu(x @ weights[0]) @ weights[1] + weights[2], y)
        return [np.array(grad) for grad in tape.gradient(loss, weights)]

    found, known = gradients(tfmp.autocast()), gradients(contextlib.nullcontext())
    for grad, expected in zip(found, known, strict=True):
        assert np.linalg.norm(grad - expected) < 3e-2 * np.linalg.norm(expected) + 1e-4
