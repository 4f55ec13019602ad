"""Optimizers and loops of all hosts, which take steps with given gradients, for the tests of norms and of spikes."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import kerases
import numpy as np
import pytest
import tensorflow as tf

import tfmp
from tfmp.core.gradients import arithmetic

#: The loss scale; it does not change unless a step overflows.
SCALE = 1024.0

#: Runs a function: eagerly, in a `tf.function`, and compiled by XLA.
MODES: dict[str, Callable[[Callable[..., None]], Callable[..., None]]] = {
    "eager": lambda step: step,
    "function": tf.function,
    "xla": functools.partial(tf.function, jit_compile=True),
}


class Training(NamedTuple):
    """An optimizer of some host with variables, or a scaler and an optimizer."""

    #: The wrapper or the scaler.
    opt: Any
    #: The optimizer in it.
    inner: Any
    variables: list[Any]
    #: Takes a step with gradients in true magnitude.
    step: Callable[[Sequence[Any]], None]

    def weights(self) -> list[np.ndarray]:
        """Return the values of the variables."""
        return [variable.numpy() for variable in self.variables]


def hosts() -> list[str]:
    """Return the names of the hosts that are installed."""
    of_keras = kerases.installed()
    legacy = [f"legacy of {name}" for name, keras in of_keras.items() if not keras.__version__.startswith("3.")]
    return ["v1", *of_keras, *legacy, "scaler"]


for_every_host = pytest.mark.parametrize("host", hosts())


def training(host: str, shapes: Sequence[Sequence[int]], dtype: str = "float32", **settings: Any) -> Training:
    """Make a training by gradient descent with a learning rate of 1, whose variables are 0; inside a strategy's scope.

    Args:
        host: One of `hosts()`.
        shapes: The shapes of the variables.
        dtype: Their dtype.
        settings: Further arguments of the wrapper, or of the scaler.
    """
    manager = tfmp.ExponentialUpdateLossScaleManager(SCALE, 1000, decr_every_n_nan_or_inf=1, decr_ratio=0.5)
    keras = kerases.installed().get(host.removeprefix("legacy of "))
    make = (
        getattr(keras, "Variable", tf.Variable) if keras is not None and not host.startswith("legacy") else tf.Variable
    )
    variables = [make(np.zeros(shape, dtype), dtype=dtype, name=f"w{index}") for index, shape in enumerate(shapes)]
    if keras is None:
        inner = tf.compat.v1.train.GradientDescentOptimizer(1.0)
    else:
        inner = (keras.optimizers.legacy if host.startswith("legacy") else keras.optimizers).SGD(1.0)
    if host == "scaler":
        scaler = tfmp.GradScaler(manager=manager, **settings)
        return Training(scaler, inner, variables, lambda grads: _scaler_step(scaler, inner, variables, grads))
    opt = tfmp.LossScaleOptimizer(inner, manager, **settings)
    if keras is None:
        return Training(opt, inner, variables, lambda grads: _v1_step(opt, variables, grads))
    return Training(opt, inner, variables, lambda grads: _keras_step(opt, variables, grads))


def _scaler_step(scaler: tfmp.GradScaler, inner: Any, variables: list[Any], grads: Sequence[Any]) -> None:
    scale = scaler.scale(tf.ones([]))
    scaler.step(inner, _pairs(_times(grads, scale), variables))
    scaler.update()


def _v1_step(opt: Any, variables: list[Any], grads: Sequence[Any]) -> None:
    opt.apply_gradients(_pairs(grads, variables))


def _keras_step(opt: Any, variables: list[Any], grads: Sequence[Any]) -> None:
    scale = opt.scale_loss(tf.ones([]))
    opt.apply_gradients(_pairs(_times(grads, scale), variables))


def _pairs(grads: Sequence[Any], variables: list[Any]) -> list[tuple[Any, Any]]:
    return list(zip(grads, variables, strict=True))


def _times(grads: Sequence[Any], scale: tf.Tensor) -> list[Any]:
    return [arithmetic.map_values(lambda values: values * tf.cast(scale, values.dtype), grad) for grad in grads]


def true_norm(grads: Sequence[Any]) -> float:
    """Return the norm of gradients, computed by NumPy in float64; the rows of sparse ones are added up."""
    dense = [np.float64(0)]
    for grad in grads:
        if isinstance(grad, tf.IndexedSlices):
            array = np.zeros(grad.dense_shape.numpy())
            np.add.at(array, grad.indices.numpy(), grad.values.numpy().astype(np.float64))
            dense.append(array)
        elif grad is not None:
            dense.append(grad.numpy().astype(np.float64))
    largest = max(np.max(np.abs(each)) for each in dense)
    return float(largest * np.sqrt(sum(np.sum((each / largest) ** 2) for each in dense)))
