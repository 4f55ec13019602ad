"""Optimizers with half-precision state, and trainings of them that tests compare."""

from typing import Any

import numpy as np
import tensorflow as tf

import tfmp

#: The slots of Keras' optimizers that are half in the tests, by the endings of their variables' names.
_SLOTS = (
    *("momentum", "velocity", "velocity_hat", "norm", "accumulator", "linear"),
    *("accumulated_grad", "accumulated_delta_var"),
)


def adam(keras: Any, **settings: Any) -> Any:
    """Make an Adam whose whole state is in bfloat16."""
    options = {"momentum": "bfloat16", "velocity": "bfloat16", "rounding": "stochastic"}
    return tfmp.half_state(keras.optimizers.Adam(0.125), **options | settings)


def slots_of(optimizer: Any) -> set[str]:
    """Return the names of the slots of a built optimizer that can be in half precision."""
    paths = [variable.name for variable in optimizer.variables]
    return {slot for slot in _SLOTS if any(path.endswith(f"_{slot}") for path in paths)}


def state(optimizer: Any) -> list[bytes]:
    """Return the optimizer's variables as bytes, since types of NumPy compare equal."""
    return [str(variable.dtype).encode() + variable.numpy().tobytes() for variable in optimizer.variables]


def classification() -> tuple[np.ndarray, np.ndarray]:
    """Return 256 points in 8 dimensions, and which side of a plane they are on."""
    points = np.random.default_rng(0).normal(size=[256, 8]).astype(np.float32)
    return points, (points @ np.arange(-3.5, 4) > 0).astype(np.float32)[:, None]


def model(keras: Any, optimizer: Any, policy: str = "float32", **settings: Any) -> Any:
    """Make a compiled model that classifies these points."""
    keras.utils.set_random_seed(1)
    layers = [keras.layers.Dense(16, "relu", dtype=policy), keras.layers.Dense(1, dtype=policy)]
    made = keras.Sequential([keras.Input([8]), *layers])
    made.compile(optimizer, keras.losses.BinaryCrossentropy(from_logits=True), **settings)
    return made


def decaying_sgd(keras: Any) -> Any:
    """Make an SGD with momentum, whose learning rate is halved every 250 steps."""
    return keras.optimizers.SGD(keras.optimizers.schedules.ExponentialDecay(0.02, 250, 0.5), momentum=0.9)


def decaying_adam(keras: Any) -> Any:
    """Make an Adam, whose learning rate is halved every 250 steps."""
    return keras.optimizers.Adam(keras.optimizers.schedules.ExponentialDecay(0.05, 250, 0.5))


def least_squares_error(
    keras: Any, optimizer: Any, dtype: str = "float32", noise: float = 0.0, steps: int = 2000
) -> float:
    """Train weights on a problem whose solution is known, and return their error.

    Args:
        keras: Keras 3.
        optimizer: The optimizer.
        dtype: The type of the weights.
        noise: The deviation of random numbers that are added to what the weights are to predict.
        steps: The number of steps.
    """
    rng = np.random.default_rng(1)
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
