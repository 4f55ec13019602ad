"""Draws ratios as bars."""

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

#: Longer bars are cut, so that short ones can be told apart; the number beside a bar is its full length.
_LONGEST = 2.0


class Panel(NamedTuple):
    """The bars that stand together under a title.

    Attributes:
        title: The title.
        groups: The ratios by group and contender. A ratio that is None has no bar.
    """

    title: str
    groups: Mapping[str, Mapping[str, float | None]]


def draw(rows: Sequence[Sequence[Panel]], labels: Sequence[str], colors: Mapping[str, str], path: Path) -> None:
    """Draw panels of bars side by side and below each other.

    Args:
        rows: The rows of panels, with equally many in each.
        labels: What the ratios of each column are.
        colors: The contenders to draw, and their colors.
        path: The image file to write.
    """
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    groups = [list(dict.fromkeys(itertools.chain(*(panel.groups for panel in row)))) for row in rows]
    height = 1.0 + sum(0.7 + 0.16 * len(of_row) * (len(colors) + 1) for of_row in groups)
    figure = Figure(figsize=(9, height), layout="constrained")
    axes = figure.subplots(
        len(rows), len(labels), sharex=True, sharey="row", squeeze=False, height_ratios=list(map(len, groups))
    )
    for row, of_row, axes_of_row in zip(rows, groups, axes, strict=True):
        for panel, axis in zip(row, axes_of_row, strict=True):
            axis.set_title(panel.title, fontsize="medium")
            _draw_panel(axis, panel.groups, of_row, colors)
            axis.set_ylim(len(of_row) - 0.4, -0.6)
    for label, axis in zip(labels, axes[-1], strict=True):
        axis.set_xlabel(label)
    handles = [Patch(color=color, label=name) for name, color in colors.items()]
    figure.legend(handles=handles, loc="outside upper center", ncols=len(handles), fontsize="small", frameon=False)
    figure.savefig(path, dpi=100)


def _draw_panel(
    axis: Any,  # noqa: ANN401 - matplotlib has types only where it is installed
    groups: Mapping[str, Mapping[str, float | None]],
    of_row: Sequence[str],
    colors: Mapping[str, str],
) -> None:
    width = 0.8 / len(colors)
    for group, ratios in groups.items():
        for index, (name, color) in enumerate(colors.items()):
            ratio = ratios.get(name)
            if ratio is None:
                continue
            place = of_row.index(group) + width * (index - (len(colors) - 1) / 2)
            length = min(ratio, _LONGEST)
            axis.barh(place, length, 0.9 * width, color=color)
            # The white background keeps the number readable where it crosses the line at 1.
            background = {"facecolor": "white", "edgecolor": "none", "pad": 0.5}
            axis.text(length + 0.03, place, f"{ratio:.2f}", va="center", fontsize=7, bbox=background)
    axis.axvline(1, color="black", linewidth=0.8)
    axis.set_xlim(0, _LONGEST + 0.3)
    axis.set_yticks(range(len(of_row)), of_row, fontsize="small")
    axis.tick_params(axis="y", length=0)
    axis.grid(axis="x", alpha=0.3)
    axis.set_axisbelow(True)
    axis.spines[["top", "right", "left"]].set_visible(False)
