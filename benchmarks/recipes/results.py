"""The figures of the cells: their ratios and their tables."""

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

from benchmarks.harness import report
from benchmarks.recipes.training import Cell, Measured

#: The figures of each cell that was measured.
Results: TypeAlias = dict[Cell, Measured]

#: A figure of a cell, which is None if it is not known.
Figure: TypeAlias = Callable[[Measured], float | None]


def from_json(figures: Iterable[Mapping[str, Any]]) -> Results:
    """Return the results of figures that `to_json` returned.

    Args:
        figures: The figures.
    """
    return {Cell(*(each[field] for field in Cell._fields)): dict(each) for each in figures}


def to_json(results: Results) -> list[dict[str, Any]]:
    """Return the results in types that JSON supports.

    Args:
        results: The results.

    Examples:
        >>> results = {Cell("branched", "float32", "plain", "half"): {"error": "no memory"}}
        >>> from_json(to_json(results)).keys() == results.keys()
        True
    """
    return [{**cell._asdict(), **measured} for cell, measured in results.items()]


def accuracy(measured: Measured) -> float | None:
    """Return the mean accuracy over the seeds, in %.

    Args:
        measured: The figures of a cell.
    """
    return statistics.mean(measured["accuracies"]) if measured.get("accuracies") else None


def peak(measured: Measured) -> float | None:
    """Return the median peak over the seeds, in bytes.

    Args:
        measured: The figures of a cell.
    """
    return statistics.median(measured["peak_bytes"]) if measured.get("peak_bytes") else None


def seconds(measured: Measured) -> float | None:
    """Return the median time of a step over the seeds.

    Args:
        measured: The figures of a cell.
    """
    return statistics.median(measured["step_seconds"]) if measured.get("step_seconds") else None


def ratio(results: Results, figure: Figure, cell: Cell, base: Cell) -> float | None:
    """Return the quotient of a figure of two cells; None if one of them is not known.

    Args:
        results: The results.
        figure: The figure.
        cell: The cell of the numerator.
        base: The cell of the denominator.
    """
    one, other = (figure(results.get(each, {})) for each in (cell, base))
    return one / other if one and other else None


def base_of(cell: Cell) -> Cell:
    """Return the cell of the same net without any technique, with which the others are compared.

    Args:
        cell: A cell.
    """
    return Cell(cell.net, "float32", "plain", "float32")


def tables(results: Results) -> str:
    """Return a table in Markdown for each net, with a row for each precision and way, and columns for each state.

    Args:
        results: The results.
    """
    nets, states = (
        list(dict.fromkeys(names)) for names in zip(*((cell.net, cell.state) for cell in results), strict=True)
    )
    return "\n\n".join(f"{net}\n\n{_table(results, net, states)}" for net in nets)


def _table(results: Results, net: str, states: Sequence[str]) -> str:
    rows = dict.fromkeys((cell.precision, cell.way) for cell in results if cell.net == net)
    header = ["precision", "way"]
    for state in states:
        header += [f"{state} state: accuracy %", "peak MiB", "optimizer KiB", "ms a step"]
    lines = [[*row, *(text for state in states for text in _texts(results, Cell(net, *row, state)))] for row in rows]
    return report.table(header, lines)


def _texts(results: Results, cell: Cell) -> list[str]:
    measured = results.get(cell, {})
    if "accuracies" not in measured:
        return ["raises" if "error" in measured else "", "", "", ""]
    peak_of_cell, state_bytes = peak(measured), measured["state_bytes"]
    memory = "not known" if peak_of_cell is None else f"{peak_of_cell / 2**20:.1f}"
    return [
        accuracy_text(measured),
        memory + _beside(ratio(results, peak, cell, base_of(cell))),
        f"{state_bytes / 2**10:.0f}",
        f"{1000 * statistics.median(measured['step_seconds']):.1f}"
        + _beside(ratio(results, seconds, cell, base_of(cell))),
    ]


def accuracy_text(measured: Measured) -> str:
    """Return the mean accuracy with its deviation.

    Args:
        measured: The figures of a cell.

    Examples:
        >>> accuracy_text({"accuracies": [94.0, 96.0, 95.0]})
        '95.0 ± 1.0'
    """
    return f"{statistics.mean(measured['accuracies']):.1f} ± {deviation(measured['accuracies']):.1f}"


def deviation(values: Sequence[float]) -> float:
    """Return the standard deviation of a sample; 0 if it has one value.

    Args:
        values: The values.
    """
    return statistics.stdev(values) if len(values) > 1 else 0.0


def _beside(quotient: float | None) -> str:
    return "" if quotient is None else f" ({quotient:.2f})"
