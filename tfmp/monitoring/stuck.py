"""Tells a run that is stuck from one whose loss scale is merely too high yet."""

import logging
import math
from collections.abc import Iterable
from typing import Literal, TypeAlias

from tfmp.core import settings
from tfmp.core.managers import LossScaleManager
from tfmp.core.outcomes import LossScaleStatus

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
          the loss is infinite or NaN                                       the scale has no part in that
          as many steps were skipped at the floor as a back-off takes       the next back-off can change nothing
          stuck_after back-offs in a row, or so many skipped steps where    no scale seems to be low enough
            nothing ever backs off

    Fewer steps at the floor may be single bad batches, which the manager tolerates at any scale. A manager that never
    backs off has no such number; there the last rule decides.

    Args:
        status: The status, as numbers.
        lowest_loss_scale: The manager's floor.
        skips_per_backoff: After how many skipped steps in a row it lowers the scale; None if it never does.
        stuck_after: How many back-offs in a row are too many.
        skips_at_floor: How many steps in a row were skipped, for all that is known, with the scale at its floor.
        loss: The unscaled loss of the last step; None if it is not known.

    Example:
        >>> status = LossScaleStatus(1.0, False, 40, 30, 10, 10)
        >>> why_stuck(status, lowest_loss_scale=1.0, skips_per_backoff=2, stuck_after=64, skips_at_floor=3)
        'the loss scale is at its floor, 1, and 3 steps in a row overflowed all the same: the gradients are too large
         for float16 by themselves; lower the learning rate, or look for bad data or an unstable layer.'
    """
    if status.last_step_finite:
        return None
    skips = int(status.consecutive_skipped_steps)
    if loss is not None and not math.isfinite(loss):
        name = "NaN" if math.isnan(loss) else "infinite"
        return (
            f"the loss is {name} before it is scaled: it is the model or the data, not the loss scale; look for bad "
            "data, a layer that overflows float16, or weights that diverged."
        )
    if skips_per_backoff is not None and skips_at_floor >= skips_per_backoff:
        steps = "one step" if skips_at_floor == 1 else f"{skips_at_floor} steps in a row"
        return (
            f"the loss scale is at its floor, {lowest_loss_scale:.10g}, and {steps} overflowed all the same: "
            "the gradients are too large for float16 by themselves; lower the learning rate, or look for bad data or "
            "an unstable layer."
        )
    backoffs = skips // (skips_per_backoff or 1)
    if backoffs < stuck_after:
        return None
    if skips_per_backoff is None:
        return (
            f"the last {skips} steps were skipped at a loss scale of {status.loss_scale:.10g}, which nothing lowers: "
            "choose a lower scale, or an ExponentialUpdateLossScaleManager; if that does not help, the model gives NaN."
        )
    return (
        f"the loss scale was lowered {backoffs} times in a row, to {status.loss_scale:.10g}, and no step was applied: "
        "the model gives NaN at any scale, or the scale began far too high; look at the loss, or lower "
        "init_loss_scale or decr_ratio."
    )


class StuckWatch:
    """Says once that training is stuck, and what to do about it; again only after a step was applied.

    Steps at the floor are counted from the first status that finds the scale there: those before it may be the ones
    that brought it down.

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
        >>> watch.wants_stop(manager, LossScaleStatus(1.0, True, 1, 1, 0, 0))
        False
    """

    def __init__(self, on_stuck: OnStuck, stuck_after: int) -> None:
        if on_stuck not in _POLICIES:
            raise ValueError(f'on_stuck must be "warn", "raise" or "stop", got {on_stuck!r}.')
        self._on_stuck = on_stuck
        self._stuck_after = settings.count("stuck_after", stuck_after)
        # For each manager, how many steps were applied when it was said, and when the scale was first seen at its
        # floor; and how many had been skipped in a row then.
        self._said: dict[LossScaleManager, int] = {}
        self._at_floor: dict[LossScaleManager, tuple[int, int]] = {}

    def start(self) -> None:
        """Forget what was said: another run begins."""
        self._said.clear()
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
        at_floor = self._skips_at_floor(manager, status)
        floor, per_backoff = manager.lowest_loss_scale, manager.skips_per_backoff
        reason = why_stuck(status, floor, per_backoff, self._stuck_after, at_floor, loss)
        if reason is None or self._said.get(manager) == status.applied_steps:
            return False
        self._said[manager] = int(status.applied_steps)
        if self._on_stuck == "raise" and not at_end:
            raise LossScaleStuckError(f"training is stuck: {reason}")
        stops = self._on_stuck == "stop" and not at_end
        logging.getLogger("tfmp").warning(
            "training is stuck: %s%s", reason, " It stops here, as on_stuck='stop' says." if stops else ""
        )
        return stops

    def _skips_at_floor(self, manager: LossScaleManager, status: LossScaleStatus) -> int:
        skips, applied = int(status.consecutive_skipped_steps), int(status.applied_steps)
        if status.loss_scale > manager.lowest_loss_scale:
            self._at_floor.pop(manager, None)
            return 0
        seen_at, skips_before = self._at_floor.setdefault(manager, (applied, skips))
        # Whatever was skipped since the last applied step was so at the floor, if that step found it there.
        return skips - skips_before if seen_at == applied else skips
