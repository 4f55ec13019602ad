"""What benchmarks share that let contenders train in turns."""

import statistics
from collections.abc import Sequence
from pathlib import Path

import numpy as np


def rotated(names: Sequence[str], turn: int) -> list[str]:
    """Return the order of a round, which no contender always begins.

    Example:
        >>> rotated(["bare", "Keras", "tfmp"], 4)
        ['Keras', 'tfmp', 'bare']
    """
    first = turn % len(names)
    return [*names[first:], *names[:first]]


def mebibytes(peaks: Sequence[int | None]) -> str:
    """Return the median of some bytes as text.

    Example:
        >>> mebibytes([2**20, 3 * 2**20, 3 * 2**20]), mebibytes([None])
        ('3', 'not known')
    """
    known = [peak for peak in peaks if peak is not None]
    return f"{statistics.median(known) / 2**20:.0f}" if known else "not known"


def check_losses(losses: dict[str, Sequence[float]], tolerance: float) -> None:
    """See that all contenders trained alike.

    Args:
        losses: Those of each contender's turns.
        tolerance: How far one may be from the bare contender's, as a share of that.

    Raises:
        ArithmeticError: One is further.

    Example:
        >>> check_losses({"bare": [2.0, 1.0], "tfmp": [2.0, 1.5]}, 0.1)
        Traceback (most recent call last):
        ArithmeticError: the losses of tfmp, [2.0, 1.5], are not those of bare, [2.0, 1.0], to 0.1 of them.
    """
    for name, found in losses.items():
        # Written so that NaN fails.
        if not np.all(np.abs(np.subtract(found, losses["bare"])) <= tolerance * np.abs(losses["bare"])):
            raise ArithmeticError(
                f"the losses of {name}, {found}, are not those of bare, {losses['bare']}, to {tolerance} of them."
            )


def plot(panels: dict[str, dict[str, Sequence[float]]], label: str, path: Path) -> None:
    """Draw the medians of contenders as bars, and their turns as points.

    Args:
        panels: The turns of each contender, under the title of a panel.
        label: What a turn measures.
        path: The file.
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
    """Return a line on a round.

    Example:
        >>> progress(0, 9, {"bare": 70.0, "tfmp": 72.04}, "ms a step")
        'round 1 of 9: bare 70.0, tfmp 72.0 ms a step'
    """
    measured = (f"{name} {value:.1f}" for name, value in latest.items())
    return f"round {turn + 1} of {rounds}: {', '.join(measured)} {unit}"
