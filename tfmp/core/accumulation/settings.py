"""The settings of gradient accumulation, and the checks of their values."""

from typing import NamedTuple

from tfmp.core import settings

#: What to drop if gradients overflow: the whole window, or only the micro-batch in which they overflowed.
OVERFLOW_DROPS = ("window", "micro_batch")


class AccumulationSettings(NamedTuple):
    """The settings of gradient accumulation, which have been checked by `accumulation_settings`.

    A window is the sequence of micro-batches whose gradients are averaged for one step of the optimizer.
    """

    #: The number of micro-batches in a full window.
    accumulation_steps: int
    #: What to drop if gradients overflow, one of `OVERFLOW_DROPS`.
    overflow_drops: str
    #: The number of micro-batches in an epoch, or in the whole training. A window also ends after this number, even if
    #: it is not full; counting then starts anew. None: only full windows end.
    micro_batches_per_epoch: int | None


def accumulation_settings(
    accumulation_steps: int, overflow_drops: str, micro_batches_per_epoch: int | None
) -> AccumulationSettings:
    """Check the settings that a user passed, and return them."""
    if overflow_drops not in OVERFLOW_DROPS:
        raise ValueError(f'overflow_drops must be "window" or "micro_batch", got {overflow_drops!r}.')
    per_epoch = None
    if micro_batches_per_epoch is not None:
        per_epoch = settings.count("micro_batches_per_epoch", micro_batches_per_epoch)
    return AccumulationSettings(settings.count("accumulation_steps", accumulation_steps), overflow_drops, per_epoch)
