"""Draws up one table of all cells of a mode, with a row for each cell."""

import itertools
from collections.abc import Sequence
from typing import Any

from benchmarks.harness import contest, report
from benchmarks.harness.cells import Cell
from benchmarks.harness.contest import Results

#: The contenders with tfmp whose ratios are shown, as far as they take part.
_OURS = ("tfmp", "GradScaler")


def tables(figures: Sequence[dict[str, Any]], bases: Sequence[str]) -> str:
    """Return a table for each mode, as Markdown.

    A row has the times of the last two bases and of the contenders with tfmp, in milliseconds, the ratios of the latter
    to the former with the bounds of the middle half of their values, and the seconds of the first two calls.

    Args:
        figures: The figures of all cells, as `series` writes them to the file.
        bases: The contenders by whose times the others' times are divided.
    """
    by_mode: dict[str, list[dict[str, Any]]] = {}
    for figure in figures:
        by_mode.setdefault(figure["mode"], []).append(figure)
    return "\n".join(f"\n{mode}\n{_table(of_mode, bases[-2:])}" for mode, of_mode in by_mode.items())


def _table(figures: Sequence[dict[str, Any]], bases: Sequence[str]) -> str:
    ours = [name for name in _OURS if any(name in figure["turns"] for figure in figures)]
    names = list(dict.fromkeys([*bases, *ours]))
    pairs = list(itertools.product(ours, bases))
    header = ["step", *(f"{name}, ms" for name in names), *(f"{name} / {base}" for name, base in pairs)]
    header += [f"first two calls, s: {', '.join(names)}"]
    return report.table(header, [_row(figure, names, pairs) for figure in figures])


def _row(figure: dict[str, Any], names: Sequence[str], pairs: Sequence[tuple[str, str]]) -> list[str]:
    cell = Cell(*(figure[field] for field in Cell._fields))
    results = Results(*(figure[field] for field in Results._fields))
    # A bare optimizer cannot skip a step.
    compared = [
        "" if base == "bare" and cell.outcome == "skipped" else contest.ratio_with_spread(results, name, base)
        for name, base in pairs
    ]
    first = (f"{sum(results.first_calls[name]):.2f}" for name in names)
    times = (contest.milliseconds(results.seconds(name)) for name in names)
    return [f"{cell.shapes}, {cell.step}", *times, *compared, ", ".join(first)]
