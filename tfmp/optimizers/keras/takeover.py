"""Continues from the loss scale of Keras' own LossScaleOptimizer."""

import logging

import numpy as np

from tfmp.core.managers import LossScaleManager

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
