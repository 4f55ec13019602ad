"""TensorFlow Probability's layers: distributions as outputs, and distributions of weights."""

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import suite
import tensorflow as tf

import tfmp

tfp = suite.library("tensorflow_probability")
keras = suite.keras_of(tfp.layers.DenseFlipout)

pytestmark = [pytest.mark.works_with("TensorFlow Probability"), pytest.mark.filterwarnings("default")]

_ROWS = 16


def _distribution(parameters: tf.Tensor) -> Any:
    scale = 0.1 + tf.math.softplus(parameters[..., 1:])
    return tfp.distributions.Normal(loc=parameters[..., :1], scale=scale)


def _posterior(kernel_size: int, bias_size: int = 0, dtype: Any = None) -> Any:
    size = kernel_size + bias_size

    def around(values: tf.Tensor) -> Any:
        normal = tfp.distributions.Normal(loc=values[..., :size], scale=1e-3 * tf.nn.softplus(values[..., size:]))
        return tfp.distributions.Independent(normal, reinterpreted_batch_ndims=1)

    initializer = keras.initializers.RandomNormal(stddev=0.3, seed=7)
    layers = [tfp.layers.VariableLayer(2 * size, dtype=dtype, initializer=initializer)]
    return keras.Sequential([*layers, tfp.layers.DistributionLambda(around)])


def _prior(kernel_size: int, bias_size: int = 0, dtype: Any = None) -> Any:
    size = kernel_size + bias_size

    def around_zero(_: Any) -> Any:
        normal = tfp.distributions.Normal(loc=tf.zeros([size]), scale=tf.ones([size]))
        return tfp.distributions.Independent(normal, reinterpreted_batch_ndims=1)

    return keras.Sequential([tfp.layers.DistributionLambda(around_zero)])


def _flipout() -> Any:
    # As the documentation has it, the divergence is divided by the number of examples.
    return tfp.layers.DenseFlipout(
        16,
        activation="relu",
        name="variational",
        seed=3,
        kernel_divergence_fn=lambda q, p, _: tfp.distributions.kl_divergence(q, p) / 1000,
    )


def _variational() -> Any:
    return tfp.layers.DenseVariational(16, _posterior, _prior, kl_weight=1e-3, activation="relu", name="variational")


#: The layers after the first, and whether the model returns a distribution.
_LAYERS: dict[str, tuple[Callable[[], list[Any]], bool]] = {
    "DistributionLambda": (
        lambda: [keras.layers.Dense(2, name="parameters"), tfp.layers.DistributionLambda(_distribution, name="output")],
        True,
    ),
    "DenseFlipout": (lambda: [_flipout(), keras.layers.Dense(1, name="parameters")], False),
    "DenseVariational": (lambda: [_variational(), keras.layers.Dense(1, name="parameters")], False),
}


def _likelihood(labels: tf.Tensor, distribution: Any) -> tf.Tensor:
    return -distribution.log_prob(labels)


@functools.cache
def _subject_of(model: str) -> suite.Subject:
    rng = np.random.default_rng(0)
    kernel = rng.normal(size=(8, 1)).astype(np.float32)
    layers, is_distribution = _LAYERS[model]

    def build() -> Any:
        return keras.Sequential([keras.Input([8]), keras.layers.Dense(32, "relu", name="hidden"), *layers()])

    def batch() -> tuple[tf.Tensor, tf.Tensor]:
        x = rng.normal(size=(_ROWS, 8)).astype(np.float32)
        return tf.constant(x), tf.constant(x @ kernel)

    def loss(of: Any, taken: Any) -> tf.Tensor:
        x, y = taken
        outputs = of(x, training=True)
        each = _likelihood(y, outputs) if is_distribution else (outputs - y) ** 2
        return tf.add_n([tf.reduce_mean(each), *of.losses])

    # The layers with distributions of weights draw the same numbers at all levels, as they stay in float32. The check
    # draws other ones.
    lacks = set() if is_distribution else {"check", "recompute", "resume"}
    return suite.Subject(
        keras=keras,
        build=build,
        optimizer=lambda: keras.optimizers.Adam(1e-2),
        batches=suite.four_in_turn(batch),
        loss=loss,
        compile_with={"loss": _likelihood if is_distribution else "mse"},
        keep_float32=["parameters", "output" if is_distribution else "variational"],
        float32=frozenset({"parameters"}),
        recomputed=lambda made: tfmp.recompute_layers(made, "hidden"),
        lacks=frozenset(lacks),
    )


class TestProbability(suite.Suite):
    models, subject = tuple(_LAYERS), staticmethod(_subject_of)
    test_overflow_on_the_second_replica_is_skipped_on_both = None
