"""The manager that predicts the largest gradient from those before."""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from tfmp.core import settings
from tfmp.core.managers.base import LossScaleManager
from tfmp.core.state import StateVariables
from tfmp.types import AddVariable

# Of a float32.
_FRACTION_BITS, _EXPONENT_BIAS = 23, 127

_MOST_OBSERVATIONS = 2**30

# Float32 holds the square root of any variance, times as many.
_MOST_DEVIATIONS = 1000


class LogMaxState(NamedTuple):
    """What the manager keeps.

    Attributes:
        loss_scale: The loss scale, a power of two; float32.
        log_mean: Moving mean of x = log2(max_abs); float32.
        log_variance: Moving mean of the squared error of predicting x by that mean; float32.
        observations: How many x there were; int32.
        margin: How many powers of two the scale stays below what mean and variance propose; int32.
        good_steps: Finite steps since the margin last changed; int32.
    """

    loss_scale: tf.Tensor
    log_mean: tf.Tensor
    log_variance: tf.Tensor
    observations: tf.Tensor
    margin: tf.Tensor
    good_steps: tf.Tensor


class LogMaxLossScaleManager(LossScaleManager):
    """A loss scale that follows the magnitude of gradients, so that overflow is a rare event.

    The logarithm of the largest magnitude among a step's gradients moves slowly, with some deviation. The scale is put
    where a value some deviations above the mean still does not overflow. It then follows gradients that grow before
    they overflow, and those that shrink without a search. The rule after each step:

        finite, 0 < max_abs < infinity:  x = log2(max_abs); n += 1
                                         variance += ((x - mean)**2 - variance) * max(1 - deviation_decay, 1 / (n - 1))
                                         mean += (x - mean) * max(1 - mean_decay, 1 / n)
        finite:                          good += 1; if good reaches incr_every_n_steps:
                                             margin = max(0, margin - 1); good = 0
                                         once n > 0: scale = 2**(proposal - margin), at least min_loss_scale
        not finite:                      scale = max(min_loss_scale, scale / 2); good = 0
                                         once n > 0: margin = max(0, proposal - log2(scale))

        proposal                         floor(log2(limit) - mean - deviations * sqrt(variance)), in the bounds

    Until `1 / n` is as small as a moving mean's rate, the means are plain ones: nothing pulls them towards where they
    started. The variance is that of the error of the prediction, so that drift counts too; the first x has none. An
    overflow tells nothing of the magnitude, so it leaves the statistics alone: it costs one back-off, and the margin
    remembers that they were too hopeful. Overflows before the first x leave no margin. The proposal is taken within
    the bounds before the margin is, since a margin beyond them would be felt later. Gradients that are all 0 tell
    nothing either; nor does a magnitude below 2**-126, which processors may take for 0.

    The scale is always a power of two, and never 0, infinite or NaN. One from elsewhere is brought within the bounds by
    the next step: NaN becomes `init_loss_scale`, and what is no power of two the next lower one. Statistics that are
    not finite are forgotten.

    Args:
        init_loss_scale: The scale before the first finite step, a power of two within the bounds. If it is so low that
            all gradients vanish there is nothing to learn from, and it stays.
        limit: The largest magnitude that a scaled gradient may have. 65504 is the largest number in float16.
        deviations: How many deviations above the mean a gradient may be without overflow, from 0 to 1000.
        mean_decay: What of the mean is kept in a step, at least 0 and below 1. 0.99 averages about 100 steps.
        deviation_decay: The same for the variance. It should remember longer than the mean does.
        incr_every_n_steps: Finite steps in a row that take one from the margin.
        min_loss_scale: The lowest scale, a power of two, at least 2**-126.
        max_loss_scale: The highest scale, a power of two.

    Raises:
        TypeError: A setting is not a number.
        ValueError: A setting is out of range.

    Example:
        >>> manager = LogMaxLossScaleManager(init_loss_scale=2**20)
        >>> for max_abs in [math.inf, 4.0, 4.0, 0.0]:
        ...     finite = tf.constant(math.isfinite(max_abs))
        ...     _ = manager.update_loss_scale(finite, tf.constant(max_abs))
        ...     print(float(manager.get_loss_scale()), end=" ")
        524288.0 8192.0 8192.0 8192.0

    Source: the "LogMax" scaler of OpenSeq2Seq. There one overflow counts as a magnitude of 2**65536 and pins the scale
    at its minimum for thousands of steps, and one step without gradients makes it NaN for good.
    """

    needs_max_abs = True

    def __init__(
        self,
        *,
        init_loss_scale: float = 2**15,
        limit: float = 65504,
        deviations: float = 3,
        mean_decay: float = 0.99,
        deviation_decay: float = 0.999,
        incr_every_n_steps: int = 1000,
        min_loss_scale: float = 1,
        max_loss_scale: float = 2**24,
    ) -> None:
        super().__init__()
        scales = settings.loss_scale_bounds(init_loss_scale, min_loss_scale, max_loss_scale)
        for name, scale in zip(
            ("min_loss_scale", "max_loss_scale", "init_loss_scale"), (*scales[1:], scales[0]), strict=True
        ):
            if math.frexp(scale)[0] != 0.5:
                raise ValueError(f"{name} must be a power of two, got {float(scale)!r}.")
        self._init_loss_scale, self._lowest, self._highest = scales
        self._lowest_exponent, self._highest_exponent = (math.frexp(scale)[1] - 1 for scale in scales[1:])
        self._limit = settings.positive("limit", limit)
        self._deviations = settings.number("deviations", deviations)
        if not 0 <= self._deviations <= _MOST_DEVIATIONS:
            raise ValueError(f"deviations must lie between 0 and {_MOST_DEVIATIONS}, got {deviations!r}.")
        self._mean_decay = settings.below_1("mean_decay", mean_decay)
        self._deviation_decay = settings.below_1("deviation_decay", deviation_decay)
        self._incr_every_n_steps = settings.count("incr_every_n_steps", incr_every_n_steps)
        zero = np.float32(0), np.float32(0), np.int32(0), np.int32(0), np.int32(0)
        self._initial_state = LogMaxState(self._init_loss_scale, *zero)
        self.state = StateVariables(self._initial_state, saved=True)
        self.state.create()

    def get_config(self) -> dict[str, Any]:
        """Return the constructor's arguments."""
        return {
            "init_loss_scale": float(self._init_loss_scale),
            "limit": self._limit,
            "deviations": self._deviations,
            "mean_decay": self._mean_decay,
            "deviation_decay": self._deviation_decay,
            "incr_every_n_steps": self._incr_every_n_steps,
            "min_loss_scale": float(self._lowest),
            "max_loss_scale": float(self._highest),
        }

    @property
    def lowest_loss_scale(self) -> float:
        """The scale that the manager never goes below."""
        return float(self._lowest)

    @property
    def skips_per_backoff(self) -> int:
        """After how many skipped steps in a row the scale shrinks."""
        return 1

    def get_loss_scale(self) -> tf.Tensor:
        """Return the loss scale, a float32 scalar."""
        return self.state.read().loss_scale

    def update_loss_scale(self, finite_grads: tf.Tensor, max_abs: tf.Tensor | None = None) -> tf.Operation:
        """Move the state by one step.

        Args:
            finite_grads: A boolean scalar, whether the gradients were finite on every replica.
            max_abs: A float32 scalar, the largest magnitude among the unscaled gradients of all replicas. What it is
                on a step that overflowed does not matter.

        Returns:
            The op that moves it; None in eager mode.

        Raises:
            TypeError: `max_abs` is missing.
        """
        if max_abs is None:
            raise TypeError(
                "LogMaxLossScaleManager.update_loss_scale needs max_abs, got None: pass the largest magnitude among "
                "the step's unscaled gradients."
            )
        self.state.create()
        with tf.name_scope("cond"):  # As the manager of tf.contrib has it.
            return self.state.assign(self.next_state(self.state.read(), finite_grads, max_abs))

    def continue_from(self, loss_scale: float, good_steps: int = 0, bad_steps: int = 0) -> tf.Operation:
        """Go on from the scale of another program, as from `init_loss_scale`: statistics and margin begin anew.

        Args:
            loss_scale: The scale. It becomes the nearest power of two within the bounds, of two as near the lower one;
                what is not positive becomes `min_loss_scale`, infinity `max_loss_scale` and NaN `init_loss_scale`.
            good_steps: Finite steps in a row. Other rules go on from it; this one has no use for it, since there is no
                margin to take from.
            bad_steps: Overflowed steps since the scale last changed; no use either.

        Returns:
            The op that sets the state; None in eager mode.

        Raises:
            TypeError: One is no number.

        Example:
            >>> manager = LogMaxLossScaleManager()
            >>> manager.continue_from(3000)
            >>> float(manager.get_loss_scale())
            2048.0
        """
        scale = settings.real("loss_scale", loss_scale)
        for name, steps in {"good_steps": good_steps, "bad_steps": bad_steps}.items():
            settings.number(name, steps)
        nearest = self._init_loss_scale if math.isnan(scale) else np.float32(self._nearest_power_of_two(scale))
        state = self._initial_state._replace(loss_scale=nearest)
        return self.state.assign(LogMaxState(*map(tf.convert_to_tensor, state)))

    def _validate_state(self, state_dict: Mapping[str, float]) -> None:
        settings.loss_scale("loss_scale", state_dict["loss_scale"], least=settings.LOWEST_LOSS_SCALE)
        for name in ("log_mean", "log_variance"):
            settings.number(name, state_dict[name])
        for name in ("observations", "margin", "good_steps"):
            settings.count(name, state_dict[name], least=0)

    def _state_to_save(self) -> StateVariables[Any]:
        return self.state

    def store_in(self, add_variable: AddVariable) -> None:
        """Keep the scale's own state there too; see `LossScaleManager.store_in`."""
        self.state.store_in(add_variable)
        super().store_in(add_variable)

    def next_state(self, state: LogMaxState, finite: tf.Tensor, max_abs: tf.Tensor) -> LogMaxState:
        """Return the state after one step; a pure function, of each element by itself.

        Args:
            state: The state before it.
            finite: A boolean scalar, whether the gradients were finite on every replica.
            max_abs: A float32 scalar, the largest magnitude among the unscaled gradients.

        Returns:
            The state after it.
        """
        state = self._with_observation(self._mended(state), finite, max_abs)
        observed = state.observations > 0
        proposal = self._within_bounds(
            tf.math.floor(math.log2(self._limit) - state.log_mean - self._deviations * tf.sqrt(state.log_variance))
        )

        good = tf.where(finite, state.good_steps + 1, 0)
        regain = good >= self._incr_every_n_steps
        margin = tf.where(regain, tf.maximum(0, state.margin - 1), state.margin)
        exponent = _exponent(state.loss_scale)
        if_finite = tf.where(observed, tf.maximum(self._lowest_exponent, proposal - margin), exponent)
        backed_off = tf.maximum(self._lowest_exponent, exponent - 1)
        margin_if_not = tf.where(observed, tf.maximum(0, proposal - backed_off), 0)
        return state._replace(
            loss_scale=_power_of_two(tf.where(finite, if_finite, backed_off)),
            margin=tf.where(finite, margin, margin_if_not),
            good_steps=tf.where(regain, 0, good),
        )

    def _nearest_power_of_two(self, scale: float) -> float:
        fraction, exponent = math.frexp(min(max(scale, float(self._lowest)), float(self._highest)))
        # The fraction is at least 1/2.
        return math.ldexp(1, exponent - 1 if fraction <= 0.75 else exponent)

    def _mended(self, state: LogMaxState) -> LogMaxState:
        """Return a state whose values can be computed with, as all states are but those from elsewhere."""
        within = tf.minimum(tf.maximum(state.loss_scale, self._lowest), self._highest)
        known = tf.math.is_finite(state.log_mean) & tf.math.is_finite(state.log_variance) & (state.log_variance >= 0)
        return state._replace(
            loss_scale=tf.where(tf.math.is_nan(state.loss_scale), self._init_loss_scale, within),
            log_mean=tf.where(known, state.log_mean, 0.0),
            log_variance=tf.where(known, state.log_variance, 0.0),
            observations=tf.where(known, state.observations, 0),
            margin=tf.maximum(0, tf.minimum(state.margin, self._highest_exponent - self._lowest_exponent)),
        )

    def _with_observation(self, state: LogMaxState, finite: tf.Tensor, max_abs: tf.Tensor) -> LogMaxState:
        seen = finite & tf.math.is_finite(max_abs) & (max_abs >= settings.LOWEST_LOSS_SCALE)
        count = tf.minimum(state.observations + tf.cast(seen, tf.int32), _MOST_OBSERVATIONS)
        error = tf.where(seen, _log2(tf.where(seen, max_abs, 1.0)) - state.log_mean, 0.0)
        mean_rate = _rate(self._mean_decay, count)
        # The first x has no error. The mean is 0 before it.
        variance_rate = tf.where(seen & (count > 1), _rate(self._deviation_decay, count - 1), 0.0)
        return state._replace(
            log_mean=state.log_mean + error * mean_rate,
            log_variance=state.log_variance + (error * error - state.log_variance) * variance_rate,
            observations=count,
        )

    def _within_bounds(self, exponent: tf.Tensor) -> tf.Tensor:
        lowest, highest = float(self._lowest_exponent), float(self._highest_exponent)
        return tf.cast(tf.minimum(tf.maximum(exponent, lowest), highest), tf.int32)


def _rate(decay: float, count: tf.Tensor) -> tf.Tensor:
    return tf.maximum(1 - decay, 1 / tf.cast(tf.maximum(count, 1), tf.float32))


# By the bits of float32: `tf.pow` and `tf.math.log` round, and differ between processors and XLA.


def _exponent(value: tf.Tensor) -> tf.Tensor:
    bits = tf.bitcast(value, tf.int32)
    return tf.bitwise.right_shift(bits, _FRACTION_BITS) - _EXPONENT_BIAS


def _log2(value: tf.Tensor) -> tf.Tensor:
    exponent = _exponent(value)
    fraction = tf.bitwise.bitwise_and(tf.bitcast(value, tf.int32), 2**_FRACTION_BITS - 1)
    one_to_two = tf.bitcast(tf.bitwise.bitwise_or(fraction, _EXPONENT_BIAS << _FRACTION_BITS), tf.float32)
    return tf.cast(exponent, tf.float32) + tf.math.log(one_to_two) / math.log(2)


def _power_of_two(exponent: tf.Tensor) -> tf.Tensor:
    return tf.bitcast(tf.bitwise.left_shift(exponent + _EXPONENT_BIAS, _FRACTION_BITS), tf.float32)
