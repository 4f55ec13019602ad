"""Draws what `digits_keras` recorded: the accuracy and the loss scale after each step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

#: The colors of the training runs, in their order.
_COLORS = ("#c0392b", "#00897b")
# A loss scale of 0 has no place on a logarithmic axis: it is drawn at the lower end.
_LOWEST_SCALE = 2.0**-40


def draw(runs: Mapping[str, tuple[Sequence[float], Sequence[float]]], path: Path) -> None:
    """Draw the accuracies and the loss scales of training runs side by side.

    Args:
        runs: The accuracies, from 0 to 1, and the loss scales of each run, by the name of the library that scaled the
            loss.
        path: The image file to write.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.2), layout="constrained")
    accuracy, scale = figure.subplots(1, 2)
    for color, (name, (accuracies, scales)) in zip(_COLORS, runs.items(), strict=False):
        steps = range(1, len(scales) + 1)
        accuracy.plot(steps, accuracies, color=color, label=name)
        scale.step(steps, np.maximum(scales, _LOWEST_SCALE), where="post", color=color, label=name)
    accuracy.set(xlabel="step", ylabel="test accuracy", ylim=(0, 1))
    scale.set(xlabel="step", ylabel="loss scale")
    scale.set_yscale("log", base=2)
    scale.set_ylim(bottom=_LOWEST_SCALE)
    accuracy.legend(frameon=False, loc="center right")
    figure.savefig(path, dpi=120)
