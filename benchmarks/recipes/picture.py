"""Draws what a user chooses by: the memory of each recipe, with its accuracy and its time."""

from pathlib import Path
from typing import Any

from benchmarks.recipes.results import Results, accuracy, accuracy_text, base_of, peak, ratio, seconds
from benchmarks.recipes.training import PRECISIONS, WAYS, Cell

_COLORS = {
    "float32": "0.55",
    "float16-unscaled": "tab:orange",
    "float16-tfmp": "tab:blue",
    "bfloat16": "tab:green",
}

#: Accuracies that are lower than float32's by this are drawn as failures.
_FAILS = 5.0

#: Where the texts begin and end.
_TEXTS = 1.42
_END = 2.1


def draw(results: Results, path: Path) -> None:
    """Draw the peaks beside that of float32, plain: a panel for each net, and a group of bars for each way.

    Args:
        results: The results.
        path: The image file to write.
    """
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    nets = list(dict.fromkeys(cell.net for cell in results))
    rows = {
        (way, precision): index * (len(PRECISIONS) + 0.7) + position
        for index, way in enumerate(WAYS)
        for position, precision in enumerate(PRECISIONS)
    }
    figure = Figure(figsize=(1 + 4.3 * len(nets), 6.2), layout="constrained")
    for net, axis in zip(nets, figure.subplots(1, len(nets), sharey=True, squeeze=False)[0], strict=True):
        for (way, precision), place in rows.items():
            _draw_recipe(axis, results, Cell(net, precision, way, "float32"), place)
        _finish(axis, results, net)
    first = figure.axes[0]
    first.set_yticks(
        [rows[way, precision] for way in WAYS for precision in PRECISIONS],
        [precision for _ in WAYS for precision in PRECISIONS],
        fontsize="small",
    )
    for way in WAYS:
        label = {"fontsize": "medium", "weight": "bold", "ha": "right", "va": "center"}
        first.annotate(way, (0, rows[way, "float32"] - 0.85), (-6, 0), textcoords="offset points", **label)
    first.set_ylim(max(rows.values()) + 0.6, -1.3)
    handles: list[Any] = [Patch(color=color, label=name) for name, color in _COLORS.items()]
    tick = {"marker": "|", "markersize": 9, "markeredgewidth": 2, "color": "black", "linestyle": ""}
    handles.append(Line2D([], [], **tick, label="with half state"))
    figure.legend(handles=handles, loc="outside upper center", ncols=len(handles), fontsize="small", frameon=False)
    figure.supxlabel(
        "peak memory, divided by that of float32, plain; beside it the accuracy on held-out data, and the time of a "
        "step, divided by that of float32, plain",
        fontsize="small",
    )
    figure.savefig(path, dpi=110)


def _draw_recipe(axis: Any, results: Results, cell: Cell, place: float) -> None:  # noqa: ANN401 - matplotlib may be absent
    measured = results.get(cell, {})
    length = ratio(results, peak, cell, base_of(cell))
    if length is None:
        return
    axis.barh(place, length, 0.85, color=_COLORS[cell.precision])
    with_half_state = ratio(results, peak, cell._replace(state="half"), base_of(cell))
    if with_half_state is not None:
        axis.plot(with_half_state, place, "|", color="black", markersize=9, markeredgewidth=2)
    fails = (accuracy(results[base_of(cell)]) or 0) - (accuracy(measured) or 0) > _FAILS
    text = f"{accuracy_text(measured)} %, {ratio(results, seconds, cell, base_of(cell)):.1f} x"
    style = {"color": "tab:red", "weight": "bold"} if fails else {}
    axis.text(max(_TEXTS, length + 0.05), place, text, va="center", fontsize=8, **style)


def _finish(axis: Any, results: Results, net: str) -> None:  # noqa: ANN401 - matplotlib may be absent
    base = results.get(Cell(net, "float32", "plain", "float32"), {})
    size, time = peak(base), seconds(base)
    if size is not None and time is not None:
        axis.set_title(f"{net}\nfloat32, plain: {size / 2**20:.1f} MiB, {1000 * time:.1f} ms", fontsize="medium")
    axis.set_xlim(0, _END)
    axis.axvline(1, color="black", linewidth=0.8, zorder=0)
    axis.set_xticks([0, 0.25, 0.5, 0.75, 1])
    axis.tick_params(axis="y", length=0)
    axis.grid(axis="x", alpha=0.3)
    axis.set_axisbelow(True)
    axis.spines[["top", "right", "left"]].set_visible(False)
