"""The manager of tf.contrib: the scale grows while gradients are finite, and shrinks when they overflow."""

from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from tfmp.core import settings
from tfmp.core.managers.base import LossScaleManager
from tfmp.core.state import StateVariables
from tfmp.types import AddVariable


class LossScaleState(NamedTuple):
    """What a manager keeps; the names are those of tf.contrib's variables, and so of the checkpoint's keys.

    Attributes:
        loss_scale: The loss scale; float32.
        good_steps: Finite steps since the scale last changed or a step overflowed; int32.
        bad_steps: Overflowed steps since the scale last changed; int32.
    """

    loss_scale: tf.Tensor
    good_steps: tf.Tensor
    bad_steps: tf.Tensor


class ExponentialUpdateLossScaleManager(LossScaleManager):
    """A loss scale that grows while gradients are finite, and shrinks when they overflow.

    The rule, in float32, after each step:

        finite:      good += 1                if good reaches incr_every_n_steps:
                                                  scale *= incr_ratio, if that is finite;  good = bad = 0
        not finite:  bad += 1; good = 0       if bad reaches decr_every_n_nan_or_inf:
                                                  scale = max(1, scale * decr_ratio);      good = bad = 0

    Finite steps do not reset `bad`. The scale is never 0, infinite or NaN.

    In graph mode the state is held by the variables `loss_scale`, `good_steps` and `bad_steps`, made here; eagerly
    by `tf.Variable`s that `tf.train.Checkpoint(manager=manager)` saves.

    Args:
        init_loss_scale: The scale to start from, a finite number of at least 1. It may be far too high: each
            `decr_every_n_nan_or_inf` skipped steps multiply it by `decr_ratio`. BERT scripts use 2**32.
        incr_every_n_steps: Finite steps in a row after which the scale grows. 1000 to 2000 is usual: growing costs
            about one skipped step.
        decr_every_n_nan_or_inf: Overflowed steps after which the scale shrinks. With more than 1 a single bad
            batch does not lower the scale.
        incr_ratio: What the scale is multiplied by to grow, more than 1.
        decr_ratio: What the scale is multiplied by to shrink, between 0 and 1. Powers of two keep the scaling
            exact.

    Raises:
        TypeError: A setting is not a number.
        ValueError: A setting is out of range.

    Example:
        >>> manager = ExponentialUpdateLossScaleManager(1024, incr_every_n_steps=2, decr_ratio=0.5)
        >>> for finite in [True, True, False, False, False, False]:
        ...     _ = manager.update_loss_scale(tf.constant(finite))
        ...     print(float(manager.get_loss_scale()), end=" ")
        1024.0 2048.0 2048.0 1024.0 1024.0 512.0

    Source: tf.contrib.mixed_precision, with its names, arguments and numbers.
    """

    def __init__(
        self,
        init_loss_scale: float,
        incr_every_n_steps: int,
        decr_every_n_nan_or_inf: int = 2,
        incr_ratio: float = 2,
        decr_ratio: float = 0.8,
    ) -> None:
        super().__init__()
        self._init_loss_scale = settings.loss_scale("init_loss_scale", init_loss_scale)
        self._incr_every_n_steps = settings.count("incr_every_n_steps", incr_every_n_steps)
        self._decr_every_n_nan_or_inf = settings.count("decr_every_n_nan_or_inf", decr_every_n_nan_or_inf)
        self._incr_ratio = settings.number("incr_ratio", incr_ratio)
        if not self._incr_ratio > 1:
            raise ValueError(f"incr_ratio must be greater than 1, got {incr_ratio!r}.")
        self._decr_ratio = settings.number("decr_ratio", decr_ratio)
        if not 0 < self._decr_ratio < 1:
            raise ValueError(f"decr_ratio must lie between 0 and 1, got {decr_ratio!r}.")
        self.state = StateVariables(LossScaleState(self._init_loss_scale, np.int32(0), np.int32(0)), saved=True)
        self.state.create()

    def get_config(self) -> dict[str, Any]:
        """Return the constructor's arguments."""
        return {
            "init_loss_scale": float(self._init_loss_scale),
            "incr_every_n_steps": self._incr_every_n_steps,
            "decr_every_n_nan_or_inf": self._decr_every_n_nan_or_inf,
            "incr_ratio": self._incr_ratio,
            "decr_ratio": self._decr_ratio,
        }

    @property
    def skips_per_backoff(self) -> int:
        """After how many skipped steps in a row the scale shrinks."""
        return self._decr_every_n_nan_or_inf

    def get_loss_scale(self) -> tf.Tensor:
        """Return the loss scale, a float32 scalar."""
        return self.state.read().loss_scale

    def update_loss_scale(self, finite_grads: tf.Tensor) -> tf.Operation:
        """Move the state by one step.

        Args:
            finite_grads: A boolean scalar, whether the gradients were finite on every replica.

        Returns:
            The op that moves it; None in eager mode.
        """
        # The original branched here, and its scope shows in the names of what comes after: in a GAN the second
        # Adam's powers are `cond_2/beta1_power` in every old checkpoint. The variables stay outside that scope.
        self.state.create()
        with tf.name_scope("cond"):
            return self.state.assign(self.next_state(self.state.read(), finite_grads))

    def store_in(self, add_variable: AddVariable) -> None:
        """Keep the scale's own state there too; see `LossScaleManager.store_in`."""
        self.state.store_in(add_variable)
        super().store_in(add_variable)

    def next_state(self, state: LossScaleState, finite: tf.Tensor) -> LossScaleState:
        """Return the state after one step; a pure function.

        Args:
            state: The state before it.
            finite: A boolean scalar, whether the gradients were finite on every replica.

        Returns:
            The state after it.
        """
        good = tf.where(finite, state.good_steps + 1, 0)
        bad = tf.where(finite, state.bad_steps, state.bad_steps + 1)
        grow = tf.logical_and(finite, good >= self._incr_every_n_steps)
        shrink = tf.logical_and(tf.logical_not(finite), bad >= self._decr_every_n_nan_or_inf)
        changed = tf.logical_or(grow, shrink)

        grown = state.loss_scale * self._incr_ratio
        grown = tf.where(tf.math.is_finite(grown), grown, state.loss_scale)
        shrunk = tf.maximum(1.0, state.loss_scale * self._decr_ratio)
        return LossScaleState(
            loss_scale=tf.where(grow, grown, tf.where(shrink, shrunk, state.loss_scale)),
            good_steps=tf.where(changed, 0, good),
            bad_steps=tf.where(changed, 0, bad),
        )
