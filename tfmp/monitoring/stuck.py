"""Tells a training run that is stuck from one whose loss scale is still too high and on its way down."""

import logging
import math
from collections.abc import Iterable
from typing import Any, Literal, TypeAlias, get_args

from tfmp.core import settings
from tfmp.core.distribute.horovod_detection import running_horovod
from tfmp.core.managers import FixedLossScaleManager, LossScaleManager
from tfmp.core.managers.step_counters import LossScaleStatus

OnStuck: TypeAlias = Literal["warn", "raise", "stop"]

#: A floor that leaves room for gradients of up to 2**36. Gradients that overflow here are not too large, but wrong.
_LOW_FLOOR = 2.0**-20

#: How to find the cause.
_SEARCH = "tfmp.check_precision, run on a few batches, tells which layers overflow float16."

#: What to do if a scale of 1 is too high and the manager cannot lower it.
_CURE = ' For a scale below 1, pass {"min_loss_scale": 2**-20} as the loss-scale manager.'


class LossScaleStuckError(RuntimeError):
    """Training is stuck: steps are skipped, and no change of the loss scale is expected to help.

    `LossScaleLoggingHook` and `LossScaleCallback` raise this error if they have `on_stuck="raise"`. The weights are
    then as the last applied step left them. Training is stuck if the last step overflowed, and one of three things is
    true: steps are skipped although the loss scale is at its lowest value; the scale was lowered many times in a row
    without one applied step; or the unscaled loss is infinite or NaN. A loss belongs to one process alone: if several
    processes train together, a bad loss causes a warning but never ends the training.

    Examples:
        >>> import tfmp
        >>> issubclass(tfmp.LossScaleStuckError, RuntimeError)
        True
    """


def why_stuck(
    manager: LossScaleManager, status: LossScaleStatus, stuck_after: int, skips_at_floor: int, loss: float | None
) -> str | None:
    """Return a sentence that says why training is stuck, or None if it is not stuck.

    A back-off is a reduction of the scale after skipped steps; the floor is the lowest scale that the manager allows.
    Training is stuck if the last step was skipped because of an overflow, and one of these conditions holds:

        condition                                                 reason
        the unscaled loss is infinite or NaN                      the scale did not cause that
        max(skips_per_backoff, 2) steps in a row were skipped     the next back-off cannot lower the scale
          while the scale was at its floor
        stuck_after * skips_per_backoff steps in a row were       no scale seems to be low enough
          skipped (stuck_after, if skips_per_backoff is None)

    Fewer skipped steps at the floor may come from single bad batches, which can overflow at any scale.
    `skips_at_floor` are the steps in a row that are known to have been skipped at the floor. The status, whose fields
    are numbers, and the loss, if it is known, are those of the last step.
    """
    # A step that was finite and not applied is a spike.
    if status.last_step_applied or status.last_step_finite:
        return None
    floor, skips_per_backoff = manager.lowest_loss_scale, manager.skips_per_backoff
    skips = int(status.consecutive_skipped_steps)
    if loss is not None and not math.isfinite(loss):
        name = "NaN" if math.isnan(loss) else "infinite"
        return (
            f"the loss is {name} before it is scaled: it is the model or the data, not the loss scale; look for bad "
            f"data, a layer that overflows float16, or weights that diverged. {_SEARCH}"
        )
    if skips_at_floor >= max(skips_per_backoff or 0, 2):
        return (
            f"the loss scale is at its floor, {floor:.10g}, and {skips_at_floor} steps in a row overflowed "
            f"all the same: {_why_at_floor(floor)} {_SEARCH}"
        )
    if skips < stuck_after * (skips_per_backoff or 1):
        return None
    if skips_per_backoff is None:
        return (
            f"the last {skips} steps were skipped, and the loss scale is {status.loss_scale:.10g} now: a fixed scale "
            f"may be too high, or the model gives NaN.{_CURE if status.loss_scale <= 1 else ''} {_SEARCH}"
        )
    return (
        f"the last {skips} steps were skipped, enough to lower the loss scale {skips // skips_per_backoff} times, and "
        f"it is {status.loss_scale:.10g} now: the model gives NaN at any scale, or the scale began far too high; look "
        f"at the loss, or lower init_loss_scale or decr_ratio. {_SEARCH}"
    )


def _why_at_floor(floor: float) -> str:
    """Return why steps overflow at the floor of the scale, and what to do about it."""
    otherwise = "lower the learning rate, or look for bad data or an unstable layer."
    if floor <= _LOW_FLOOR:
        return f"no scale makes the gradients finite; {otherwise}"
    cause = "the floor may be too high" if floor > 1 else "the gradients are too large for float16 by themselves"
    return (
        f'{cause}; let the scale fall {"lower" if floor > 1 else "below 1"}: pass {{"min_loss_scale": 2**-20}} as the '
        "loss-scale manager, or min_loss_scale=2**-20 to the manager that you make; if that does not help, "
        f"{otherwise}"
    )


def several_processes(strategy: Any) -> bool:  # noqa: ANN401 - the strategy class of TensorFlow 1 or 2
    """Return True if several processes, each with its own replicas, take every training step together."""
    horovod = running_horovod()
    if horovod is not None and horovod.size() > 1:
        return True
    resolver = strategy.cluster_resolver
    if resolver is None:
        return False
    cluster = resolver.cluster_spec()
    return sum(cluster.num_tasks(job) for job in cluster.jobs if job in ("chief", "worker")) > 1


class StuckWatch:
    """Warns, stops or raises when training is stuck, once for each streak of skipped steps.

    The watch sees a status only at each report. It counts the skipped steps at the floor from the first one of a streak
    that finds the scale there: earlier steps may have lowered it. The scale of a `FixedLossScaleManager` is no floor.

    If several processes take each step together, a process that stops alone would leave the others waiting for it
    forever. So only the status may decide, which is the same on all of them.
    """

    def __init__(self, on_stuck: OnStuck, stuck_after: int) -> None:
        if on_stuck not in get_args(OnStuck):
            raise ValueError(f'on_stuck must be "warn", "raise" or "stop", got {on_stuck!r}.')
        self._on_stuck = on_stuck
        self._stuck_after = settings.count("stuck_after", stuck_after)
        self.start()

    def start(self, *, several: bool = False) -> None:
        """Forget all earlier reports, because a new training run begins, perhaps of `several` processes together."""
        self._several = several
        # The streaks of the last warnings, known by their number of applied steps. Those about the loss of this process
        # alone are apart: they must not keep it from stopping later in the streak, together with the others.
        self._reported: dict[tuple[LossScaleManager, bool], int] = {}
        #: The streak at the floor, and how many of its steps were skipped when it was first seen there.
        self._at_floor: dict[LossScaleManager, tuple[int, int]] = {}

    def wants_stop(
        self, manager: LossScaleManager, status: LossScaleStatus, losses: Iterable[float] = (), *, at_end: bool = False
    ) -> bool:
        """Return True if training is stuck and should stop; log the reason once.

        The status and the unscaled losses are numbers, those of the last step. If training is `at_end`, only warn.
        """
        policy: OnStuck = "warn" if at_end else self._on_stuck
        loss = next((loss for loss in losses if not math.isfinite(loss)), None)
        skips_at_floor = self._skips_at_floor(manager, status)
        if loss is not None and self._several and policy != "warn":
            reason = why_stuck(manager, status, self._stuck_after, skips_at_floor, loss)
            if self._is_new((manager, True), status, reason):
                _warn(f"{reason} The other processes do not see this loss, so training goes on.")
            loss = None
        reason = why_stuck(manager, status, self._stuck_after, skips_at_floor, loss)
        if not self._is_new((manager, False), status, reason):
            return False
        if policy == "raise":
            raise LossScaleStuckError(f"training is stuck: {reason}")
        _warn(f"{reason} Training stops here, because on_stuck is 'stop'." if policy == "stop" else f"{reason}")
        return policy == "stop"

    def _is_new(self, key: tuple[LossScaleManager, bool], status: LossScaleStatus, reason: str | None) -> bool:
        """Return True if there is a reason that this streak has not reported yet, and record that it is reported."""
        if reason is None or self._reported.get(key) == status.applied_steps:
            return False
        self._reported[key] = int(status.applied_steps)
        return True

    def _skips_at_floor(self, manager: LossScaleManager, status: LossScaleStatus) -> int:
        floor = manager.lowest_loss_scale
        # A floor of 0 means that the manager does not tell its floor.
        if isinstance(manager, FixedLossScaleManager) or floor <= 0 or status.loss_scale > floor:
            self._at_floor.pop(manager, None)
            return 0
        streak, skips = int(status.applied_steps), int(status.consecutive_skipped_steps)
        if self._at_floor.get(manager, (None, 0))[0] != streak:
            self._at_floor[manager] = (streak, skips)
        return skips - self._at_floor[manager][1]


def _warn(reason: str) -> None:
    logging.getLogger("tfmp").warning("training is stuck: %s", reason)
