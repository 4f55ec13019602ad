"""Continues from the loss scale of Keras' own LossScaleOptimizer."""

import functools
import logging
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from tfmp.core.managers import FixedLossScaleManager, LossScaleManager, dynamic_manager

_logger = logging.getLogger("tfmp")


def continue_at(manager: LossScaleManager, loss_scale: float, good_steps: int) -> None:
    """Let a manager continue from the scale and the count of finite steps of Keras' own wrapper.

    This calls `continue_from(loss_scale, good_steps)`, which a manager of the user's own may also have, or warns.
    """
    continue_from = getattr(manager, "continue_from", None)
    if continue_from is None:
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


class ScaleOfKeras(tf.Module):
    """Holds a manager's scale in checkpoints where Keras 2's own legacy wrapper has its own, in `loss_scale`.

    `continue_at` is called with the scale and the count of finite steps of a checkpoint that this is restored from.
    """

    def __init__(self, manager: LossScaleManager, continue_at: Callable[[float, int], None]) -> None:
        super().__init__()
        received: dict[str, Any] = {}

        def receive(name: str, value: tf.Tensor) -> None:
            received[name] = value
            if len(received) == len(parts):
                continue_at(float(received.pop("current_loss_scale")), int(received.pop("good_steps")))

        def good_steps() -> tf.Tensor:
            return tf.constant(int(manager.state_dict().get("good_steps", 0)), tf.int64)

        parts = {"current_loss_scale": manager.get_loss_scale, "good_steps": good_steps}
        self.current_loss_scale, self.good_steps = (
            InCheckpoint(read, functools.partial(receive, name)) for name, read in parts.items()
        )

    def _trackable_children(self, save_type: str = "checkpoint", **kwargs: Any) -> dict[str, Any]:  # noqa: ANN401
        # A SavedModel would contain graphs of the functions that save and restore, and in a graph there are no numbers.
        is_readable = save_type == "checkpoint" and tf.executing_eagerly()
        return super()._trackable_children(save_type, **kwargs) if is_readable else {}


class InCheckpoint(tf.Module):
    """A value that checkpoints hold like that of a variable; `receive` is called with a restored one."""

    def __init__(self, read: Callable[[], tf.Tensor], receive: Callable[[tf.Tensor], None]) -> None:
        super().__init__()
        self._read = read
        self._receive = receive

    def _serialize_to_tensors(self) -> dict[str, tf.Tensor]:
        return {_VALUE: self._read()}

    def _restore_from_tensors(self, restored: Mapping[str, tf.Tensor]) -> None:
        self._receive(restored[_VALUE])


#: The name that every variable of TensorFlow has for its value.
_VALUE = "VARIABLE_VALUE"
