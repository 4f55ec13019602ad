"""Continues from the loss scale of Keras' own LossScaleOptimizer."""

import functools
import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from tfmp.core.managers import FixedLossScaleManager, LossScaleManager, dynamic_manager
from tfmp.core.storage.in_checkpoint import InCheckpoint

_logger = logging.getLogger("tfmp")


def continue_at(manager: LossScaleManager, loss_scale: float, good_steps: int) -> None:
    """Let a manager continue from the scale and the count of finite steps of Keras' own wrapper.

    This calls `continue_from(loss_scale, good_steps)`, which a manager of the user's own may also have, or warns.
    """
    continue_from = getattr(manager, "continue_from", None)
    if continue_from is None:
        # Such a manager's own checkpoints, around a legacy optimizer, have the scale in this place too.
        if float(manager.get_loss_scale()) == loss_scale:
            return
        _logger.warning(
            "the loss scale %g of Keras' own LossScaleOptimizer is not taken over: %s has no method continue_from.",
            loss_scale,
            type(manager).__name__,
        )
        return
    continue_from(loss_scale, good_steps)


def nearest_allowed(loss_scale: float) -> float:
    """Return the scale nearest to that of Keras' own wrapper that a manager can hold, from 1 to the largest float32.

    Keras' own scale has no such bounds: it can reach 0.
    """
    return float(np.clip(loss_scale, 1, np.finfo(np.float32).max))


def manager_from_keras2(optimizer: Any) -> LossScaleManager:  # noqa: ANN401 - of either package
    """Return a manager that goes on where Keras 2's own wrapper stopped."""
    scale = nearest_allowed(optimizer.initial_scale)
    if not optimizer.dynamic:
        return FixedLossScaleManager(scale)
    manager = dynamic_manager(scale, optimizer.dynamic_growth_steps)
    continue_at(manager, float(optimizer.loss_scale), int(optimizer.dynamic_counter))
    return manager


def values_of_keras(
    continue_at: Callable[[float, int], None],
    loss_scale: Callable[[], tf.Tensor],
    good_steps: Callable[[], tf.Tensor],
) -> tuple[InCheckpoint, InCheckpoint]:
    """Return the scale and the count of finite steps as checkpoints of Keras' own wrapper hold them.

    `continue_at` is called when a checkpoint with both is restored; the other two functions return what is saved.
    """
    restored: dict[str, tf.Tensor] = {}

    def restore(name: str, value: tf.Tensor) -> None:
        restored[name] = value
        if len(restored) == 2:
            continue_at(float(restored.pop("loss_scale")), int(restored.pop("good_steps")))

    return (
        InCheckpoint(loss_scale, functools.partial(restore, "loss_scale")),
        InCheckpoint(good_steps, functools.partial(restore, "good_steps")),
    )


class ScaleOfKeras(tf.Module):
    """Holds a manager's scale in checkpoints where Keras 2's own legacy wrapper has its own, in `loss_scale`.

    `continue_at` is called with the scale and the count of finite steps of a checkpoint that this is restored from.
    """

    def __init__(self, manager: LossScaleManager, continue_at: Callable[[float, int], None]) -> None:
        super().__init__()

        def good_steps() -> tf.Tensor:
            return tf.constant(int(manager.state_dict().get("good_steps", 0)), tf.int64)

        values = values_of_keras(continue_at, manager.get_loss_scale, good_steps)
        self.current_loss_scale, self.good_steps = values

    def _trackable_children(self, save_type: str = "checkpoint", **kwargs: Any) -> dict[str, Any]:  # noqa: ANN401
        # A SavedModel would contain graphs of the functions that save and restore, and in a graph there are no numbers.
        is_readable = save_type == "checkpoint" and tf.executing_eagerly()
        return super()._trackable_children(save_type, **kwargs) if is_readable else {}
