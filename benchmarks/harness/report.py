"""Prints and writes the figures of a benchmark, with the machine, the versions and the command of the measurement."""

import importlib.metadata
import json
import os
import platform
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

_PACKAGES = ("tensorflow", "tensorflow-cpu", "keras", "horovod", "numpy")


def conditions(launcher: str = "") -> dict[str, str]:
    """Return the conditions of a measurement: the machine with its GPUs, its load, the versions and the command.

    Args:
        launcher: The program that started the command, with its options, such as horovodrun; empty if there is none.
    """
    # Not above: `benchmarks.start_cost` imports this module, and measures the import of tfmp in processes that import
    # the benchmark again.
    from tfmp import gpus

    installed = {found.metadata["Name"]: found.version for found in importlib.metadata.distributions()}
    versions = [f"{name} {installed[name]}" for name in _PACKAGES if name in installed]
    found = "; ".join(gpus.descriptions())
    return {
        "machine": f"{_processor()}, {os.cpu_count()} cores, {platform.system()} {platform.release()}",
        **({"GPUs": found} if found else {}),
        "load": f"{os.getloadavg()[0]:.2f} over the last minute",
        "versions": ", ".join([f"Python {platform.python_version()}", *versions]),
        "command": " ".join([launcher, "python", *sys.orig_argv[1:]]).strip(),
    }


def lines(conditions: dict[str, str]) -> str:
    """Return the conditions as text, one condition a line."""
    return "\n".join(f"{name + ':':10}{value}" for name, value in conditions.items())


def printed_conditions() -> dict[str, str]:
    """Print the conditions of a measurement, and return them."""
    found = conditions()
    print(lines(found), flush=True)
    return found


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table as Markdown, with aligned columns so that it is also readable in a terminal.

    Args:
        header: The names of the columns.
        rows: The rows, each with a text for every column.

    Examples:
        >>> print(table(["workers", "bytes"], [["2", "1024"]]))
        | workers | bytes |
        |---------|-------|
        | 2       | 1024  |
    """
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]

    def line(cells: Sequence[str]) -> str:
        return "| " + " | ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)) + " |"

    return "\n".join([line(header), "|" + "|".join("-" * (width + 2) for width in widths) + "|", *map(line, rows)])


def median_ratio(times: Sequence[float], others: Sequence[float]) -> float:
    """Return the median ratio of times that were measured in the same rounds.

    Args:
        times: The numerators, one time for each round.
        others: The denominators, one time for each round.

    Examples:
        >>> median_ratio([2.0, 4.0, 9.0], [1.0, 2.0, 1.0])
        2.0
    """
    return statistics.median(one / other for one, other in zip(times, others, strict=True))


def write_json(path: Path | None, figures: dict[str, Any]) -> None:
    """Write the figures as JSON, if a file is given.

    Args:
        path: The file; None to write nothing.
        figures: The figures, of types that JSON supports.
    """
    if path is not None:
        path.write_text(json.dumps(figures, indent=1) + "\n")


def _processor() -> str:
    # platform.processor() is empty on most Linux systems.
    info = Path("/proc/cpuinfo")
    lines_of_info = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines_of_info if line.startswith("model name")]
    return names[0] if names else platform.machine()
