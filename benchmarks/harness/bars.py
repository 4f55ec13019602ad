"""Draws the times of steps as bars."""

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness.cells import Cell
from benchmarks.harness.contest import Results

#: Longer bars are cut, so that short ones can be told apart; the number beside a bar is its full length.
_LONGEST = 2.0


def draw(figures: Sequence[dict[str, Any]], base: str, colors: Mapping[str, str], path: Path) -> None:
    """Draw the times of steps as multiples of one contender's time, with a panel for each mode and set of shapes.

    Args:
        figures: The figures of each cell, as they are written to JSON.
        base: The contender whose time is 1.
        colors: The contenders to draw, and their colors.
        path: The image file to write.
    """
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    measured = [
        (Cell(*(each[field] for field in Cell._fields)), Results(*(each[field] for field in Results._fields)))
        for each in figures
    ]
    columns: dict[str, dict[str, dict[str, Results]]] = {}
    for cell, results in measured:
        columns.setdefault(cell.mode, {}).setdefault(cell.shapes, {})[cell.step] = results
    rows = itertools.zip_longest(*(of_mode.values() for of_mode in columns.values()), fillvalue={})
    steps = [list(dict.fromkeys(itertools.chain(*of_row))) for of_row in rows]
    height = 1.0 + sum(0.7 + 0.16 * len(of_row) * (len(colors) + 1) for of_row in steps)
    figure = Figure(figsize=(9, height), layout="constrained")
    panels = figure.subplots(
        len(steps), len(columns), sharex=True, sharey="row", squeeze=False, height_ratios=list(map(len, steps))
    )
    for column, (mode, of_mode) in enumerate(columns.items()):
        for row, (shapes, of_panel) in enumerate(of_mode.items()):
            panels[row][column].set_title(f"{shapes}, {mode}", fontsize="medium")
            _draw_panel(panels[row][column], of_panel, steps[row], base, colors)
            panels[row][column].set_ylim(len(steps[row]) - 0.4, -0.6)
    figure.supxlabel(f"time of a step / with {base}", fontsize="medium")
    handles = [Patch(color=color, label=name) for name, color in colors.items()]
    figure.legend(handles=handles, loc="outside upper center", ncols=len(handles), fontsize="small", frameon=False)
    figure.savefig(path, dpi=100)


def _draw_panel(
    panel: Any,  # noqa: ANN401 - matplotlib has types only where it is installed
    of_panel: dict[str, Results],
    steps: Sequence[str],
    base: str,
    colors: Mapping[str, str],
) -> None:
    width = 0.8 / len(colors)
    for index, (name, color) in enumerate(colors.items()):
        for step, results in of_panel.items():
            if name not in results.turns:
                continue
            ratio = results.ratio(name, base)
            place = steps.index(step) + width * (index - (len(colors) - 1) / 2)
            length = min(ratio, _LONGEST)
            panel.barh(place, length, 0.9 * width, color=color)
            # The white background keeps the number readable where it crosses the line at 1.
            background = {"facecolor": "white", "edgecolor": "none", "pad": 0.5}
            panel.text(length + 0.03, place, f"{ratio:.2f}", va="center", fontsize=7, bbox=background)
    panel.axvline(1, color="black", linewidth=0.8)
    panel.set_xlim(0, _LONGEST + 0.3)
    panel.set_yticks(range(len(steps)), steps, fontsize="small")
    panel.tick_params(axis="y", length=0)
    panel.grid(axis="x", alpha=0.3)
    panel.set_axisbelow(True)
    panel.spines[["top", "right", "left"]].set_visible(False)
