"""Blocks and models of every Keras that the tests of recomputation train, with recomputation and without."""

import re
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
import tensorflow as tf

#: Makes a layer recomputed, or leaves it as it is.
Wrap = Callable[[Any], Any]

#: What `compile` takes for each way to run a step.
WAYS: dict[str, dict[str, Any]] = {
    "graph": {"jit_compile": False},
    "xla": {"jit_compile": True},
    "eager": {"run_eagerly": True},
}


def plain(layer: Any) -> Any:
    """Return the layer itself: the wrapping of the model to compare with."""
    return layer


def is_keras3(keras: ModuleType) -> bool:
    """Return whether it is Keras 3."""
    version: str = keras.__version__
    return version.startswith("3.")


def dense(keras: ModuleType, units: int, activation: Any = None, **settings: Any) -> Any:
    """Make a Dense layer with the same weights each time; Keras 2 warns of initializers that are used twice."""
    initializer = keras.initializers.GlorotUniform(seed=units)
    return keras.layers.Dense(units, activation, kernel_initializer=initializer, **settings)


def dropout(keras: ModuleType, rate: float) -> Any:
    """Make a Dropout layer whose state is in a variable, as if `enable_tf_random_generator` had been called."""
    return keras.layers.Dropout(rate, seed=3, **({} if is_keras3(keras) else {"rng_type": "stateful"}))


def dense_block(keras: ModuleType, name: str = "block") -> Any:
    """Make a block without state."""
    return keras.Sequential([dense(keras, 16, "gelu", name="up"), dense(keras, 8, name="down")], name=name)


def stateful_block(keras: ModuleType, name: str = "block", rate: float = 0.5) -> Any:
    """Make a block with moving statistics, and with seeds unless the rate is 0."""
    # A bias before a normalization has a gradient of rounding errors only, of which Adam makes steps.
    up, norm = dense(keras, 16, name="up", use_bias=False), keras.layers.BatchNormalization(momentum=0.5, name="norm")
    layers = [up, norm, keras.layers.ReLU(), *([dropout(keras, rate)] if rate else []), dense(keras, 8, name="down")]
    return keras.Sequential(layers, name=name)


def data() -> tuple[np.ndarray, np.ndarray]:
    """Return the inputs and targets of three batches of 8."""
    random = np.random.default_rng(0)
    return random.normal(size=(24, 8)).astype(np.float32), random.normal(size=(24, 1)).astype(np.float32)


def model(keras: ModuleType, wrap: Wrap, block: Callable[..., Any] = stateful_block, **settings: Any) -> Any:
    """Make a model of two blocks, each of which is wrapped, with the same weights at each call."""
    keras.utils.set_random_seed(0)
    inputs = outputs = keras.Input([8])
    for name in ("one", "two"):
        # A layer, which casts: with a level, Keras 2 adds no float16 to the float32 of the input.
        outputs = keras.layers.Add()([outputs, wrap(block(keras, name, **settings))(outputs)])
    return keras.Model(inputs, dense(keras, 1, dtype="float32", name="head")(outputs), name="net")


def fitted(trained: Any, optimizer: Any = "sgd", batch: Any = None, **settings: Any) -> list[float]:
    """Compile and train for two epochs of steps of 8; return the losses."""
    trained.compile(optimizer, "mse", **settings)
    x, y = data() if batch is None else batch
    return list(trained.fit(x, y, epochs=2, batch_size=8, shuffle=False, verbose=0).history["loss"])


def values(trained: Any) -> list[np.ndarray]:
    """Return the values of all variables: weights, statistics and seeds."""
    return [np.asarray(tf.convert_to_tensor(variable)) for variable in trained.variables]


def names(variables: Any) -> list[str]:
    """Return the names or paths, without the numbers that Keras gives to layers without a name."""
    return [re.sub(r"_\d+/", "/", getattr(variable, "path", variable.name)) for variable in variables]


def assert_close(found: Any, expected: Any, tolerance: float) -> None:
    """Compare arrays, with a tolerance relative to the largest value of each."""
    for pair in zip(found, expected, strict=True):
        one, other = (np.asarray(each, np.float64) for each in pair)
        np.testing.assert_allclose(one, other, rtol=0, atol=tolerance * max(1e-3, np.abs(other).max(initial=0)))
