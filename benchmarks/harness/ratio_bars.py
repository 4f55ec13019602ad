"""Draws several kinds of ratios as bars."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any


def draw(
    panels: Mapping[str, Mapping[str, Mapping[str, Mapping[str, float | None]]]],
    kinds: Mapping[str, str],
    colors: Mapping[str, str],
    path: Path,
) -> None:
    """Draw ratios, with a row of panels for each title and a column for each kind of ratio.

    Args:
        panels: For each title, the groups of bars; for each group, the contenders and their ratios by kind. A ratio
            that is None has no bar.
        kinds: The kinds of ratios, and their descriptions.
        colors: The contenders to draw, and their colors.
        path: The image file to write.
    """
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    sizes = [len(groups) for groups in panels.values()]
    figure = Figure(figsize=(9, 1 + sum(0.5 + 0.17 * size * (len(colors) + 1) for size in sizes)), layout="constrained")
    axes = figure.subplots(len(panels), len(kinds), sharex="col", squeeze=False, height_ratios=sizes)
    for row, (title, groups) in enumerate(panels.items()):
        for column, kind in enumerate(kinds):
            axes[row][column].set_title(title, fontsize="medium")
            ratios = {group: {name: each[kind] for name, each in of.items()} for group, of in groups.items()}
            _draw_panel(axes[row][column], ratios, colors)
    for panel, label in zip(axes[-1], kinds.values(), strict=True):
        panel.set_xlabel(label)
    handles = [Patch(color=color, label=name) for name, color in colors.items()]
    figure.legend(handles=handles, loc="outside upper center", ncols=len(handles), fontsize="small", frameon=False)
    figure.savefig(path, dpi=100)


def _draw_panel(
    panel: Any,  # noqa: ANN401 - matplotlib has types only where it is installed
    groups: Mapping[str, Mapping[str, float | None]],
    colors: Mapping[str, str],
) -> None:
    width = 0.8 / len(colors)
    for place, ratios in enumerate(groups.values()):
        for index, (name, color) in enumerate(colors.items()):
            ratio = ratios.get(name)
            if ratio is None:
                continue
            at = place + width * (index - (len(colors) - 1) / 2)
            panel.barh(at, ratio, 0.9 * width, color=color)
            background = {"facecolor": "white", "edgecolor": "none", "pad": 0.5}
            panel.text(ratio + 0.03, at, f"{ratio:.2f}", va="center", fontsize=7, bbox=background)
    panel.axvline(1, color="black", linewidth=0.8)
    panel.set_xlim(left=0)
    panel.margins(x=0.12)
    panel.set_yticks(range(len(groups)), list(groups), fontsize="small")
    panel.set_ylim(len(groups) - 0.5, -0.5)
    panel.tick_params(axis="y", length=0)
    panel.grid(axis="x", alpha=0.3)
    panel.set_axisbelow(True)
    panel.spines[["top", "right", "left"]].set_visible(False)
