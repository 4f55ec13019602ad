"""Functions for benchmarks in which a turn is a whole training."""

import statistics
from collections.abc import Sequence
from pathlib import Path

import numpy as np


def rotated(names: Sequence[str], turn: int) -> list[str]:
    """Return the order of the contenders in a round; each round begins with the next contender.

    Examples:
        >>> rotated(["bare", "Keras", "tfmp"], 4)
        ['Keras', 'tfmp', 'bare']
    """
    first = turn % len(names)
    return [*names[first:], *names[:first]]


def mebibytes(peaks: Sequence[int | None]) -> str:
    """Return the median of the known peaks in MiB, as text.

    Examples:
        >>> mebibytes([2**20, 3 * 2**20, 3 * 2**20]), mebibytes([None])
        ('3', 'not known')
    """
    known = [peak for peak in peaks if peak is not None]
    return f"{statistics.median(known) / 2**20:.0f}" if known else "not known"


def check_losses(losses: dict[str, Sequence[float]], tolerance: float) -> None:
    """Check that the losses of all contenders agree.

    Args:
        losses: The losses of each contender, one for each turn.
        tolerance: The largest allowed difference from the bare contender's loss, divided by that loss.

    Raises:
        ArithmeticError: A difference is larger, or a loss is NaN.

    Examples:
        >>> check_losses({"bare": [2.0, 1.0], "tfmp": [2.0, 1.5]}, 0.1)
        Traceback (most recent call last):
        ArithmeticError: the losses of tfmp, [2.0, 1.5], differ by more than 0.1 of the losses of bare, [2.0, 1.0].
    """
    for name, found in losses.items():
        # A comparison with NaN is false: written in this way, a NaN fails the check.
        if not np.all(np.abs(np.subtract(found, losses["bare"])) <= tolerance * np.abs(losses["bare"])):
            raise ArithmeticError(
                f"the losses of {name}, {found}, differ by more than {tolerance} of the losses of bare, "
                f"{losses['bare']}."
            )


def plot(panels: dict[str, dict[str, Sequence[float]]], label: str, path: Path) -> None:
    """Draw the median of each contender as a bar, and its turns as points.

    Args:
        panels: For each panel's title, the figures of each contender's turns.
        label: The label of the vertical axis.
        path: The image file to write.
    """
    from matplotlib import pyplot

    figure, all_axes = pyplot.subplots(1, len(panels), figsize=(4.5 * len(panels), 4), squeeze=False)
    for axes, (title, turns) in zip(all_axes[0], panels.items(), strict=True):
        for name, measured in turns.items():
            axes.bar(name, statistics.median(measured), alpha=0.5)
            axes.scatter([name] * len(measured), measured, s=9, color="black", zorder=3)
        axes.set(ylabel=f"{label}: median, and every turn", title=title)
        axes.grid(axis="y", alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def progress(turn: int, rounds: int, latest: dict[str, float], unit: str) -> str:
    """Return a line that reports the progress after a round.

    Examples:
        >>> progress(0, 9, {"bare": 70.0, "tfmp": 72.04}, "ms a step")
        'round 1 of 9: bare 70.0, tfmp 72.0 ms a step'
    """
    measured = (f"{name} {value:.1f}" for name, value in latest.items())
    return f"round {turn + 1} of {rounds}: {', '.join(measured)} {unit}"
