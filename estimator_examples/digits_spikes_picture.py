"""Draws what `digits_spikes` recorded: the test accuracy and the gradient norm over the steps."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from estimator_examples.digits_spikes import StepRecorder

#: The colors of the training runs, in their order; the first two are also those of clean and of corrupt batches.
_COLORS = ("#7f8c8d", "#c0392b", "#e6a817", "#00897b", "#2c5fa8")


def draw(runs: Mapping[str, StepRecorder], with_norms: str, corrupt: Collection[int], path: Path) -> None:
    """Draw the accuracy of several training runs, and beside it the gradient norms of one of them.

    Args:
        runs: What was recorded, by the name of the way to train.
        with_norms: The name of the one whose norms are drawn.
        corrupt: The steps with a corrupt batch, counted from 1.
        path: The image file to write.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.4), layout="constrained")
    accuracy, norm = figure.subplots(1, 2)
    for color, (name, run) in zip(_COLORS, runs.items(), strict=False):
        accuracy.plot(list(run.accuracies), list(run.accuracies.values()), color=color, label=name, linewidth=1)
    accuracy.set(xlabel="step", ylabel="test accuracy", ylim=(0, 1))
    accuracy.legend(frameon=False, loc="lower right", fontsize="small")
    _draw_norms(norm, runs[with_norms], corrupt)
    figure.savefig(path, dpi=120)


def _draw_norms(axes: Axes, run: StepRecorder, corrupt: Collection[int]) -> None:
    clean_color, corrupt_color, *_ = _COLORS
    norms, bounds = np.asarray(run.norms), np.asarray(run.bounds[: len(run.norms)])
    steps = np.arange(1, len(norms) + 1)
    finite, is_corrupt = np.isfinite(norms), np.isin(steps, list(corrupt))
    for chosen, color, size, label in (
        (finite & ~is_corrupt, clean_color, 3, "clean batch"),
        (finite & is_corrupt, corrupt_color, 6, "corrupt batch"),
    ):
        axes.plot(steps[chosen], norms[chosen], ".", color=color, markersize=size, label=label)
    if not finite.all():
        # An infinite norm has no place on the axis: it is drawn above all others.
        top = np.full(np.count_nonzero(~finite), 2 * norms[finite].max())
        axes.plot(steps[~finite], top, "^", color=corrupt_color, markersize=5, label="overflow")
    axes.plot(steps, np.where(np.isfinite(bounds), bounds, np.nan), color="black", linewidth=1, label="bound")
    axes.set(xlabel="step", ylabel="gradient norm", yscale="log")
    axes.legend(frameon=False, loc="best", fontsize="small")
