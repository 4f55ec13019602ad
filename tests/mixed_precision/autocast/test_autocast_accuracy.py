"""Losses that are written by hand, and those of TensorFlow 1 and Keras, have the gradients of float32.

At the ends of nets, nothing overflows for ever.
"""

from collections.abc import Callable
from typing import Any

import pytest
import tensorflow as tf
from autocast_ways import Case, assert_case, compute_case, values_of
from kerases import installed

import tfmp

_EPSILON = 1e-7

_Loss = Callable[[tf.Tensor, tf.Tensor], tf.Tensor]


def _log(p: Any) -> tf.Tensor:
    return tf.math.log(p + _EPSILON)


def _clipped(p: tf.Tensor) -> tf.Tensor:
    return tf.clip_by_value(p, _EPSILON, 1 - _EPSILON)


def _softmax_by_hand(z: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
    shifted = tf.exp(z - tf.reduce_max(z, 1, keepdims=True))
    p = shifted / tf.reduce_sum(shifted, 1, keepdims=True)
    return -_log(tf.reduce_sum(p * y, 1))


def _binary_focal(z: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
    p = tf.sigmoid(z)
    p_true = y * p + (1 - y) * (1 - p)
    return -((1 - p_true) ** 2) * tf.math.log(tf.maximum(p_true, _EPSILON))


def _contrastive(z: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
    unit = tf.nn.l2_normalize(z, 1)
    similarity = tf.matmul(unit, unit, transpose_b=True) / 0.05
    positive = tf.reduce_logsumexp(similarity + _log(tf.matmul(y, y, transpose_b=True)), 1)
    return tf.reduce_logsumexp(similarity, 1) - positive


def _ctc(z: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
    frames = tf.reshape(z, [4, 2, 4])
    labels = tf.reshape(tf.argmax(y[:4, 1:], 1, tf.int32) + 1, [2, 2])
    return tf.nn.ctc_loss(labels, frames, [1] * 2, [4] * 2, blank_index=0)


#: Losses of logits and labels, whose mean is taken.
_LOSSES: dict[str, _Loss] = {
    "cross_entropy": lambda z, y: -tf.reduce_sum(y * _log(tf.nn.softmax(z)), 1),
    "cross_entropy_of_clipped": lambda z, y: -tf.reduce_sum(y * tf.math.log(_clipped(tf.nn.softmax(z))), 1),
    "softmax_by_hand": _softmax_by_hand,
    "kl": lambda z, y: tf.reduce_sum((0.9 * y + 0.025) * (_log(0.9 * y + 0.025) - _log(tf.nn.softmax(z))), 1),
    "focal": lambda z, y: -tf.reduce_sum(y * (1 - tf.nn.softmax(z)) ** 2 * _log(tf.nn.softmax(z)), 1),
    "binary_cross_entropy": lambda z, y: -(y * _log(tf.sigmoid(z)) + (1 - y) * _log(1 - tf.sigmoid(z))),
    "binary_focal": _binary_focal,
    "contrastive": _contrastive,
    "ctc": _ctc,
}

_V1 = tf.compat.v1.losses
_OF_TENSORFLOW_1: dict[str, _Loss] = {
    **{
        name: lambda z, y, name=name: getattr(_V1, name)(y, z)  # type: ignore[misc] # the default argument
        for name in ("huber_loss", "mean_pairwise_squared_error", "sigmoid_cross_entropy", "softmax_cross_entropy")
    },
    "cosine_distance": lambda z, y: _V1.cosine_distance(y, z, axis=1),
    "log_loss": lambda z, y: _V1.log_loss(y, tf.sigmoid(z)),
    "sparse_softmax_cross_entropy": lambda z, y: _V1.sparse_softmax_cross_entropy(tf.argmax(y, 1), z),
}


_KERAS: Any = next(iter(installed().values())).losses
#: Losses of Keras, of what makes their predictions.
_OF_KERAS: dict[str, _Loss] = {
    name: lambda z, y, name=name, predicted=predicted: tf.cast(  # type: ignore[misc] # the default arguments
        getattr(_KERAS, name)()(y, predicted(z)), tf.float32
    )
    for name, predicted in {
        "CategoricalCrossentropy": tf.nn.softmax,
        "BinaryCrossentropy": tf.sigmoid,
        "Poisson": tf.nn.softplus,
        "LogCosh": tf.identity,
        "CosineSimilarity": tf.identity,
    }.items()
}
_ALL = _LOSSES | _OF_TENSORFLOW_1 | _OF_KERAS


@pytest.mark.parametrize(
    ("name", "dtype"), [*((name, "float16") for name in _ALL), *((name, "bfloat16") for name in ("ctc", "focal"))]
)
@pytest.mark.parametrize("logits", ["h", "l"], ids=["at first", "sure and wrong"])
def test_losses_and_their_gradients_are_those_of_float32(logits: str, name: str, dtype: str) -> None:
    case = Case(_ALL[name], f"{logits}84 o84", "F")
    values = values_of(case)
    assert_case(case, dtype, *compute_case(case, tfmp.autocast(dtype), values, *values))


def test_losses_within_xla_are_those_of_float32() -> None:
    names = ["cross_entropy", "kl", "focal", "binary_cross_entropy", "contrastive"]
    cases = [Case(_ALL[name], "l84 o84", "F") for name in names]
    values = values_of(cases[0])

    @tf.function(jit_compile=True, autograph=False)
    def compute(*given: tf.Tensor) -> Any:
        return [compute_case(case, tfmp.autocast(), values, *given) for case in cases]

    for case, found in zip(cases, compute(*values), strict=True):
        # The similarities of one of them, rounded by the products, are multiplied by 20.
        assert_case(case, "float16", *found, times=2)
