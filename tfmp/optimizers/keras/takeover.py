"""Continues from the loss scale of Keras' own LossScaleOptimizer."""

import functools
import logging
from typing import Any

import numpy as np
import tensorflow as tf

from tfmp.core.managers import FixedLossScaleManager, LossScaleManager, dynamic_manager
from tfmp.core.storage.state_variables import InCheckpoint

_logger = logging.getLogger("tfmp")


def continue_at(manager: LossScaleManager, loss_scale: float, good_steps: int) -> None:
    """Let a manager continue from the scale and the count of Keras' own wrapper, if it has `continue_from`; or warn."""
    continue_from = getattr(manager, "continue_from", None)
    if continue_from is not None:
        continue_from(loss_scale, good_steps)
    elif float(manager.get_loss_scale()) != loss_scale:
        # Such a manager's own checkpoints, around a legacy optimizer, have the scale in this place too.
        _logger.warning(
            "the loss scale %g of Keras' own LossScaleOptimizer is not taken over: %s has no method continue_from.",
            loss_scale,
            type(manager).__name__,
        )


def nearest_allowed(loss_scale: float) -> float:
    """Return the nearest scale from 1 to the largest float32: that of Keras' own wrapper can reach 0."""
    return float(np.clip(loss_scale, 1, np.finfo(np.float32).max))


def manager_from_keras2(optimizer: Any) -> LossScaleManager:  # noqa: ANN401 - of either package
    """Return a manager that goes on where Keras 2's own wrapper stopped."""
    scale = nearest_allowed(optimizer.initial_scale)
    if not optimizer.dynamic:
        return FixedLossScaleManager(scale)
    manager = dynamic_manager(scale, optimizer.dynamic_growth_steps)
    continue_at(manager, float(optimizer.loss_scale), int(optimizer.dynamic_counter))
    return manager


class ScaleOfKeras(tf.Module):
    """Holds a manager's scale and count of finite steps in checkpoints as Keras' own wrappers do, and restores them."""

    def __init__(self, manager: LossScaleManager) -> None:
        super().__init__()
        restored: dict[str, tf.Tensor] = {}

        def restore(name: str, value: tf.Tensor) -> None:
            restored[name] = value
            if len(restored) == 2:
                continue_at(manager, float(restored.pop("loss_scale")), int(restored.pop("good_steps")))

        def good_steps() -> tf.Tensor:
            return tf.constant(int(manager.state_dict().get("good_steps", 0)), tf.int64)

        # The names in the `loss_scale` of Keras 2's own wrappers.
        self.current_loss_scale = InCheckpoint(manager.get_loss_scale, functools.partial(restore, "loss_scale"))
        self.good_steps = InCheckpoint(good_steps, functools.partial(restore, "good_steps"))

    def _trackable_children(self, save_type: str = "checkpoint", **kwargs: Any) -> dict[str, Any]:  # noqa: ANN401
        # A SavedModel would contain graphs of the functions that save and restore, and in a graph there are no numbers.
        is_readable = save_type == "checkpoint" and tf.executing_eagerly()
        return super()._trackable_children(save_type, **kwargs) if is_readable else {}
