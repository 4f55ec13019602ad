"""Pictures of ranges, drawn by matplotlib: heat maps of layers by powers of two, and a loss scale over steps."""

import os
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from tfmp.environment import require
from tfmp.ranges.exponents import LOWEST_EXPONENT
from tfmp.ranges.histogram import FLOAT16, RangeHistogram, RangeShares

#: Histograms by name, and the factor at which float16 has to hold the values.
HeatMap = tuple[Mapping[str, RangeHistogram], float]

# What is at least half of the smallest number is rounded to that number.
_BOUNDS = (FLOAT16.lowest - 1, FLOAT16.lowest_normal, FLOAT16.highest + 1)
_WORDS = ("becomes 0", "subnormal", "float16 keeps all bits", "infinite")


class Course(NamedTuple):
    """What a training did, step by step."""

    #: The steps whose ranges were recorded; the other fields have an entry for each of them.
    steps: Sequence[int]
    loss_scales: Sequence[float]
    #: What float16 keeps of the gradients at that loss scale.
    shares: Sequence[RangeShares]


def heat_maps(path: str | os.PathLike[str], maps: Mapping[str, HeatMap], course: Course | None = None) -> None:
    """Draw one heat map below the other, by their titles, and above them the course of a training.

    The suffix of the path tells the format. Names without values are left out.
    """
    shown = {
        title: ({name: found for name, found in histograms.items() if found.exponents}, scale)
        for title, (histograms, scale) in maps.items()
    }
    shown = {title: (histograms, scale) for title, (histograms, scale) in shown.items() if histograms}
    heights = [0.9 + 0.24 * len(histograms) for histograms, _ in shown.values()]
    if course is not None:
        heights = [1.8, 1.8, *heights]
    figure_module = require("matplotlib.figure", extra="plot")
    figure = figure_module.Figure(figsize=(9, 0.6 + sum(heights) + 0.3 * len(heights)), layout="constrained")
    axes = list(figure.subplots(len(heights), 1, squeeze=False, gridspec_kw={"height_ratios": heights})[:, 0])
    if course is not None:
        _draw_course(axes[0], axes[1], course)
        axes = axes[2:]
    for axis, (title, (histograms, scale)) in zip(axes, shown.items(), strict=True):
        _draw_map(axis, title, histograms, scale)
    figure.savefig(path, dpi=120)


def _draw_map(axis: Any, title: str, histograms: Mapping[str, RangeHistogram], scale: float) -> None:  # noqa: ANN401
    shift = round(np.log2(scale))
    lows, highs = zip(*(found.exponents for found in histograms.values() if found.exponents), strict=True)
    # All of float16 is shown, and all values, unless they are far below everything that matters.
    first = max(min(min(lows) + shift, FLOAT16.lowest - 2), FLOAT16.lowest - 40)
    last = max(max(highs) + shift + 1, FLOAT16.highest + 3)
    shares = np.zeros([len(histograms), last - first])
    for row, found in zip(shares, histograms.values(), strict=True):
        columns = np.arange(len(found.counts)) + LOWEST_EXPONENT + shift - first
        # What is below the picture is drawn at its edge.
        inside = columns < last - first
        np.add.at(row, np.maximum(columns[inside], 0), found.counts[inside] / max(found.counts.sum(), 1))
    image = np.ma.masked_equal(shares, 0)
    axis.imshow(
        image, aspect="auto", interpolation="none", cmap="viridis", extent=(first, last, len(histograms) - 0.5, -0.5)
    )
    for bound in _BOUNDS:
        axis.axvline(bound, color="tab:red", linewidth=1)
    for start, end, word in zip((first, *_BOUNDS), (*_BOUNDS, last), _WORDS, strict=True):
        if end - start >= 2:
            axis.text((start + end) / 2, -0.62, word, ha="center", va="bottom", fontsize=7, color="tab:red")
    axis.set_yticks(range(len(histograms)), [_label(name, found) for name, found in histograms.items()], fontsize=7)
    ticks = range(first - first % 4 + 4, last, 4)
    axis.set_xticks(ticks, [f"$2^{{{tick}}}$" for tick in ticks], fontsize=7)
    axis.set_title(title, fontsize=9, pad=14)


def _label(name: str, histogram: RangeHistogram) -> str:
    zero = histogram.shares().zero
    return f"{name} ({zero:.0%} zeros)" if zero >= 0.005 else name


def _draw_course(above: Any, below: Any, course: Course) -> None:  # noqa: ANN401
    above.plot(course.steps, course.loss_scales, drawstyle="steps-post", marker=".")
    above.set_yscale("log", base=2)
    above.set_title("loss scale", fontsize=9)
    kinds = ("zero", "lost", "subnormal")
    parts = [[100 * getattr(share, kind) for share in course.shares] for kind in kinds]
    below.stackplot(course.steps, parts, labels=["are 0", "become 0", "lose bits"], alpha=0.8)
    below.set_title("gradients that float16 does not keep at this scale, %", fontsize=9)
    below.set_xlabel("step", fontsize=8)
    below.legend(loc="upper right", fontsize=7)
    for axis in (above, below):
        axis.tick_params(labelsize=7)
        axis.margins(x=0.01)
