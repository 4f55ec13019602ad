"""Measures one cell after the other, and prints and writes the figures."""

import argparse
import concurrent.futures
import contextlib
import functools
import gc
import itertools
import multiprocessing
import time
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import tensorflow as tf

from benchmarks.harness import bars, baseline, cells, contest, peak_memory, report, summary
from benchmarks.harness.cells import Cell
from benchmarks.harness.contest import Contender, Results

_Contenders: TypeAlias = Callable[[Cell, Container[str] | None], AbstractContextManager[Sequence[Contender]]]


class _Measured(NamedTuple):
    """What the measurement of a cell found.

    Attributes:
        results: The times and the memory.
        wrong: The contenders that took wrong steps.
        peak_of_process: The most memory that the process had so far, in bytes; None if it is not known.
    """

    results: Results
    wrong: list[str]
    peak_of_process: int | None


class Series(NamedTuple):
    """The settings in which the step-cost benchmarks differ.

    Attributes:
        contenders: A function that makes the contenders of a cell, for the duration of a `with`. Other processes
            import it, so it is a name of a module.
        left_out: A function that returns the contenders that cannot take part in a cell, with the reasons.
        bases: The contenders by whose times the others' times are divided; a plot uses the last one.
        remark: A function that returns one line with the most important figure of a cell; empty if there is none.
        colors: The contenders to draw, and their colors.
        names: The contenders to make; by default all that can take part.
        prepare: A function of a module that prepares a process before it measures.
    """

    contenders: _Contenders
    left_out: Callable[[Cell], dict[str, str]]
    bases: Sequence[str]
    remark: Callable[[Cell, Results], str]
    colors: Mapping[str, str]
    names: Sequence[str] | None = None
    prepare: Callable[[], object] | None = None


def run(series: Series, options: argparse.Namespace) -> int:
    """Measure, print, and write the files that the options name.

    The cells of one mode and shapes are measured in a process of their own, if there are others. TensorFlow keeps the
    largest memory that a process had, and never frees the code that XLA made and the graphs of custom gradients.

    Args:
        series: The settings of the benchmark.
        options: The options, as a parser of `cells.parser` parsed them.

    Returns:
        The exit status: 1 if a contender took wrong steps.
    """
    if options.baseline:
        return baseline.compare(series.contenders, options)
    started = time.perf_counter()
    conditions = report.printed_conditions()
    figures: list[dict[str, Any]] = []
    chosen = cells.of(options)
    groups = [list(group) for _, group in itertools.groupby(chosen, lambda cell: (cell.shapes, cell.mode))]
    for group in groups:
        with _measuring(series, options.rounds, here=len(groups) == 1) as measure:
            for cell in group:
                print(f"\n{cell} (cell {len(figures) + 1} of {len(chosen)})", flush=True)
                figures.append(_printed(series, cell, measure(cell)))
                # The file is written after every cell, so that a run that is stopped leaves the figures it has.
                report.write_json(options.json, {"conditions": conditions, "figures": figures})
    print(summary.tables(figures, series.bases), flush=True)
    print(_totals(figures, time.perf_counter() - started), flush=True)
    if options.plot:
        _plot(figures, series, options.plot)
    return 0 if all(figure["steps_checked"] for figure in figures) else 1


@contextlib.contextmanager
def _measuring(series: Series, rounds: int, *, here: bool) -> Iterator[Callable[[Cell], _Measured]]:
    """Yield a function that measures a cell, in this process or in a process that ends with the `with`."""
    measure = functools.partial(_measure, series.contenders, series.names, rounds)
    if here:
        if series.prepare is not None:
            series.prepare()
        yield measure
        return
    spawning = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(
        1, mp_context=spawning, initializer=_prepare, initargs=(series.prepare,)
    ) as process:
        yield lambda cell: process.submit(measure, cell).result()


def _prepare(prepare: Callable[[], object] | None) -> None:
    # TensorFlow warns of a function that is traced too often: the contenders' functions share their code, so that it
    # takes them for one function.
    tf.get_logger().setLevel("ERROR")
    if prepare is not None:
        prepare()


def _measure(contenders: _Contenders, names: Container[str] | None, rounds: int, cell: Cell) -> _Measured:
    with contenders(cell, names) as made:
        results = contest.measure(made, rounds)
        wrong = contest.with_wrong_steps(made, cell.outcome)
    gc.collect()
    return _Measured(results, wrong, peak_memory.of_process())


def _printed(series: Series, cell: Cell, measured: _Measured) -> dict[str, Any]:
    """Print the figures of a cell, and return them for the file."""
    reasons = series.left_out(cell)
    left_out = {name: reasons[name] for name in reasons if series.names is None or name in series.names}
    remarks = [
        series.remark(cell, measured.results),
        *(f"left out: {name}: {reason}" for name, reason in left_out.items()),
        *(f"WRONG: {name} did not take the steps of this cell" for name in measured.wrong),
    ]
    print("\n".join([contest.table(measured.results, series.bases), *filter(None, remarks)]), flush=True)
    checks = {"steps_checked": not measured.wrong, "wrong": measured.wrong, "left_out": left_out}
    return {
        **cell._asdict(),
        **measured.results._asdict(),
        **checks,
        "peak_of_process": measured.peak_of_process,
    }


def _totals(figures: Sequence[dict[str, Any]], seconds: float) -> str:
    peaks = [each["peak_of_process"] for each in figures if each["peak_of_process"] is not None]
    largest = f"; the largest process had {max(peaks) / 2**30:.1f} GiB" if peaks else ""
    return f"{seconds / 60:.1f} minutes{largest}"


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
