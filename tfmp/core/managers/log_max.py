"""The manager that predicts the largest gradient from the gradients of earlier steps."""

import math
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import tensorflow as tf

from tfmp.core import settings
from tfmp.core.managers.base import Setting, StatefulManager

# The bit layout of float32 in IEEE 754.
_FRACTION_BITS, _EXPONENT_BIAS = 23, 127

# The count of observations stops here, because int32 must not overflow.
_MOST_OBSERVATIONS = 2**30

# With at most this factor, deviations * sqrt(variance) stays finite in float32 for every variance.
_MOST_DEVIATIONS = 1000


class LogMaxState(NamedTuple):
    """The state of the manager; the class describes the rule that uses it."""

    #: A power of two; float32.
    loss_scale: tf.Tensor
    #: Moving mean of x = log2(max_abs); float32.
    log_mean: tf.Tensor
    #: Moving mean of the squared difference between x and the mean before it; float32.
    log_variance: tf.Tensor
    #: The number of values x that the mean and the variance contain; int32.
    observations: tf.Tensor
    #: The number of powers of two by which the scale stays below the proposal; int32.
    margin: tf.Tensor
    #: Consecutive finite steps; starts again from 0 at `incr_every_n_steps`; int32.
    good_steps: tf.Tensor


class LogMaxLossScaleManager(StatefulManager[LogMaxState]):
    """A loss scale that follows the magnitude of gradients, so that overflows are rare.

    `ExponentialUpdateLossScaleManager` finds the highest possible scale by overflowing now and then. This manager
    predicts it from the largest magnitude among the gradients of each step, `max_abs`: the scale is such that a
    gradient several standard deviations above the moving mean of the logarithm still does not overflow. So the scale
    falls before growing gradients overflow, and rises without an overflow while they shrink.

    The rule after each step, where `n` counts the observations:

        finite, 0 < max_abs < infinity:  x = log2(max_abs); n += 1
                                         variance += ((x - mean)**2 - variance) * max(1 - deviation_decay, 1 / (n - 1))
                                         mean += (x - mean) * max(1 - mean_decay, 1 / n)
        finite:                          good += 1; if good reaches incr_every_n_steps:
                                             margin = max(0, margin - 1); good = 0
                                         once n > 0: scale = 2**(proposal - margin), at least min_loss_scale
        not finite:                      scale = max(min_loss_scale, scale / 2); good = 0
                                         once n > 0: margin = max(0, proposal - log2(scale))

        proposal                         floor(log2(limit) - mean - deviations * sqrt(variance)), within log2 of the
                                         bounds

    * For the first observations, `1 / n` is larger than `1 - decay`: the mean and the variance are plain averages.
    * The variance measures how far the mean before a step missed that step's `x`, so a steady drift increases it too.
      The first `x` has no prediction and does not enter the variance.
    * The magnitude of gradients that overflowed is unknown, so an overflow is not observed. It halves the scale once,
      and the margin keeps the scale below later proposals.
    * The proposal is limited to the bounds first, so that no margin accumulates beyond them.
    * A magnitude below 2**-126 is not an observation, nor is 0: it is denormal in float32, and some processors replace
      such numbers by 0.

    The scale is always a power of two, and never 0, infinite or NaN. If a checkpoint of another program restores other
    values, the next step brings the scale within the bounds, rounds it down to a power of two, replaces a NaN scale by
    `init_loss_scale`, and forgets a mean or variance that is not finite. Settings can be read, and not be changed.

    Args:
        init_loss_scale: The scale before the first finite step, a power of two within the bounds. If it is so low that
            all gradients become 0, there is nothing to observe, and the scale never changes.
        limit: The largest magnitude that a scaled gradient may have. 65504 is the largest number in float16.
        deviations: The number of standard deviations, from 0 to 1000, that a gradient may lie above the mean without
            overflowing. A larger number gives fewer overflows and a lower scale.
        mean_decay: The part of the mean that a step keeps, at least 0 and below 1. 0.99 averages over about 100 steps.
        deviation_decay: The part of the variance that a step keeps, at least 0 and below 1; larger than `mean_decay`,
            so that the variance covers a longer time.
        incr_every_n_steps: The number of consecutive finite steps after which the margin falls by one.
        min_loss_scale: The lowest scale, a power of two, at least 2**-126.
        max_loss_scale: The highest scale, a power of two.

    Raises:
        TypeError: A setting is not a number.
        ValueError: A setting is out of range.

    Examples:
        >>> manager = LogMaxLossScaleManager(init_loss_scale=2**20)
        >>> for max_abs in [math.inf, 4.0, 4.0, 0.0]:
        ...     finite = tf.constant(math.isfinite(max_abs))
        ...     _ = manager.update_loss_scale(finite, tf.constant(max_abs))
        ...     print(float(manager.get_loss_scale()), end=" ")
        524288.0 8192.0 8192.0 8192.0

    Source: the "LogMax" scaler of OpenSeq2Seq, with two faults corrected: there an overflow counts as a magnitude of
    2**65536, and one step whose gradients are all 0 makes the scale NaN permanently.
    """

    needs_max_abs = True

    init_loss_scale = Setting[float]()
    limit = Setting[float]()
    deviations = Setting[float]()
    mean_decay = Setting[float]()
    deviation_decay = Setting[float]()
    incr_every_n_steps = Setting[int]()
    min_loss_scale = Setting[float]()
    max_loss_scale = Setting[float]()

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
        super().__init__(init_loss_scale, min_loss_scale, max_loss_scale)
        self._max_loss_scale = self._highest
        scales = {name: getattr(self, name) for name in ("min_loss_scale", "max_loss_scale", "init_loss_scale")}
        for name, scale in scales.items():
            # `frexp` returns the fraction 0.5 for powers of two, and for no other number.
            if math.frexp(scale)[0] != 0.5:
                raise ValueError(f"{name} must be a power of two, got {scale!r}.")
        self._lowest_exponent, self._highest_exponent, _ = (math.frexp(scale)[1] - 1 for scale in scales.values())
        self._limit = settings.positive("limit", limit)
        self._deviations = settings.number("deviations", deviations)
        if not 0 <= self._deviations <= _MOST_DEVIATIONS:
            raise ValueError(f"deviations must lie between 0 and {_MOST_DEVIATIONS}, got {deviations!r}.")
        self._mean_decay = settings.below_1("mean_decay", mean_decay)
        self._deviation_decay = settings.below_1("deviation_decay", deviation_decay)
        self._incr_every_n_steps = settings.count("incr_every_n_steps", incr_every_n_steps)
        zero = np.float32(0), np.float32(0), np.int32(0), np.int32(0), np.int32(0)
        self._start_from(LogMaxState(np.float32(self._init_loss_scale), *zero))

    @property
    def skips_per_backoff(self) -> int:
        """The number of consecutive skipped steps that lower the scale: every skipped step does."""
        return 1

    def update_loss_scale(self, finite_grads: tf.Tensor, max_abs: tf.Tensor | None = None) -> tf.Operation:
        """Apply the rule after a step; the optimizer calls this method once per step.

        Args:
            finite_grads: A boolean scalar: were the gradients finite on every replica?
            max_abs: The largest magnitude among the unscaled gradients of all replicas, a float32 scalar; ignored if
                `finite_grads` is False.

        Raises:
            TypeError: `max_abs` is missing.
        """
        if max_abs is None:
            raise TypeError(
                "LogMaxLossScaleManager.update_loss_scale needs max_abs, got None: pass the largest magnitude among "
                "the step's unscaled gradients."
            )
        return super().update_loss_scale(finite_grads, max_abs)

    def continue_from(self, loss_scale: float, good_steps: int = 0, *, bad_steps: int = 0) -> tf.Operation:
        """Continue from another program's loss scale; the mean, the variance and the margin start anew.

        Args:
            loss_scale: The scale of the other program. It is rounded to the nearest power of two within the bounds, of
                two to the lower one; NaN becomes `init_loss_scale`.
            good_steps: Ignored, because good steps only reduce the margin, which starts at 0. It is accepted for the
                same signature as `ExponentialUpdateLossScaleManager.continue_from`, like `bad_steps`.
            bad_steps: Ignored.

        Raises:
            TypeError: An argument is not a number.
            ValueError: A number of steps is infinite or NaN.

        Examples:
            >>> manager = LogMaxLossScaleManager()
            >>> manager.continue_from(3000)
            >>> float(manager.get_loss_scale())
            2048.0
        """
        scale = settings.number("loss_scale", loss_scale, is_finite=False)
        for name, steps in {"good_steps": good_steps, "bad_steps": bad_steps}.items():
            settings.number(name, steps)
        within = self._init_loss_scale if math.isnan(scale) else min(max(scale, self._min_loss_scale), self._highest)
        # `within` is fraction * 2**exponent with a fraction from 0.5 to 1: above 0.75 it is nearer to 2**exponent.
        fraction, exponent = math.frexp(within)
        return self._restart_with(loss_scale=np.float32(math.ldexp(1, exponent - 1 if fraction <= 0.75 else exponent)))

    def _validate_state(self, state_dict: Mapping[str, float]) -> None:
        # A scale outside the bounds or between powers of two is accepted: the next step corrects it.
        settings.loss_scale("loss_scale", state_dict["loss_scale"], least=settings.LOWEST_LOSS_SCALE)
        for name in ("log_mean", "log_variance"):
            settings.number(name, state_dict[name])
        for name in ("observations", "margin", "good_steps"):
            settings.count(name, state_dict[name], least=0)

    def next_state(self, state: LogMaxState, finite: tf.Tensor, max_abs: tf.Tensor) -> LogMaxState:
        """Return the state after one step: a pure function, which works elementwise, so a batch of states is fine."""
        state = self._with_observation(self._mended(state), finite, max_abs)
        observed = state.observations > 0
        lowest, highest = self._lowest_exponent, self._highest_exponent
        room = self._deviations * tf.sqrt(state.log_variance)
        proposal = tf.math.floor(math.log2(self._limit) - state.log_mean - room)
        proposal = tf.cast(tf.clip_by_value(proposal, float(lowest), float(highest)), tf.int32)

        good = tf.where(finite, state.good_steps + 1, 0)
        regain = good >= self._incr_every_n_steps
        margin = tf.where(regain, tf.maximum(0, state.margin - 1), state.margin)
        exponent = _exponent(state.loss_scale)
        if_finite = tf.where(observed, tf.maximum(lowest, proposal - margin), exponent)
        backed_off = tf.maximum(lowest, exponent - 1)
        margin_if_not = tf.where(observed, tf.maximum(0, proposal - backed_off), 0)
        return state._replace(
            loss_scale=_power_of_two(tf.where(finite, if_finite, backed_off)),
            margin=tf.where(finite, margin, margin_if_not),
            good_steps=tf.where(regain, 0, good),
        )

    def _mended(self, state: LogMaxState) -> LogMaxState:
        """Return the state with invalid values corrected; they can only come from another program's checkpoint."""
        known = tf.math.is_finite(state.log_mean) & tf.math.is_finite(state.log_variance) & (state.log_variance >= 0)
        return state._replace(
            loss_scale=self._scale_within_bounds(state.loss_scale),
            log_mean=tf.where(known, state.log_mean, 0.0),
            log_variance=tf.where(known, state.log_variance, 0.0),
            observations=tf.where(known, state.observations, 0),
            margin=tf.clip_by_value(state.margin, 0, self._highest_exponent - self._lowest_exponent),
        )

    def _with_observation(self, state: LogMaxState, finite: tf.Tensor, max_abs: tf.Tensor) -> LogMaxState:
        seen = finite & tf.math.is_finite(max_abs) & (max_abs >= settings.LOWEST_LOSS_SCALE)
        count = tf.minimum(state.observations + tf.cast(seen, tf.int32), _MOST_OBSERVATIONS)
        # Both branches of `tf.where` are computed, so the inner one keeps 0 and infinity out of the logarithm.
        error = tf.where(seen, _log2(tf.where(seen, max_abs, 1.0)) - state.log_mean, 0.0)
        mean_rate = _rate(self._mean_decay, count)
        # The first observation does not enter the variance: the mean before it is 0, which predicts nothing.
        variance_rate = tf.where(seen & (count > 1), _rate(self._deviation_decay, count - 1), 0.0)
        return state._replace(
            log_mean=state.log_mean + error * mean_rate,
            log_variance=state.log_variance + (error * error - state.log_variance) * variance_rate,
            observations=count,
        )


def _rate(decay: float, count: tf.Tensor) -> tf.Tensor:
    # 1 / count makes a plain average of the first observations, 1 - decay a moving average of the later ones.
    return tf.maximum(1 - decay, 1 / tf.cast(tf.maximum(count, 1), tf.float32))


# The functions below read and write the bits of a float32 directly. `tf.pow` and `tf.math.log` round, and their results
# differ between processors and under XLA, so a power of two would not always come out exactly.


def _exponent(value: tf.Tensor) -> tf.Tensor:
    # For positive normal numbers only: the sign bit and the exponent bits of the others mean something else.
    bits = tf.bitcast(value, tf.int32)
    return tf.bitwise.right_shift(bits, _FRACTION_BITS) - _EXPONENT_BIAS


def _log2(value: tf.Tensor) -> tf.Tensor:
    exponent = _exponent(value)
    fraction = tf.bitwise.bitwise_and(tf.bitcast(value, tf.int32), 2**_FRACTION_BITS - 1)
    one_to_two = tf.bitcast(tf.bitwise.bitwise_or(fraction, _EXPONENT_BIAS << _FRACTION_BITS), tf.float32)
    return tf.cast(exponent, tf.float32) + tf.math.log(one_to_two) / math.log(2)


def _power_of_two(exponent: tf.Tensor) -> tf.Tensor:
    return tf.bitcast(tf.bitwise.left_shift(exponent + _EXPONENT_BIAS, _FRACTION_BITS), tf.float32)
