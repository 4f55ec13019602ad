"""Optimizers with half-precision state, and trainings of them that tests compare."""

from typing import Any

import numpy as np
import tensorflow as tf

import tfmp


def adam(keras: Any, **settings: Any) -> Any:
    """Make an Adam whose whole state is in bfloat16."""
    return tfmp.half_state(keras.optimizers.Adam(0.125), **settings)


def slot_types(optimizer: Any) -> dict[str, str]:
    """Return the types of a built optimizer's slots by their names."""
    return {part.slot: part.dtype for part in optimizer.state_bytes().slots}


def state(optimizer: Any) -> list[bytes]:
    """Return the optimizer's variables as bytes, since types of NumPy compare equal."""
    return [str(variable.dtype).encode() + variable.numpy().tobytes() for variable in optimizer.variables]


def fitted(model: Any, epochs: int = 1, **settings: Any) -> Any:
    """Train a model of three inputs on their sums, and return it."""
    x = np.random.default_rng(0).normal(size=[64, 3]).astype(np.float32)
    model.fit(x, x.sum(axis=1, keepdims=True), epochs=epochs, shuffle=False, verbose=0, **settings)
    return model


def least_squares_error(keras: Any, optimizer: Any, dtype: str = "float32", noise: float = 0.0) -> float:
    """Train weights on a problem whose solution is known, and return their error.

    `dtype` is the type of the weights, and `noise` the deviation of what is added to what they are to predict.
    """
    rng, steps = np.random.default_rng(1), 2000
    inputs, solution = rng.normal(size=[512, 64]).astype(np.float32), rng.normal(size=[64]).astype(np.float32)
    batches = tf.constant(inputs[rng.integers(0, 512, [steps, 32])])
    errors = tf.constant(noise * rng.normal(size=[steps, 32]).astype(np.float32))
    weights = keras.Variable(np.zeros(64, np.float32), dtype=dtype)
    optimizer.build([weights])

    @tf.function(jit_compile=True)
    def train() -> None:
        for step in tf.range(steps):
            batch = batches[step]
            off = tf.linalg.matvec(batch, tf.cast(weights.value, tf.float32) - solution) - errors[step]
            optimizer.apply([tf.linalg.matvec(batch, off, transpose_a=True) / 32], [weights])

    train()
    return float(np.sqrt(np.mean((np.float32(weights.numpy()) - solution) ** 2)))
