"""Tells a run that is stuck from one whose loss scale is merely too high yet."""

import logging
import math
from collections.abc import Iterable
from typing import Any, Literal, NamedTuple, TypeAlias

from tfmp.core import settings
from tfmp.core.distribute.horovod_detection import running_horovod
from tfmp.core.managers import FixedLossScaleManager, LossScaleManager
from tfmp.core.managers.step_counters import LossScaleStatus

OnStuck: TypeAlias = Literal["warn", "raise", "stop"]

_POLICIES = ("warn", "raise", "stop")


class LossScaleStuckError(RuntimeError):
    """Training is stuck: no loss scale will bring another applied step.

    Raised by `LossScaleLoggingHook` and `LossScaleCallback` with `on_stuck="raise"`. The weights are those of the last
    applied step.

    Example:
        >>> import tfmp
        >>> issubclass(tfmp.LossScaleStuckError, RuntimeError)
        True
    """


def why_stuck(
    status: LossScaleStatus,
    lowest_loss_scale: float,
    skips_per_backoff: int | None,
    stuck_after: int,
    skips_at_floor: int = 0,
    loss: float | None = None,
) -> str | None:
    """Return why training is stuck, in a sentence, or None if it is not; a pure function.

        the last step was skipped, and
          the loss is infinite or NaN                                     the scale has no part in that
          as many steps were skipped at the floor as a back-off takes,    the next back-off can change nothing
            and at least 2
          stuck_after back-offs in a row, or so many skipped steps where  no scale seems to be low enough
            nothing is known of back-offs

    Fewer steps at the floor may be single bad batches, which a manager meets at any scale.

    Args:
        status: The status, as numbers.
        lowest_loss_scale: The manager's floor.
        skips_per_backoff: After how many skipped steps in a row it lowers the scale; None if it never does, or nothing
            is known of that.
        stuck_after: How many back-offs in a row are too many.
        skips_at_floor: How many steps in a row were skipped, for all that is known, with the scale at its floor.
        loss: The unscaled loss of the last step; None if it is not known.

    Example:
        >>> status = LossScaleStatus(1.0, False, False, 40, 30, 10, 10)
        >>> why_stuck(status, lowest_loss_scale=1.0, skips_per_backoff=2, stuck_after=64, skips_at_floor=3)
        'the loss scale is at its floor, 1, and 3 steps in a row overflowed all the same: the gradients are too large
         for float16 by themselves; lower the learning rate, or look for bad data or an unstable layer.'
    """
    if status.last_step_applied:
        return None
    skips = int(status.consecutive_skipped_steps)
    if loss is not None and not math.isfinite(loss):
        name = "NaN" if math.isnan(loss) else "infinite"
        return (
            f"the loss is {name} before it is scaled: it is the model or the data, not the loss scale; look for bad "
            "data, a layer that overflows float16, or weights that diverged."
        )
    if skips_at_floor >= max(skips_per_backoff or 0, 2):
        cause = (
            "the floor may be too high, so give the manager a lower one, such as min_loss_scale=1; if that does not "
            "help, look for bad data or an unstable layer."
            if lowest_loss_scale > 1
            else "the gradients are too large for float16 by themselves; lower the learning rate, or look for bad data "
            "or an unstable layer."
        )
        return (
            f"the loss scale is at its floor, {lowest_loss_scale:.10g}, and {skips_at_floor} steps in a row overflowed "
            f"all the same: {cause}"
        )
    if skips < stuck_after * (skips_per_backoff or 1):
        return None
    if skips_per_backoff is None:
        return (
            f"the last {skips} steps were skipped, and the loss scale is {status.loss_scale:.10g} now: a fixed scale "
            "may be too high, or the model gives NaN."
        )
    return (
        f"the last {skips} steps were skipped, enough to lower the loss scale {skips // skips_per_backoff} times, and "
        f"it is {status.loss_scale:.10g} now: the model gives NaN at any scale, or the scale began far too high; look "
        "at the loss, or lower init_loss_scale or decr_ratio."
    )


def several_processes(strategy: Any) -> bool:  # noqa: ANN401 - a strategy of either TensorFlow
    """Tell whether other processes take each step together with this one.

    Args:
        strategy: The `tf.distribute` strategy of the training, the default one included.

    Example:
        >>> import tensorflow as tf
        >>> several_processes(tf.distribute.get_strategy())
        False
    """
    horovod = running_horovod()
    if horovod is not None and horovod.size() > 1:
        return True
    resolver = strategy.cluster_resolver
    if resolver is None:
        return False
    cluster = resolver.cluster_spec()
    return sum(cluster.num_tasks(job) for job in cluster.jobs if job in ("chief", "worker")) > 1


class _AtFloor(NamedTuple):
    """Where a manager's scale was first seen at its floor within a streak of skipped steps.

    Attributes:
        applied_steps: How many steps had been applied: what tells one streak from another.
        skips: How many had been skipped in a row.
    """

    applied_steps: int
    skips: int


class StuckWatch:
    """Says once that training is stuck, and what to do about it; again only after a step was applied.

    Steps at the floor are counted from the first status of their streak that finds the scale there: those before it
    may be the ones that brought it down. A `FixedLossScaleManager` never came down, and has no floor.

    Where several processes take each step together, all must decide alike, or some wait for ever for the others. They
    have the same status. A loss is one process's own, and only warned of.

    Args:
        on_stuck: "warn" logs a warning, "stop" logs it and asks for the end of training, "raise" raises.
        stuck_after: How many back-offs in a row are too many.

    Raises:
        TypeError: `stuck_after` is no number.
        ValueError: An argument is out of range.

    Example:
        >>> import tfmp
        >>> watch = StuckWatch("stop", stuck_after=64)
        >>> manager = tfmp.ExponentialUpdateLossScaleManager(1, 1000)
        >>> watch.wants_stop(manager, LossScaleStatus(1.0, True, True, 1, 1, 0, 0))
        False
    """

    def __init__(self, on_stuck: OnStuck, stuck_after: int) -> None:
        if on_stuck not in _POLICIES:
            raise ValueError(f'on_stuck must be "warn", "raise" or "stop", got {on_stuck!r}.')
        self._on_stuck = on_stuck
        self._stuck_after = settings.count("stuck_after", stuck_after)
        self._several = False
        # For each manager, how many steps were applied when it was said; of losses that do not decide, apart: what
        # one process said of its own must not keep it from what all do.
        self._said: dict[LossScaleManager, int] = {}
        self._said_of_losses: dict[LossScaleManager, int] = {}
        self._at_floor: dict[LossScaleManager, _AtFloor] = {}

    @property
    def only_warns(self) -> bool:
        """Whether it never ends the training."""
        return self._on_stuck == "warn"

    def start(self, *, several: bool = False) -> None:
        """Forget what was said: another run begins.

        Args:
            several: Whether other processes take each step together with this one.
        """
        self._several = several
        self._said.clear()
        self._said_of_losses.clear()
        self._at_floor.clear()

    def wants_stop(
        self,
        manager: LossScaleManager,
        status: LossScaleStatus,
        losses: Iterable[float] = (),
        *,
        at_end: bool = False,
    ) -> bool:
        """Look at a status, and tell whether training should stop.

        Args:
            manager: The manager that it is of.
            status: The status, as numbers.
            losses: The unscaled losses of the last step, as far as they are known.
            at_end: Only warn, whatever the policy: training is over.

        Raises:
            LossScaleStuckError: Training is stuck, and that is to raise.
        """
        loss = next((loss for loss in losses if not math.isfinite(loss)), None)
        floor, per_backoff = manager.lowest_loss_scale, manager.skips_per_backoff
        at_floor = self._skips_at_floor(manager, status)
        policy: OnStuck = "warn" if at_end else self._on_stuck
        if loss is not None and self._several and policy != "warn":
            reason = why_stuck(status, floor, per_backoff, self._stuck_after, at_floor, loss)
            if _is_new(self._said_of_losses, manager, status, reason):
                _warn(f"{reason} The other processes do not know, so training goes on.")
            loss = None
        reason = why_stuck(status, floor, per_backoff, self._stuck_after, at_floor, loss)
        if not _is_new(self._said, manager, status, reason):
            return False
        if policy == "raise":
            raise LossScaleStuckError(f"training is stuck: {reason}")
        _warn(f"{reason} It stops here, as on_stuck='stop' says." if policy == "stop" else f"{reason}")
        return policy == "stop"

    def _skips_at_floor(self, manager: LossScaleManager, status: LossScaleStatus) -> int:
        floor = manager.lowest_loss_scale
        # A floor of 0 is one that is not known.
        if isinstance(manager, FixedLossScaleManager) or floor <= 0 or status.loss_scale > floor:
            self._at_floor.pop(manager, None)
            return 0
        now = _AtFloor(int(status.applied_steps), int(status.consecutive_skipped_steps))
        seen = self._at_floor.get(manager)
        if seen is None or seen.applied_steps != now.applied_steps:
            self._at_floor[manager] = seen = now
        return now.skips - seen.skips


def _is_new(
    said: dict[LossScaleManager, int], manager: LossScaleManager, status: LossScaleStatus, reason: str | None
) -> bool:
    """Tell whether a reason is to be said, and note that it was."""
    if reason is None or said.get(manager) == status.applied_steps:
        return False
    said[manager] = int(status.applied_steps)
    return True


def _warn(reason: str) -> None:
    logging.getLogger("tfmp").warning("training is stuck: %s", reason)
