"""Checks what a front-end for Keras is given: the optimizer to wrap, the manager, and other arguments."""

import inspect
import logging
import operator
from collections.abc import Iterable, Mapping
from types import ModuleType
from typing import Any

import tensorflow as tf

from tfmp.any_keras.configurations import object_of_config
from tfmp.any_keras.which import is_foreign
from tfmp.core import settings
from tfmp.core.distribute.horovod_detection import is_horovods
from tfmp.core.managers import OWN_MANAGERS, LossScaleManager, Specification, dynamic_manager, get_loss_scale_manager
from tfmp.core.spikes.detector import SpikeDetector

_logger = logging.getLogger("tfmp")


def validate_inner_optimizer(keras: ModuleType, inner_optimizer: object, *, legacy: bool = False) -> None:
    """Raise an error if the object to wrap is not an optimizer of `keras` (or `tf_keras`), or cannot be wrapped."""
    kind = "optimizers.legacy.Optimizer" if legacy else "optimizers.Optimizer"
    if isinstance(inner_optimizer, keras.mixed_precision.LossScaleOptimizer):
        raise ValueError(
            "inner_optimizer is a LossScaleOptimizer already: wrap the optimizer inside it, or call "
            "tfmp.LossScaleOptimizer.from_keras."
        )
    if not isinstance(inner_optimizer, operator.attrgetter(kind)(keras)):
        raise TypeError(
            f"inner_optimizer must be a {keras.__name__}.{kind}, got {inner_optimizer!r} of type "
            f"{type(inner_optimizer).__name__}."
        )
    # Legacy optimizers also train in graphs, as Estimator's.
    if not (legacy or tf.compat.v1.executing_eagerly_outside_functions()):
        raise ValueError(
            "Keras' optimizers need TensorFlow 2's behaviour, which is disabled here: wrap a "
            "tf.compat.v1.train.Optimizer in graphs."
        )


def warn_of_methods_never_called(inner_optimizer: object, methods: Iterable[str]) -> None:
    """Warn of methods of a user's own that the wrapper never calls, because it does their work itself."""
    for name in methods:
        if is_foreign(getattr(inner_optimizer, name, None)) and not is_horovods(inner_optimizer):
            _logger.warning(
                "%s.%s is never called, because the wrapper does its work: move what it adds to apply_gradients or "
                "update_step, which are called on every step that is applied.",
                type(inner_optimizer).__name__,
                name,
            )


def refuse_other_arguments(inner_optimizer: object, others: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
    """Raise `ValueError` for arguments that no front-end has, but for the `defaults` of every optimizer's settings."""
    given = {name: value for name, value in others.items() if name not in defaults or value != defaults[name]}
    if "loss_scale_factor" in given and "loss_scale_factor" in defaults:
        raise ValueError(
            f"loss_scale_factor={given['loss_scale_factor']!r} is a setting on the `inner_optimizer`, for training "
            "without a wrapper: write tfmp.LossScaleOptimizer(optimizer, tfmp.FixedLossScaleManager(scale)) for a "
            "fixed scale."
        )
    of_inner = [name for name in given if name in {*defaults, *inspect.signature(type(inner_optimizer)).parameters}]
    if of_inner:
        values = ", ".join(f"{name}={given[name]!r}" for name in of_inner)
        kind = type(inner_optimizer).__name__
        raise ValueError(
            f"settings of the optimizer belong on the `inner_optimizer`, got {values}: write "
            f"tfmp.LossScaleOptimizer({kind}(..., {values}))."
        )
    if given:
        names = ", ".join(f"`{name}`" for name in given)
        raise ValueError(f"a tfmp.LossScaleOptimizer around an optimizer of Keras has no arguments: {names}.")


def parts_of_config(
    keras: ModuleType, config: Mapping[str, Any], custom_objects: Mapping[str, Any] | None, *, legacy: bool
) -> dict[str, Any]:
    """Return the arguments that a configuration of a front-end holds, with the objects that it describes."""
    optimizers = keras.optimizers.legacy if legacy else keras.optimizers
    kinds = tuple(dict.fromkeys([optimizers.Optimizer, keras.optimizers.Optimizer]))
    allowed: dict[str, tuple[type | tuple[type, ...], Iterable[object]]] = {
        # Older formats name the classes without a module.
        "inner_optimizer": (kinds, vars(optimizers).values()),
        "loss_scale_manager": (LossScaleManager, OWN_MANAGERS),
        "skip_spikes": (SpikeDetector, [SpikeDetector]),
    }
    described = {
        name: object_of_config(keras, config[name], *allowed[name], custom_objects)
        for name in allowed
        if config.get(name) is not None
    }
    return {**config, **described}


def manager_of_keras(
    spec: Specification, initial_scale: float | None, dynamic_growth_steps: int | None, *, dynamic: bool = True
) -> LossScaleManager:
    """Return the loss-scale manager that the arguments describe."""
    _refuse_number(spec)
    if not settings.flag("dynamic", dynamic):
        if spec != "dynamic" or initial_scale is None or dynamic_growth_steps is not None:
            raise ValueError(
                "dynamic=False asks for a fixed scale: pass it as initial_scale, without loss_scale_manager and "
                "dynamic_growth_steps; or write tfmp.LossScaleOptimizer(optimizer, tfmp.FixedLossScaleManager(scale))."
            )
        return get_loss_scale_manager(settings.number("initial_scale", initial_scale))
    rule: dict[str, Any] = {"initial_scale": initial_scale, "dynamic_growth_steps": dynamic_growth_steps}
    given = {name: value for name, value in rule.items() if value is not None}
    if spec == "fixed" and list(given) == ["initial_scale"]:
        return get_loss_scale_manager(settings.number("initial_scale", given["initial_scale"]))
    if given and spec != "dynamic":
        raise ValueError(
            f"loss_scale_manager={spec!r} decides the scale by settings of its own: leave out "
            "initial_scale and dynamic_growth_steps, or the manager."
        )
    return dynamic_manager(**given) if given else get_loss_scale_manager(spec)


def _refuse_number(loss_scale_manager: object) -> None:
    """Raise `TypeError` for what is no manager; a number is a first scale to Keras 3, and a fixed scale to TF1."""
    if isinstance(loss_scale_manager, LossScaleManager | str | Mapping):
        return
    settings.refuse_class("loss_scale_manager", loss_scale_manager)
    cure, given = "", loss_scale_manager
    if settings.is_number(given) or tf.is_tensor(given) or hasattr(given, "__array__"):
        scale = repr(given) if type(given) in {int, float} else "number"
        cure = (
            f": write initial_scale={scale} for a dynamic scale that starts there, or "
            f"tfmp.FixedLossScaleManager({scale}) for a fixed scale"
        )
    raise TypeError(
        f'loss_scale_manager must be a tfmp.LossScaleManager, a name such as "dynamic", or a dict, got {given!r}{cure}.'
    )
