"""Measures one cell after the other, and prints and writes the figures."""

import argparse
import gc
import itertools
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.harness import bars, baseline, cells, contest, report
from benchmarks.harness.cells import Cell
from benchmarks.harness.contest import Contender, Results


class Series(NamedTuple):
    """The settings in which the step-cost benchmarks differ.

    Attributes:
        contenders: A function that makes the contenders of a cell, for the duration of a `with`.
        left_out: A function that returns the contenders that cannot take part in a cell, with the reasons.
        bases: The contenders by whose times the others' times are divided; a plot uses the last one.
        remark: A function that returns one line with the most important figure of a cell; empty if there is none.
        colors: The contenders to draw, and their colors.
    """

    contenders: Callable[..., AbstractContextManager[Sequence[Contender]]]
    left_out: Callable[[Cell], dict[str, str]]
    bases: Sequence[str]
    remark: Callable[[Cell, Results], str]
    colors: Mapping[str, str]


def run(series: Series, options: argparse.Namespace) -> int:
    """Measure, print, and write the files that the options name.

    Args:
        series: The settings of the benchmark.
        options: The options, as a parser of `cells.parser` parsed them.

    Returns:
        The exit status: 1 if a contender took wrong steps.
    """
    if options.baseline:
        return baseline.compare(series.contenders, options)
    conditions = report.printed_conditions()
    figures = []
    chosen = cells.of(options)
    for number, cell in enumerate(chosen, start=1):
        print(f"\n{cell} (cell {number} of {len(chosen)})", flush=True)
        figures.append(_measure(series, cell, options.rounds))
        gc.collect()
        # The file is written after every cell, so that a run that is stopped leaves the figures it has.
        report.write_json(options.json, {"conditions": conditions, "figures": figures})
    if options.plot:
        _plot(figures, series, options.plot)
    return 0 if all(figure["steps_checked"] for figure in figures) else 1


def _measure(series: Series, cell: Cell, rounds: int) -> dict[str, Any]:
    left_out = series.left_out(cell)
    with series.contenders(cell) as contenders:
        results = contest.measure(contenders, rounds)
        wrong = contest.with_wrong_steps(contenders, cell.outcome)
    remarks = [
        series.remark(cell, results),
        *(f"left out: {name}: {reason}" for name, reason in left_out.items()),
        *(f"WRONG: {name} did not take the steps of this cell" for name in wrong),
    ]
    print("\n".join([contest.table(results, series.bases), *filter(None, remarks)]), flush=True)
    checks = {"steps_checked": not wrong, "wrong": wrong, "left_out": left_out}
    return {**cell._asdict(), **results._asdict(), **checks}


def _plot(figures: Sequence[dict[str, Any]], series: Series, path: Path) -> None:
    """Draw the times of steps beside those of the last base, with a column for each mode and a row for the shapes."""
    base = series.bases[-1]
    columns: dict[str, dict[str, dict[str, dict[str, float | None]]]] = {}
    for each in figures:
        cell = Cell(*(each[field] for field in Cell._fields))
        results = Results(*(each[field] for field in Results._fields))
        ratios = {name: results.ratio(name, base) for name in results.turns}
        columns.setdefault(cell.mode, {}).setdefault(cell.shapes, {})[cell.step] = ratios
    panels = [
        [bars.Panel(f"{shapes}, {mode}", groups) for shapes, groups in of_mode.items()]
        for mode, of_mode in columns.items()
    ]
    # Not every mode runs with all shapes.
    rows = list(itertools.zip_longest(*panels, fillvalue=bars.Panel("", {})))
    bars.draw(rows, [f"time / {base}"] * len(columns), series.colors, path)
