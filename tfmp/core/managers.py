"""Loss-scale managers: what decides the loss scale.

A manager is a pure rule on a small state, and the variables that hold the state. `next_state` is the rule; nothing
else computes a scale.
"""

import abc
import functools
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from tfmp.core import settings
from tfmp.core.outcomes import NO_STEPS, StepOutcomes, next_outcomes
from tfmp.core.state import OncePerGraph, StateVariables
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


class LossScaleManager(tf.Module, abc.ABC):
    """Decides the loss scale; the interface of `tf.contrib.mixed_precision.LossScaleManager`.

    A manager of your own overrides `get_loss_scale` and `update_loss_scale`, and is then taken wherever the ones
    here are. Counting steps is done for it.

    Example:
        >>> class AlwaysEight(LossScaleManager):
        ...     def get_loss_scale(self):
        ...         return tf.constant(8.0)
        ...     def update_loss_scale(self, finite_grads):
        ...         return tf.no_op()
        >>> float(AlwaysEight().get_loss_scale())
        8.0
    """

    @abc.abstractmethod
    def get_loss_scale(self) -> tf.Tensor:
        """Return the loss scale, a float32 scalar: a tensor to fetch in graph mode, a value in eager mode.

        It is 1 or more: by less, unscaling could make a gradient infinite that was checked before.
        """

    @abc.abstractmethod
    def update_loss_scale(self, finite_grads: tf.Tensor) -> tf.Operation:
        """Take note of a step.

        Args:
            finite_grads: A boolean scalar, whether the gradients were finite on every replica.

        Returns:
            The op that does it; None in eager mode.
        """

    def get_step_outcomes(self) -> StepOutcomes:
        """Return how many steps were applied and skipped since the session, or the eager program, began.

        They are in no checkpoint (which holds what tf.contrib's held, no more) and need no initializer.

        Returns:
            A `StepOutcomes` of scalars.

        Example:
            >>> int(FixedLossScaleManager(128.0).get_step_outcomes().applied_steps)
            0
        """
        return self._outcomes.read()

    def note_step(self, finite: tf.Tensor) -> tf.Operation:
        """Count a step; the optimizer calls it, beside `update_loss_scale`.

        Args:
            finite: A boolean scalar, whether the step was applied.

        Returns:
            The op that counts it; None in eager mode.
        """
        return self._outcomes.assign(next_outcomes(self._outcomes.read(), finite))

    def get_config(self) -> dict[str, Any]:
        """Return the constructor's arguments, as Keras saves them with a model.

        Raises:
            NotImplementedError: The class does not say; a manager of your own overrides this to be saved.
        """
        raise NotImplementedError(f"{type(self).__name__} has no get_config, which saving a model needs.")

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "LossScaleManager":
        """Make a manager from what `get_config` returned.

        Args:
            config: The constructor's arguments.
        """
        return cls(**config)

    def store_in(self, add_variable: AddVariable) -> None:
        """Keep the eager state in variables that a host makes: Keras saves those of its optimizers.

        Args:
            add_variable: Makes a variable from its name and its initial value, a NumPy scalar.

        Raises:
            ValueError: Another host keeps the state already.
        """
        self._outcomes.store_in(add_variable)

    @functools.cached_property
    def _outcomes(self) -> StateVariables[StepOutcomes]:
        # Made on first use: the managers that users wrote for tf.contrib never call this class' constructor.
        return StateVariables(NO_STEPS, saved=False)


class FixedLossScaleManager(LossScaleManager):
    """A loss scale that never changes. Steps that overflow are still skipped.

    Choose it when a good scale is known. Where it is not, `ExponentialUpdateLossScaleManager` finds one.

    Args:
        loss_scale: The scale, a finite number of at least 1.

    Raises:
        TypeError: The scale is not a number.
        ValueError: The scale is out of range.

    Example:
        >>> float(FixedLossScaleManager(1024).get_loss_scale())
        1024.0

    Source: tf.contrib.mixed_precision, with its name and arguments.
    """

    def __init__(self, loss_scale: float) -> None:
        super().__init__()
        self._setting = _checked_scale("loss_scale", loss_scale)
        self._loss_scale = OncePerGraph(lambda: tf.constant(self._setting))
        self._loss_scale.get()

    def get_config(self) -> dict[str, Any]:
        """Return the constructor's arguments."""
        return {"loss_scale": float(self._setting)}

    def get_loss_scale(self) -> tf.Tensor:
        """Return the loss scale, a float32 scalar."""
        return self._loss_scale.get()

    def update_loss_scale(self, finite_grads: tf.Tensor) -> tf.Operation:
        """Do nothing: the scale is fixed."""
        del finite_grads
        return tf.no_op()


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
        self._init_loss_scale = _checked_scale("init_loss_scale", init_loss_scale)
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


def _checked_scale(name: str, value: float) -> np.float32:
    # Judged as float32, the type it is kept in: 1e39 is infinite there.
    with np.errstate(over="ignore"):
        scale = np.float32(settings.number(name, value))
    if not (np.isfinite(scale) and scale >= 1):
        raise ValueError(f"{name} must be a float32 number of at least 1, got {value!r}.")
    return scale
