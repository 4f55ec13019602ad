"""The picture of a training: its curves, and generated digits beside real ones."""

import itertools
import pathlib
from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from estimator_examples.digits_gan.report import Outcome
from estimator_examples.digits_gan.training import Record

_SIDE = 8
_GRID = 8


def draw(outcome: Outcome, test: np.ndarray, path: pathlib.Path) -> None:
    """Draw the curves of a training, and its generated digits beside real ones.

    Args:
        outcome: The training.
        test: Real digits, [n, 64].
        path: The PNG file to write.
    """
    # The figure is not made by pyplot, which would change global state and look for a display.
    figure = Figure(figsize=(11, 6.5), layout="constrained")
    FigureCanvasAgg(figure)
    curves, digits = figure.subfigures(1, 2, width_ratios=[8, 5])
    estimate, penalty, scale, skips = curves.subplots(4, 1, sharex=True, height_ratios=[3, 3, 3, 2])
    records = outcome.records
    _plot_mean_and_range(
        estimate, [record.estimate for record in records], "critic's estimate of\nWasserstein distance"
    )
    _plot_mean_and_range(penalty, [record.penalty for record in records], "gradient penalty")
    penalty.set_yscale("log")
    scale.step(range(len(records)), [record.loss_scale for record in records], where="post", color="black")
    scale.set_yscale("log", base=2)
    scale.set_ylabel("loss scale")
    _draw_skips(skips, records)
    for axes in (estimate, penalty, scale, skips):
        axes.grid(alpha=0.3)
    curves.align_ylabels()
    generated, real = digits.subplots(2, 1)
    _draw_digits(generated, outcome.generated, f"generated ({outcome.precision})")
    _draw_digits(real, test, "real, not trained on")
    figure.savefig(path, dpi=90)


def skipped(steps: Sequence[int], turns: Sequence[bool]) -> list[int]:
    """Count the steps that an optimizer has skipped after each iteration.

    Args:
        steps: For each iteration, the number of steps that the optimizer had applied after it.
        turns: For each iteration, whether the optimizer was called in it.

    Examples:
        >>> skipped([0, 1, 1, 1, 2], [True, True, False, True, True])
        [1, 1, 1, 2, 2]
    """
    return [attempted - applied for attempted, applied in zip(itertools.accumulate(turns), steps, strict=True)]


def _plot_mean_and_range(axes: Axes, values: Sequence[float], label: str) -> None:
    window = max(1, len(values) // 200)
    pieces = np.reshape(values[: len(values) // window * window], [-1, window])
    # Values that are not finite are left out of the curve.
    pieces = np.ma.masked_invalid(pieces)
    iterations = (np.arange(len(pieces)) + 0.5) * window
    axes.fill_between(iterations, pieces.min(axis=1), pieces.max(axis=1), color="tab:blue", alpha=0.25, linewidth=0)
    axes.plot(iterations, pieces.mean(axis=1), color="tab:blue")
    axes.set_ylabel(label)


def _draw_skips(axes: Axes, records: Sequence[Record]) -> None:
    iterations = range(len(records))
    critic = skipped([record.critic_steps for record in records], [True] * len(records))
    generator = skipped([record.generator_steps for record in records], [record.with_generator for record in records])
    axes.step(iterations, critic, where="post", color="tab:red", label="critic")
    axes.step(iterations, generator, where="post", color="tab:orange", label="generator")
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_locator(MaxNLocator(nbins="auto", integer=True))
    axes.set_ylabel("skipped so far")
    axes.set_xlabel("iteration")
    axes.legend(fontsize="small", loc="center right")


def _draw_digits(axes: Axes, images: np.ndarray, title: str) -> None:
    tiles = images[: _GRID * _GRID].reshape(_GRID, _GRID, _SIDE, _SIDE)
    # The padding separates the images.
    tiles = np.pad(tiles, [(0, 0), (0, 0), (1, 1), (1, 1)], constant_values=0.5)
    side = _GRID * (_SIDE + 2)
    axes.imshow(tiles.transpose(0, 2, 1, 3).reshape(side, side), cmap="gray_r", vmin=0, vmax=1, interpolation="nearest")
    axes.set_title(title, fontsize="medium")
    axes.set_axis_off()
