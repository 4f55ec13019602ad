"""Models of any Keras with given weights, and what must be as before when a check has ended."""

import random
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
import tensorflow as tf
from kerases import composed
from kit.keras_hosts import of_tensorflow

import tfmp


def check(model: Any, loss_fn: Any, batches: Any, **settings: Any) -> tfmp.ranges.PrecisionReport:
    """Check a model and show no progress."""
    return tfmp.check_precision(model, loss_fn, batches, **{"progress": False} | settings)


def names(report: tfmp.ranges.PrecisionReport) -> list[str]:
    """Return the names of the layers of a report."""
    return [layer.name for layer in report.layers]


def data(seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Return a batch of eight examples with four inputs and one label."""
    rng = np.random.default_rng(seed)
    return rng.normal(size=[8, 4]).astype(np.float32), rng.normal(size=[8, 1]).astype(np.float32)


def with_given_weights(model: Any) -> Any:
    """Give the trained variables of a model values that are not random; return the model."""
    for index, variable in enumerate(model.trainable_variables):
        size = int(np.prod(variable.shape))
        variable.assign(np.cos(index + np.arange(size)).reshape(variable.shape) / 2)
    return model


def called(model: Any) -> Any:
    """Call a model of four inputs, so that Keras has noted that it was; give it weights, and return it."""
    model(data()[0])
    return with_given_weights(model)


def dense_model(keras: ModuleType, policy: str = "float32") -> Any:
    """Make a model of two layers with given weights."""
    layers = [keras.layers.Dense(4, "relu", dtype=policy, name="hidden"), keras.layers.Dense(1, dtype=policy, name="o")]
    return called(keras.Sequential([keras.Input([4]), *layers], name="net"))


def stateful_model(keras: ModuleType, policy: str = "float32") -> Any:
    """Make a model with moving statistics and Dropout."""
    layers = [
        keras.layers.Dense(4, dtype=policy, name="hidden"),
        keras.layers.BatchNormalization(dtype=policy, name="norm"),
        keras.layers.Dropout(0.5, seed=3, dtype=policy, name="drop"),
        keras.layers.Dense(1, dtype=policy, name="o"),
    ]
    return called(keras.Sequential([keras.Input([4]), *layers], name="net"))


def overflowing_within(keras: ModuleType, name: str) -> Any:
    """Make a layer that returns what it takes, and on the way computes a number beyond 65504."""
    return composed(keras, lambda _, x: (x * 300.0) * 300.0 / 90000.0, settings={"name": name})


def mse(outputs: Any, labels: Any) -> tf.Tensor:
    """Return the mean squared error, in the order in which Keras takes means."""
    return tf.reduce_mean(tf.reduce_mean((outputs - labels) ** 2, axis=-1))


def counted(*arrays: Any) -> tfmp.ranges.RangeHistogram:
    """Count the exponents of the values of arrays by NumPy."""
    with np.errstate(invalid="ignore"):  # of signaling NaN
        values = np.concatenate([np.float64(array).ravel() for array in arrays])
    # NumPy's mantissas are from 0.5 to 1.
    exponents = np.frexp(values[np.isfinite(values) & (values != 0)])[1].astype(np.int64) - 1
    bins = np.bincount(exponents[(exponents >= -150) & (exponents < 128)] + 150, minlength=278)
    others = [values == 0, np.isinf(values), np.isnan(values), exponents < -150, exponents >= 128]
    return tfmp.ranges.RangeHistogram(np.array([*bins, *map(np.count_nonzero, others)]))


def gradients(model: Any, loss: Callable[[], tf.Tensor], scale: float = 1.0) -> list[Any]:
    """Return the gradients of a loss, multiplied by a scale, for the trained variables of a model."""
    with tf.GradientTape() as tape:
        scaled = tf.cast(loss(), tf.float32) * scale
    return list(tape.gradient(scaled, [*map(of_tensorflow, model.trainable_variables)]))


def state(model: Any) -> dict[str, Any]:
    """Return all that a check must leave as it is: of the model, of its layers, and of random generators."""
    layers = list(model._flatten_layers())
    optimizer = getattr(model, "optimizer", None)
    variables = [*model.variables, *(each for metric in model.metrics for each in metric.variables)]
    return {
        "variables": _values(variables),
        "optimizer": _values(optimizer.variables if optimizer else []),
        "seeds": [_values([each.state]) for layer in layers for each in getattr(layer, "_seed_generators", [])],
        "policies": [(layer._dtype_policy, layer.compute_dtype, layer.variable_dtype) for layer in layers],
        # Values too, by their identity: a layer's own `call` is one of them.
        "attributes": [{name: id(value) for name, value in _attributes(layer)} for layer in layers],
        "trainable": [layer.trainable for layer in layers],
        "random": (random.getstate(), [str(part) for part in np.random.get_state()]),
    }


def _values(variables: Any) -> list[Any]:
    return [tf.convert_to_tensor(variable).numpy().tolist() for variable in variables]


def _attributes(layer: Any) -> list[tuple[str, Any]]:
    # Numbers, tuples and what a call leaves behind are made anew.
    kept = (tf.Variable, tf.Module, str, type, bool)
    return [
        (name, value if isinstance(value, kept) or callable(value) else None) for name, value in vars(layer).items()
    ]
