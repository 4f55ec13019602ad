"""Which front-end is for which optimizer, found without importing a Keras that the program does not use."""

import importlib
from collections.abc import Mapping
from types import ModuleType
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from tfmp.hosts.keras.which import is_keras2, keras_of, module_for

if TYPE_CHECKING:
    from tfmp.optimizers.base import LossScaleOptimizer

#: The front-ends: the module of this package for each host, and the class in it.
_CLASSES = {
    "v1": "LossScaleOptimizerV1",
    "keras3": "LossScaleOptimizerKeras3",
    "keras215": "LossScaleOptimizerKeras215",
    "tf_keras": "LossScaleOptimizerTfKeras",
}


def front_end_for(opt: object) -> "type[LossScaleOptimizer]":
    """Return the front-end for an optimizer, importing it.

    Examples:
        >>> front_end_for(tf.compat.v1.train.GradientDescentOptimizer(0.5)).__name__
        'LossScaleOptimizerV1'
    """
    if isinstance(opt, tf.compat.v1.train.Optimizer):
        return _front_end("v1")
    keras = keras_of(opt, "optimizers.Optimizer")
    if keras is not None:
        return front_end_of(keras)
    advice = ": take it from keras.optimizers, without legacy" if ".legacy." in type(opt).__module__ else ""
    raise TypeError(
        "opt must be a tf.compat.v1.train.Optimizer or an optimizer of Keras or tf_keras, "
        f"got {opt!r} of type {type(opt).__module__}.{type(opt).__qualname__}{advice}."
    )


def front_end_of_config(config: Mapping[str, Any]) -> "type[LossScaleOptimizer]":
    """Return the front-end for a configuration of a LossScaleOptimizer of tfmp or Keras, importing it and its Keras."""
    if "inner_optimizer" not in config:
        raise ValueError(
            "config must be what get_config of a LossScaleOptimizer of tfmp or Keras returned, with an "
            f"inner_optimizer, got {', '.join(config) or 'nothing'}."
        )
    # tf_keras writes "keras" for its name too; what tells them apart is a setting that all optimizers of Keras 2 have.
    of_keras2 = "is_legacy_optimizer" in config["inner_optimizer"]["config"]
    keras = importlib.import_module("keras")
    if of_keras2 and not is_keras2(keras):
        keras = importlib.import_module("tf_keras")
    return front_end_of(keras)


def front_end_of(keras: ModuleType) -> "type[LossScaleOptimizer]":
    """Return the front-end for the optimizers of `keras` or `tf_keras`, importing it; a Keras may be too old for it."""
    return _front_end(module_for(keras))


def _front_end(host: str) -> "type[LossScaleOptimizer]":
    found: type[LossScaleOptimizer] = getattr(importlib.import_module(f"tfmp.optimizers.{host}"), _CLASSES[host])
    return found
