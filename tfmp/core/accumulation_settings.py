"""How gradients are accumulated, checked."""

from typing import NamedTuple

from tfmp.core import settings

#: What an overflow makes invalid.
OVERFLOW_DROPS = ("window", "micro_batch")


class AccumulationSettings(NamedTuple):
    """How gradients are accumulated; `accumulation_settings` makes them of what a user gave.

    Attributes:
        accumulation_steps: Micro-batches in a window.
        overflow_drops: What an overflow makes invalid, one of `OVERFLOW_DROPS`.
        micro_batches_per_epoch: After how many micro-batches a window ends though it is not full; None if never.
    """

    accumulation_steps: int
    overflow_drops: str
    micro_batches_per_epoch: int | None


def accumulation_settings(
    accumulation_steps: int, overflow_drops: str, micro_batches_per_epoch: int | None
) -> AccumulationSettings:
    """Return the settings that a user gave, or say what is wrong with them.

    Args:
        accumulation_steps: Micro-batches in a window.
        overflow_drops: What an overflow makes invalid.
        micro_batches_per_epoch: After how many micro-batches a window ends at the latest.

    Raises:
        TypeError: A number is none.
        ValueError: A setting is out of range.

    Example:
        >>> accumulation_settings(0, "window", None)
        Traceback (most recent call last):
            ...
        ValueError: accumulation_steps must be a whole number from 1 to 2**31 - 1, got 0.
    """
    if overflow_drops not in OVERFLOW_DROPS:
        raise ValueError(f'overflow_drops must be "window" or "micro_batch", got {overflow_drops!r}.')
    per_epoch = None
    if micro_batches_per_epoch is not None:
        per_epoch = settings.count("micro_batches_per_epoch", micro_batches_per_epoch)
    return AccumulationSettings(settings.count("accumulation_steps", accumulation_steps), overflow_drops, per_epoch)
