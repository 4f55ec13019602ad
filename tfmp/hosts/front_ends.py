"""Which front-end is for which optimizer, found without importing a Keras that the program does not use."""

import importlib
from collections.abc import Mapping
from types import ModuleType
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from tfmp.any_keras.which import is_keras2, keras_of, module_for
from tfmp.core import settings

if TYPE_CHECKING:
    from tfmp.hosts.base import LossScaleOptimizer

#: The classes of the front-ends by the module of this package that each is in; those for legacy optimizers are second.
_CLASSES = {
    "tf1.optimizer": ("LossScaleOptimizerV1",),
    "keras.keras3": ("LossScaleOptimizerKeras3",),
    "keras.keras215": ("LossScaleOptimizerKeras215", "LossScaleOptimizerLegacyKeras215"),
    "keras.tf_keras": ("LossScaleOptimizerTfKeras", "LossScaleOptimizerLegacyTfKeras"),
}


def front_end_for(opt: object) -> "type[LossScaleOptimizer]":
    """Return the front-end for an optimizer, importing it."""
    if isinstance(opt, tf.compat.v1.train.Optimizer):
        return _front_end("tf1.optimizer")
    for base in ("optimizers.Optimizer", "optimizers.legacy.Optimizer"):
        keras = keras_of(opt, base)
        if keras is not None:
            return front_end_of(keras, legacy="legacy" in base)
    settings.refuse_class("opt", opt)
    raise TypeError(
        "opt must be a tf.compat.v1.train.Optimizer or an optimizer of Keras or tf_keras, "
        f"got {opt!r} of type {type(opt).__module__}.{type(opt).__qualname__}."
    )


def front_end_of_config(config: Mapping[str, Any]) -> "type[LossScaleOptimizer]":
    """Return the front-end for a configuration of a LossScaleOptimizer of tfmp or Keras, importing it and its Keras."""
    if "inner_optimizer" not in config:
        raise ValueError(
            "config must be what get_config of a LossScaleOptimizer of tfmp or Keras returned, with an "
            f"inner_optimizer, got {', '.join(config) or 'nothing'}."
        )
    # The modules in it may be a user's, and tf_keras writes "keras" for its name. What tells optimizers apart are
    # settings: the first is one of all optimizers of Keras 2 but the legacy ones. The second is one of all wrappers but
    # those of legacy optimizers and Keras 2's own.
    is_keras2s = "is_legacy_optimizer" in config["inner_optimizer"]["config"]
    is_legacy = not is_keras2s and "name" not in config
    keras = importlib.import_module("keras")
    if (is_keras2s or is_legacy) and not is_keras2(keras):
        keras = importlib.import_module("tf_keras")
    return front_end_of(keras, legacy=is_legacy)


def front_end_of(keras: ModuleType, *, legacy: bool = False) -> "type[LossScaleOptimizer]":
    """Return the front-end for the optimizers of `keras` or `tf_keras`, importing it; a Keras may be too old for it."""
    return _front_end(f"keras.{module_for(keras)}", legacy=legacy)


def _front_end(module: str, *, legacy: bool = False) -> "type[LossScaleOptimizer]":
    found: type[LossScaleOptimizer] = getattr(importlib.import_module(f"tfmp.hosts.{module}"), _CLASSES[module][legacy])
    return found
