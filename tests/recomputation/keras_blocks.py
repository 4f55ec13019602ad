"""Blocks and models of Keras 3 that the tests of recomputation train, with recomputation and without."""

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import tfmp

layers = keras.layers

Wrap = Callable[[keras.layers.Layer], keras.layers.Layer]


def plain(layer: keras.layers.Layer) -> keras.layers.Layer:
    """Return the layer itself: the wrapping of the model to compare with."""
    return layer


def dense_block(name: str = "block") -> keras.Sequential:
    """Return a block without state."""
    return keras.Sequential([layers.Dense(8, "gelu", name="up"), layers.Dense(8, name="down")], name=name)


def activated_block(name: str = "block") -> keras.Sequential:
    """Return a block in which an activation and Dropout multiply by constants, one after the other."""
    drop = layers.Dropout(0.1, seed=3, name="drop")
    return keras.Sequential([layers.Dense(16, "gelu", name="up"), drop, layers.Dense(8, name="down")], name=name)


def stateful_block(name: str = "block") -> keras.Sequential:
    """Return a block with moving statistics and with seeds."""
    return keras.Sequential(
        [
            layers.Dense(16, "relu", name="up"),
            layers.BatchNormalization(momentum=0.5, name="norm"),
            layers.Dropout(0.5, seed=3, name="drop"),
            layers.Dense(8, name="down"),
        ],
        name=name,
    )


def nested_block(name: str = "block") -> keras.Sequential:
    """Return a block that contains another recomputed one."""
    return keras.Sequential([layers.Dense(8, name="first"), tfmp.Recompute(stateful_block("inner"))], name=name)


def convolutional_block(name: str = "block") -> keras.Sequential:
    """Return a block of a convolutional net, between layers that change the shape."""
    return keras.Sequential(
        [
            layers.Reshape([2, 2, 2]),
            layers.Conv2D(4, 2, padding="same", activation="relu"),
            layers.BatchNormalization(),
            layers.Flatten(),
            layers.Dense(8),
        ],
        name=name,
    )


def data() -> tuple[np.ndarray, np.ndarray]:
    """Return the inputs and targets of three batches of 8."""
    random = np.random.default_rng(0)
    return random.normal(size=(24, 8)).astype(np.float32), random.normal(size=(24, 1)).astype(np.float32)


def model(wrap: Wrap, block: Callable[[str], keras.layers.Layer] = stateful_block) -> keras.Model:
    """Return a model of two blocks, each of which is wrapped, with the same weights on each call."""
    keras.utils.set_random_seed(0)
    inputs = keras.Input([8])
    outputs = inputs
    for name in ("one", "two"):
        outputs = outputs + wrap(block(name))(outputs)
    return keras.Model(inputs, layers.Dense(1, dtype="float32", name="head")(outputs), name="net")


def fitted(trained: keras.Model, optimizer: Any = None, **compile_options: Any) -> keras.Model:
    """Train for two epochs of three steps; return the model."""
    trained.compile(optimizer or keras.optimizers.SGD(0.01), "mse", **compile_options)
    trained.fit(*data(), epochs=2, batch_size=8, shuffle=False, verbose=0)
    return trained


def values(trained: keras.Model) -> list[np.ndarray]:
    """Return the values of all variables: weights, statistics and seeds."""
    return [np.asarray(tf.convert_to_tensor(variable.value)) for variable in trained.variables]


def largest_difference(one: keras.Model, other: keras.Model) -> float:
    """Return the largest difference between the variables of two models, relative to the largest value of each."""
    differences = [
        np.max(np.abs(a.astype(np.float64) - b.astype(np.float64))) / max(1e-3, np.max(np.abs(a)))
        for a, b in zip(values(one), values(other), strict=True)
    ]
    return float(max(differences))
