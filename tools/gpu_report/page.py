"""Writes the report as a page of Markdown."""

import datetime
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.harness.report import table
from tools.gpu_report.machine import Machine
from tools.gpu_report.running import Outcome, duration, lines, log_of

#: The most lines of an output that the page has; the file of the part has all of them.
_LINES = 150


def write(folder: Path, machine: Machine, outcomes: Sequence[Outcome], *, tiny: bool) -> Path:
    """Write the report, and return its path.

    Args:
        folder: The folder of the report.
        machine: The machine.
        outcomes: What became of the parts.
        tiny: Whether the parts were shortened.
    """
    path = folder / "report.md"
    path.write_text("\n\n".join(_sections(folder, machine, outcomes, tiny)) + "\n", "utf-8")
    return path


def _sections(folder: Path, machine: Machine, outcomes: Sequence[Outcome], tiny: bool) -> Iterator[str]:
    yield f"# tfmp on {machine.title}"
    now = datetime.datetime.now(datetime.timezone.utc)
    yield (
        f"Written by `python -m tools.gpu_report` on {now:%Y-%m-%d %H:%M} UTC. The outputs of all parts are in the "
        "files `*.log`, and the figures in the files `*.json`."
    )
    if tiny:
        yield "The parts were shortened by `--tiny`: **no figure on this page is a measurement.**"
    yield "## The machine"
    yield "\n".join(f"* {name}: {value}" for name, value in machine.rows.items())
    yield "## The parts"
    yield table(["part", "result", "exit status", "time"], [_row(each) for each in outcomes])
    for each in outcomes:
        yield f"## {each.part.name}"
        yield f"{each.part.about[0].upper()}{each.part.about[1:]}: {each.result}."
        yield f"`{each.part.command}`"
        if each.status is not None:
            yield _output(folder, each)


def _row(outcome: Outcome) -> list[str]:
    ran = outcome.status is not None
    status, time = (str(outcome.status), duration(outcome.seconds)) if ran else ("", "")
    return [outcome.part.name, outcome.result, status, time]


def _output(folder: Path, outcome: Outcome) -> str:
    log = log_of(outcome.part, folder)
    shown = lines(log)
    left_out = len(shown) - _LINES
    if left_out > 0:
        shown = [f"[{left_out} lines before these are in {log.name}]", *shown[-_LINES:]]
    # The outputs have tables of Markdown, and code in backticks.
    return "\n".join(["~~~~", *shown, "~~~~"])
