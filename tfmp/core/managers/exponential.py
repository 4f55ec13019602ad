"""The dynamic loss scale of tf.contrib: it grows while gradients are finite and shrinks when they overflow."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from tfmp.core import settings
from tfmp.core.managers.base import Setting, StatefulManager

_LARGEST = float(np.finfo(np.float32).max)


class LossScaleState(NamedTuple):
    """The state of a manager without `tolerance`; its names are those of tf.contrib's variables and checkpoint keys."""

    #: float32.
    loss_scale: tf.Tensor
    #: Finite steps since the scale last changed or a step overflowed; int32.
    good_steps: tf.Tensor
    #: Overflowed steps since the scale last changed; int32. With hysteresis it starts below 0.
    bad_steps: tf.Tensor


class TolerantLossScaleState(NamedTuple):
    """The state of a manager with `tolerance`, which has one more field than `LossScaleState`."""

    loss_scale: tf.Tensor
    good_steps: tf.Tensor
    bad_steps: tf.Tensor
    #: All steps since the scale last changed, finite or not; int32.
    steps_since_change: tf.Tensor


# `Any` because the state is a `LossScaleState` or, with a tolerance, a `TolerantLossScaleState`.
class ExponentialUpdateLossScaleManager(StatefulManager[Any]):
    """A loss scale that grows while gradients are finite and shrinks when they overflow: the usual choice.

    The rule, computed in float32 after each step, where `good` and `bad` count finite and overflowed steps:

        finite:      good += 1                if good reaches incr_every_n_steps:
                                                  scale *= incr_ratio, if that is finite;  good = bad = 0
        not finite:  bad += 1; good = 0       if bad reaches decr_every_n_nan_or_inf:
                                                  scale = max(1, scale * decr_ratio);      good = bad = 0

    Finite steps do not reset `bad`, so two overflows far apart can lower the scale together. The keyword-only settings
    change the rule as follows; with their defaults it is exactly tf.contrib's rule:

        max_loss_scale          when the scale grows:    scale = min(max_loss_scale, scale * incr_ratio)
        min_loss_scale          when the scale shrinks:  scale = max(min_loss_scale, scale * decr_ratio)
        hysteresis              at the start and when the scale grows:  bad = 1 - hysteresis, instead of 0
        consecutive_hysteresis  after every finite step too:            bad = 1 - hysteresis
        tolerance               the scale shrinks only if also bad / (steps since it last changed) >= tolerance

    The scale is never 0, infinite or NaN after a step. If a checkpoint of another program restores a scale outside the
    bounds, the next step first moves that scale to the nearer bound; NaN becomes `init_loss_scale`.

    The state is in the variables `loss_scale`, `good_steps` and `bad_steps` (with a tolerance also
    `steps_since_change`), which a `tf.compat.v1.train.Saver` saves in a graph, and
    `tf.train.Checkpoint(manager=manager)` in eager mode. The settings are attributes, which cannot be changed.

    Args:
        init_loss_scale: The scale to start from, within the bounds. It may be far too high: BERT scripts use 2**32.
        incr_every_n_steps: The number of consecutive finite steps after which the scale grows. Usual values are 1000
            to 2000, because each growth costs about one skipped step.
        decr_every_n_nan_or_inf: The number of overflowed steps after which the scale shrinks.
        incr_ratio: The factor by which the scale grows, greater than 1.
        decr_ratio: The factor by which the scale shrinks, between 0 and 1. If both factors are powers of two, scaling
            and unscaling are exact.
        min_loss_scale: The lowest scale, at least 2**-126. A value below 1 helps if gradients overflow even unscaled.
        max_loss_scale: The highest scale; by default the scale may grow as far as float32 allows.
        hysteresis: The number of overflowed steps after which the scale first shrinks once it has grown, if
            `decr_every_n_nan_or_inf` is 1. Later overflows all count until the scale grows again.
        consecutive_hysteresis: If True, only consecutive overflows lower the scale.
        tolerance: A share of overflowed steps, at least 0 and below 1. Overflows that hysteresis ignored do not count.

    Raises:
        TypeError: A setting is not a number.
        ValueError: A setting is out of range.

    Examples:
        >>> manager = ExponentialUpdateLossScaleManager(1024, incr_every_n_steps=2, decr_ratio=0.5)
        >>> for finite in [True, True, False, False, False, False]:
        ...     _ = manager.update_loss_scale(tf.constant(finite))
        ...     print(float(manager.get_loss_scale()), end=" ")
        1024.0 2048.0 2048.0 1024.0 1024.0 512.0

    Source: tf.contrib.mixed_precision, with its names, arguments and numbers. The hysteresis is that of Megatron-LM and
    DeepSpeed if `decr_every_n_nan_or_inf` is 1; the tolerance follows fairseq.
    """

    init_loss_scale = Setting[float]()
    incr_every_n_steps = Setting[int]()
    decr_every_n_nan_or_inf = Setting[int]()
    incr_ratio = Setting[float]()
    decr_ratio = Setting[float]()
    min_loss_scale = Setting[float]()
    max_loss_scale = Setting["float | None"]()
    hysteresis = Setting[int]()
    consecutive_hysteresis = Setting[bool]()
    tolerance = Setting[float]()

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
        super().__init__(init_loss_scale, min_loss_scale, _LARGEST if max_loss_scale is None else max_loss_scale)
        self._max_loss_scale = None if max_loss_scale is None else self._highest
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
        state = LossScaleState(np.float32(self._init_loss_scale), np.int32(0), np.int32(1 - self._hysteresis))
        self._start_from(TolerantLossScaleState(*state, steps_since_change=np.int32(0)) if self._tolerance else state)

    @property
    def skips_per_backoff(self) -> int | None:
        """The most skipped steps in a row until the scale shrinks; None with a tolerance: earlier steps count too."""
        return None if self._tolerance else self._decr_every_n_nan_or_inf + self._hysteresis - 1

    def next_state(self, state: Any, finite: tf.Tensor) -> Any:  # noqa: ANN401 - of either kind of state
        """Return the state after one step: a pure function, which works elementwise, so a batch of states is fine."""
        forgiving = 1 - self._hysteresis
        good = tf.where(finite, state.good_steps + 1, 0)
        bad_if_finite = forgiving if self._consecutive_hysteresis else state.bad_steps
        bad = tf.where(finite, bad_if_finite, state.bad_steps + 1)
        grow = tf.logical_and(finite, good >= self._incr_every_n_steps)
        shrink = tf.logical_and(tf.logical_not(finite), bad >= self._decr_every_n_nan_or_inf)
        if self._tolerance:
            steps = state.steps_since_change + 1
            # TensorFlow divides int32 tensors in float64, so that 1 / 20 equals the Python number 0.05 exactly.
            shrink = tf.logical_and(shrink, bad / steps >= self._tolerance)
            state = state._replace(steps_since_change=tf.where(tf.logical_or(grow, shrink), 0, steps))

        scale = self._scale_within_bounds(state.loss_scale)
        grown = scale * self._incr_ratio
        if self._max_loss_scale is None:
            # As in tf.contrib: if the product is infinite, the scale does not change.
            grown = tf.where(tf.math.is_finite(grown), grown, scale)
        else:
            grown = tf.minimum(self._highest, grown)
        shrunk = tf.maximum(self._min_loss_scale, scale * self._decr_ratio)
        return state._replace(
            loss_scale=tf.where(grow, grown, tf.where(shrink, shrunk, scale)),
            good_steps=tf.where(tf.logical_or(grow, shrink), 0, good),
            bad_steps=tf.where(grow, forgiving, tf.where(shrink, 0, bad)),
        )

    def set_loss_scale(self, loss_scale: float | tf.Tensor) -> tf.Operation:
        """Set the loss scale, a number or a scalar tensor, without changing the counts of good and bad steps.

        Raises:
            TypeError: The scale is not a number.
            ValueError: The scale is not finite or not within the bounds. If the scale is a tensor of a graph whose
                value is not known yet, running the op raises `tf.errors.InvalidArgumentError` instead.
        """
        is_tensor, checks = tf.is_tensor(loss_scale), []
        if is_tensor:
            loss_scale = tf.cast(loss_scale, tf.float32)
        known = tf.get_static_value(loss_scale) if is_tensor else loss_scale
        if is_tensor and known is None:
            # Both comparisons are False for NaN, so this also refuses NaN.
            within = tf.logical_and(loss_scale >= self._min_loss_scale, loss_scale <= self._highest)
            what = "the new loss scale is not within the manager's bounds:"
            checks.append(tf.debugging.Assert(within, [what, loss_scale]))
        else:
            number = known.item() if isinstance(known, np.ndarray | np.generic) and known.size == 1 else known
            loss_scale = self._checked_scale(number)
        with tf.control_dependencies(checks):
            # `tf.identity` makes an op that runs after the checks. The assignment waits for it.
            return self.state.assign(self.state.read()._replace(loss_scale=tf.identity(loss_scale)))

    def continue_from(self, loss_scale: float, good_steps: int = 0, *, bad_steps: int = 0) -> tf.Operation:
        """Set the whole state to continue from another program's loss scale.

        With a tolerance, the count of all steps since the scale last changed restarts at 0.

        Args:
            loss_scale: The scale of the other program: any number, which is brought within the bounds as in the class.
            good_steps: The number of consecutive finite steps so far.
            bad_steps: The number of overflowed steps since the scale last changed. The lowest value,
                `1 - hysteresis`, restores the full hysteresis; with 0 the next overflow already counts.

        Raises:
            TypeError: An argument is not a number.
            ValueError: A number of steps is out of range.

        Examples:
            >>> manager = ExponentialUpdateLossScaleManager(1024, incr_every_n_steps=2)
            >>> manager.continue_from(4096, good_steps=1)
            >>> _ = manager.update_loss_scale(tf.constant(True))
            >>> float(manager.get_loss_scale())
            8192.0
        """
        good = settings.count("good_steps", good_steps, least=0)
        bad = settings.count("bad_steps", bad_steps, least=1 - self._hysteresis)
        # A number beyond the range of float32 becomes infinite here, and then the highest scale.
        with np.errstate(over="ignore"):
            scale = np.float32(settings.number("loss_scale", loss_scale, is_finite=False))
        return self._restart_with(
            loss_scale=self._scale_within_bounds(tf.constant(scale)), good_steps=np.int32(good), bad_steps=np.int32(bad)
        )

    def _validate_state(self, state_dict: Mapping[str, float]) -> None:
        self._checked_scale(state_dict["loss_scale"])
        for name, least in {"good_steps": 0, "bad_steps": 1 - self._hysteresis, "steps_since_change": 0}.items():
            settings.count(name, state_dict.get(name, 0), least=least)

    def _checked_scale(self, loss_scale: float) -> np.float32:
        scale = settings.loss_scale("loss_scale", loss_scale, least=self._min_loss_scale)
        if scale > self._highest:
            raise ValueError(f"loss_scale must not be greater than max_loss_scale, got {loss_scale!r}.")
        return scale
