"""The manager of tf.contrib: the scale grows while gradients are finite, and shrinks when they overflow."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from tfmp.core import settings
from tfmp.core.managers.base import LossScaleManager
from tfmp.core.state import StateVariables
from tfmp.types import AddVariable

_LARGEST = float(np.finfo(np.float32).max)


class LossScaleState(NamedTuple):
    """What a manager keeps; the names are those of tf.contrib's variables, and so of the checkpoint's keys.

    Attributes:
        loss_scale: The loss scale; float32.
        good_steps: Finite steps since the scale last changed or a step overflowed; int32.
        bad_steps: Overflowed steps since the scale last changed; int32. Below 0 while hysteresis forgives them.
    """

    loss_scale: tf.Tensor
    good_steps: tf.Tensor
    bad_steps: tf.Tensor


class TolerantLossScaleState(NamedTuple):
    """What a manager with a tolerance keeps.

    Attributes:
        loss_scale: As in `LossScaleState`.
        good_steps: As in `LossScaleState`.
        bad_steps: As in `LossScaleState`.
        steps_since_change: All steps since the scale last changed; int32.
    """

    loss_scale: tf.Tensor
    good_steps: tf.Tensor
    bad_steps: tf.Tensor
    steps_since_change: tf.Tensor


class ExponentialUpdateLossScaleManager(LossScaleManager):
    """A loss scale that grows while gradients are finite, and shrinks when they overflow.

    The rule, in float32, after each step:

        finite:      good += 1                if good reaches incr_every_n_steps:
                                                  scale *= incr_ratio, if that is finite;  good = bad = 0
        not finite:  bad += 1; good = 0       if bad reaches decr_every_n_nan_or_inf:
                                                  scale = max(1, scale * decr_ratio);      good = bad = 0

    Finite steps do not reset `bad`. The keyword-only settings change this rule; without them it is tf.contrib's:

        max_loss_scale          scale = min(max_loss_scale, scale * incr_ratio) where it grows
        min_loss_scale          scale = max(min_loss_scale, scale * decr_ratio) where it shrinks
        hysteresis              bad = 1 - hysteresis at the start and where the scale grows; 0 where it shrinks
        consecutive_hysteresis  bad = 1 - hysteresis at every finite step
        tolerance               it shrinks only if also bad / steps >= tolerance; all steps since it last changed

    The scale is never 0, infinite or NaN. One from elsewhere, as a checkpoint of another program may hold, is brought
    within the bounds by the next step, before that step counts: what is too low becomes `min_loss_scale`, what is too
    high or infinite `max_loss_scale`, and NaN `init_loss_scale`.

    In graph mode the state is held by the variables `loss_scale`, `good_steps` and `bad_steps`, made here, and with a
    tolerance `steps_since_change`; eagerly by `tf.Variable`s that `tf.train.Checkpoint(manager=manager)` saves.

    Args:
        init_loss_scale: The scale to start from, within the bounds. It may be far too high: each
            `decr_every_n_nan_or_inf` skipped steps multiply it by `decr_ratio`. BERT scripts use 2**32.
        incr_every_n_steps: Finite steps in a row after which the scale grows. 1000 to 2000 is usual: growing costs
            about one skipped step.
        decr_every_n_nan_or_inf: Overflowed steps after which the scale shrinks. With more than 1 a single bad
            batch does not lower the scale.
        incr_ratio: What the scale is multiplied by to grow, more than 1.
        decr_ratio: What the scale is multiplied by to shrink, between 0 and 1. Powers of two keep the scaling
            exact.
        min_loss_scale: The lowest scale, at least 2**-126. Below 1 it helps gradients that overflow unscaled.
        max_loss_scale: The highest scale; by default what float32 holds.
        hysteresis: Overflowed steps until the first back-off after the scale grew, if those after it need one each.
            `hysteresis - 1` overflows are forgiven; once they are used up, none is until the scale grows again.
        consecutive_hysteresis: Whether every finite step also gives the hysteresis back. Then only overflows in a row
            lower the scale.
        tolerance: The share of overflowed steps, among those since the scale last changed, from which on it shrinks;
            at least 0 and below 1. Overflows that hysteresis forgave are no part of the share.

    Raises:
        TypeError: A setting is not a number.
        ValueError: A setting is out of range.

    Example:
        >>> manager = ExponentialUpdateLossScaleManager(1024, incr_every_n_steps=2, decr_ratio=0.5)
        >>> for finite in [True, True, False, False, False, False]:
        ...     _ = manager.update_loss_scale(tf.constant(finite))
        ...     print(float(manager.get_loss_scale()), end=" ")
        1024.0 2048.0 2048.0 1024.0 1024.0 512.0

    Source: tf.contrib.mixed_precision, with its names, arguments and numbers; hysteresis after Megatron-LM and
    DeepSpeed, whose rule it is with `decr_every_n_nan_or_inf=1`; the tolerance after fairseq.
    """

    def __init__(
        self,
        init_loss_scale: float,
        incr_every_n_steps: int,
        decr_every_n_nan_or_inf: int = 2,
        incr_ratio: float = 2,
        decr_ratio: float = 0.8,
        *,
        min_loss_scale: float = 1,
        max_loss_scale: float | None = None,
        hysteresis: int = 1,
        consecutive_hysteresis: bool = False,
        tolerance: float = 0,
    ) -> None:
        super().__init__()
        self._max_loss_scale = max_loss_scale
        self._init_loss_scale, self._lowest, self._highest = settings.loss_scale_bounds(
            init_loss_scale, min_loss_scale, _LARGEST if max_loss_scale is None else max_loss_scale
        )
        self._incr_every_n_steps = settings.count("incr_every_n_steps", incr_every_n_steps)
        self._decr_every_n_nan_or_inf = settings.count("decr_every_n_nan_or_inf", decr_every_n_nan_or_inf)
        self._incr_ratio = settings.number("incr_ratio", incr_ratio)
        if not self._incr_ratio > 1:
            raise ValueError(f"incr_ratio must be greater than 1, got {incr_ratio!r}.")
        self._decr_ratio = settings.number("decr_ratio", decr_ratio)
        if not 0 < self._decr_ratio < 1:
            raise ValueError(f"decr_ratio must lie between 0 and 1, got {decr_ratio!r}.")
        self._hysteresis = settings.count("hysteresis", hysteresis)
        self._consecutive_hysteresis = settings.flag("consecutive_hysteresis", consecutive_hysteresis)
        self._tolerance = settings.below_1("tolerance", tolerance)
        self._initial_state = self._state_to_start_from()
        # Of either kind of state.
        self.state: StateVariables[Any] = StateVariables(self._initial_state, saved=True)
        self.state.create()

    def _state_to_start_from(self) -> LossScaleState | TolerantLossScaleState:
        state = LossScaleState(self._init_loss_scale, np.int32(0), np.int32(1 - self._hysteresis))
        return TolerantLossScaleState(*state, steps_since_change=np.int32(0)) if self._tolerance else state

    def get_config(self) -> dict[str, Any]:
        """Return the constructor's arguments."""
        return {
            "init_loss_scale": float(self._init_loss_scale),
            "incr_every_n_steps": self._incr_every_n_steps,
            "decr_every_n_nan_or_inf": self._decr_every_n_nan_or_inf,
            "incr_ratio": self._incr_ratio,
            "decr_ratio": self._decr_ratio,
            "min_loss_scale": float(self._lowest),
            "max_loss_scale": None if self._max_loss_scale is None else float(self._highest),
            "hysteresis": self._hysteresis,
            "consecutive_hysteresis": self._consecutive_hysteresis,
            "tolerance": self._tolerance,
        }

    @property
    def lowest_loss_scale(self) -> float:
        """The scale that the manager never goes below."""
        return float(self._lowest)

    @property
    def skips_per_backoff(self) -> int | None:
        """After how many skipped steps in a row the scale shrinks, at most: after growth, hysteresis comes on top.

        None with a tolerance: there it depends on the steps before.
        """
        return None if self._tolerance else self._decr_every_n_nan_or_inf + self._hysteresis - 1

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

    def set_loss_scale(self, loss_scale: float | tf.Tensor) -> tf.Operation:
        """Set the scale; the steps that count towards its next change stay.

        Args:
            loss_scale: The scale, within the bounds; a number, or a scalar tensor.

        Returns:
            The op that sets it; None in eager mode.

        Raises:
            TypeError: It is no number.
            ValueError: It is not finite, or not within the bounds. A tensor of a graph is an error when the op runs.

        Example:
            >>> manager = ExponentialUpdateLossScaleManager(1024, incr_every_n_steps=2)
            >>> manager.set_loss_scale(4096)
            >>> float(manager.get_loss_scale())
            4096.0
        """
        if tf.is_tensor(loss_scale):
            loss_scale = tf.cast(tf.convert_to_tensor(loss_scale), tf.float32)
        known = tf.get_static_value(loss_scale) if tf.is_tensor(loss_scale) else loss_scale
        checks = []
        if known is not None:
            number = known.item() if isinstance(known, np.ndarray | np.generic) and known.size == 1 else known
            loss_scale = settings.loss_scale("loss_scale", number, least=float(self._lowest))
            if loss_scale > self._highest:
                raise ValueError(f"loss_scale must not be greater than max_loss_scale, got {number!r}.")
        else:
            # NaN is not within them either.
            within = tf.logical_and(loss_scale >= self._lowest, loss_scale <= self._highest)
            checks = [
                tf.debugging.Assert(within, ["the new loss scale is not within the manager's bounds:", loss_scale])
            ]
        with tf.control_dependencies(checks):
            return self.state.assign(self.state.read()._replace(loss_scale=tf.identity(loss_scale)))

    def continue_from(self, loss_scale: float, good_steps: int = 0, bad_steps: int = 0) -> tf.Operation:
        """Go on where another program stopped; steps since the scale changed are counted anew.

        Args:
            loss_scale: The scale. Also 0, infinity or NaN is brought within the bounds, as the class tells.
            good_steps: Finite steps in a row.
            bad_steps: Overflowed steps since the scale last changed. Down to `1 - hysteresis`, which forgives all that
                hysteresis can; 0 forgives none.

        Returns:
            The op that sets the state; None in eager mode.

        Raises:
            TypeError: One is no number.
            ValueError: A number of steps is out of range.

        Example:
            >>> manager = ExponentialUpdateLossScaleManager(1024, incr_every_n_steps=2)
            >>> manager.continue_from(4096, good_steps=1)
            >>> _ = manager.update_loss_scale(tf.constant(True))
            >>> float(manager.get_loss_scale())
            8192.0
        """
        good = settings.count("good_steps", good_steps, least=0)
        bad = settings.count("bad_steps", bad_steps, least=1 - self._hysteresis)
        with np.errstate(over="ignore"):
            scale = np.float32(settings.real("loss_scale", loss_scale))
        state = self._initial_state._replace(
            loss_scale=self._within_bounds(tf.constant(scale)), good_steps=np.int32(good), bad_steps=np.int32(bad)
        )
        return self.state.assign(type(state)(*map(tf.convert_to_tensor, state)))

    def _validate_state(self, state_dict: Mapping[str, float]) -> None:
        scale = settings.loss_scale("loss_scale", state_dict["loss_scale"], least=float(self._lowest))
        if scale > self._highest:
            raise ValueError(f"loss_scale must not be greater than max_loss_scale, got {state_dict['loss_scale']!r}.")
        for name, least in {"good_steps": 0, "bad_steps": 1 - self._hysteresis, "steps_since_change": 0}.items():
            settings.count(name, state_dict.get(name, 0), least=least)

    def _state_to_save(self) -> StateVariables[Any]:
        return self.state

    def store_in(self, add_variable: AddVariable) -> None:
        """Keep the scale's own state there too; see `LossScaleManager.store_in`."""
        self.state.store_in(add_variable)
        super().store_in(add_variable)

    def next_state(self, state: Any, finite: tf.Tensor) -> Any:  # noqa: ANN401 - of either kind of state
        """Return the state after one step; a pure function, of each element by itself.

        Args:
            state: The state before it, a `LossScaleState`; with a tolerance a `TolerantLossScaleState`.
            finite: A boolean scalar, whether the gradients were finite on every replica.

        Returns:
            The state after it, of the same kind.
        """
        forgiving = 1 - self._hysteresis
        good = tf.where(finite, state.good_steps + 1, 0)
        bad_if_finite = forgiving if self._consecutive_hysteresis else state.bad_steps
        bad = tf.where(finite, bad_if_finite, state.bad_steps + 1)
        grow = tf.logical_and(finite, good >= self._incr_every_n_steps)
        shrink = tf.logical_and(tf.logical_not(finite), bad >= self._decr_every_n_nan_or_inf)
        if self._tolerance:
            steps = state.steps_since_change + 1
            # In float64, where 1 / 20 is 0.05.
            shrink = tf.logical_and(shrink, bad / steps >= self._tolerance)
            state = state._replace(steps_since_change=tf.where(tf.logical_or(grow, shrink), 0, steps))

        scale = self._within_bounds(state.loss_scale)
        grown = self._grown(scale)
        shrunk = tf.maximum(self._lowest, scale * self._decr_ratio)
        return state._replace(
            loss_scale=tf.where(grow, grown, tf.where(shrink, shrunk, scale)),
            good_steps=tf.where(tf.logical_or(grow, shrink), 0, good),
            bad_steps=tf.where(grow, forgiving, tf.where(shrink, 0, bad)),
        )

    def _grown(self, scale: tf.Tensor) -> tf.Tensor:
        grown = scale * self._incr_ratio
        if self._max_loss_scale is not None:
            return tf.minimum(self._highest, grown)
        return tf.where(tf.math.is_finite(grown), grown, scale)

    def _within_bounds(self, scale: tf.Tensor) -> tf.Tensor:
        within = tf.minimum(tf.maximum(scale, self._lowest), self._highest)
        return tf.where(tf.math.is_nan(scale), self._init_loss_scale, within)
