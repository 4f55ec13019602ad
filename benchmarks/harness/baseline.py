"""Compares the steps of this checkout's tfmp with those of another checkout's, the baseline.

For each cell, several pairs of processes are started, with one process for each checkout. The two processes of a pair
take turns, so that a change of the machine's load affects both. There are several pairs because the addresses of a
process' code and data also affect its times, and do not change until the process ends.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

import tfmp
from benchmarks.harness import cells, contest, report
from benchmarks.harness.cells import Cell

#: The contenders with tfmp, and the bare optimizer, which is the same in both processes: its ratio shows the noise.
_NAMES = ("bare", "tfmp", "tfmp, tf_keras")

#: The approximate duration of a turn. A turn takes several steps if steps are shorter, because the time of a single
#: short step varies too much.
_SECONDS_OF_TURN = 0.2

#: The root of the checkout that contains this module.
_ROOT = Path(__file__).parents[2]


def compare(contenders: Callable[..., object], options: argparse.Namespace) -> int:
    """Measure, print, and write the file that the options name.

    Args:
        contenders: The function that makes the contenders of a cell; it is called `contenders` in its module.
        options: The options, as a parser of `cells.parser` parsed them, with a `baseline`.

    Returns:
        The exit status: 1 if a contender took wrong steps.
    """
    conditions = {**report.conditions(), "baseline": str(options.baseline)}
    print(report.lines(conditions), flush=True)
    figures = []
    chosen = cells.of(options)
    for number, cell in enumerate(chosen, start=1):
        print(f"\n{cell} (cell {number} of {len(chosen)})", flush=True)
        pairs = []
        for pair in range(options.pairs):
            pairs.append(_measure(contenders.__module__, cell, options))
            latest = ", ".join(f"{name} {ratio([each]):.3f}" for name, each in pairs[-1]["turns"].items())
            print(f"pair {pair + 1} of {options.pairs}: {latest}", flush=True)
        turns = {name: [pair["turns"][name] for pair in pairs] for name in pairs[0]["turns"]}
        wrong = sorted({name for pair in pairs for name in pair["wrong"]})
        print("\n".join([_table(turns), *(f"WRONG: the steps of {name}" for name in wrong)]), flush=True)
        ratios = {name: ratio(each) for name, each in turns.items()}
        figures.append({**cell._asdict(), "turns": turns, "ratios": ratios, "wrong": wrong})
        # The file is written after every cell, so that a run that is stopped leaves the figures it has.
        report.write_json(options.json, {"conditions": conditions, "figures": figures})
    print(f"\n{_slowest(figures)}")
    return int(any(figure["wrong"] for figure in figures))


def ratio(pairs: Sequence[Sequence[tuple[float, float]]]) -> float:
    """Return this checkout's time divided by the baseline's time in the same round.

    The baseline goes first in even rounds, and this checkout in odd rounds. It may cost time to go first, so the result
    is the geometric mean of two medians: that of the even rounds and that of the odd rounds. A single median would
    favor one of the checkouts if there is one more round of one kind.

    Args:
        pairs: For each pair of processes and each round, the seconds of a step: the baseline's, then this checkout's.

    Examples:
        >>> goes_first_slower = [(1.2, 1.0), (1.0, 1.2), (1.2, 1.0)]
        >>> round(ratio([goes_first_slower]), 6)
        1.0
    """
    by_order = [[ours / baselines for pair in pairs for baselines, ours in pair[start::2]] for start in (0, 1)]
    return statistics.geometric_mean(statistics.median(ratios) for ratios in by_order if ratios)


def _measure(module: str, cell: Cell, options: argparse.Namespace) -> dict[str, Any]:
    """Start a pair of processes; return the times of each contender, and the contenders that took wrong steps."""
    with ExitStack() as stack:
        # Both processes are started before the first answer is read, so that they trace and compile at the same time.
        both = [
            stack.enter_context(_Process(root, module, cell))
            for root in (options.baseline, Path(tfmp.__file__).parents[1])
        ]
        seconds = [process.answer() for process in both]
        # The number is the same for all contenders, because the check of the steps compares their weights at the end.
        slowest = max(max(each.values()) for each in seconds)
        steps = max(1, min(round(_SECONDS_OF_TURN / slowest), contest.MOST_STEPS // options.rounds))
        turns: dict[str, list[tuple[float, float]]] = {name: [] for name in seconds[0]}
        for turn in range(options.rounds):
            for name, measured in turns.items():
                # The processes take turns in going first; `ratio` relies on this order.
                order = both if turn % 2 == 0 else both[::-1]
                taken = {process: process.ask([name, steps]) for process in order}
                measured.append((taken[both[0]], taken[both[1]]))
        wrong = [
            f"{name} with {whose} tfmp"
            for process, whose in zip(both, ("the baseline's", "this checkout's"), strict=True)
            for name in process.end()
        ]
    return {"turns": turns, "wrong": wrong}


class _Process:
    """A process that runs `checkout_process`; it ends when the `with` that it is used in ends."""

    def __init__(self, root: Path, module: str, cell: Cell) -> None:
        arguments = [str(root), module, json.dumps(cell), json.dumps(_NAMES)]
        # By default a process takes all memory of a GPU, and would leave none for the other process of the pair.
        environment = {"TF_FORCE_GPU_ALLOW_GROWTH": "true", **os.environ}
        self._root = root
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.harness.checkout_process", *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=_ROOT,
            env=environment,
        )

    def __enter__(self) -> "_Process":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        # After `end` the process has ended by itself. It still runs only if an exception was raised.
        self._process.kill()
        self._process.__exit__(kind, error, at)

    def answer(self) -> Any:  # noqa: ANN401 - what JSON holds
        """Return the next answer.

        Raises:
            RuntimeError: The process ended without an answer; its error output says why.
        """
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the process with the tfmp of {self._root} ended with {self._process.wait()}.")
        return json.loads(line)

    def ask(self, question: list[Any]) -> Any:  # noqa: ANN401 - what JSON holds
        """Return the answer to a question."""
        print(json.dumps(question), file=self._process.stdin, flush=True)
        return self.answer()

    def end(self) -> list[str]:
        """End the process, and return the contenders that took wrong steps."""
        self._process.stdin.close()
        wrong = self.answer()
        self._process.wait()
        return wrong


def _table(turns: dict[str, list[list[tuple[float, float]]]]) -> str:
    rows = []
    for name, pairs in turns.items():
        baselines, ours = zip(*(turn for pair in pairs for turn in pair), strict=True)
        single = [ratio([pair]) for pair in pairs]
        rows.append(
            [
                name,
                *(f"{1000 * statistics.median(seconds):.2f}" for seconds in (baselines, ours)),
                f"{ratio(pairs):.3f}",
                f"{min(single):.3f} to {max(single):.3f}",
            ]
        )
    return report.table(["", "baseline, ms", "this checkout, ms", "ratio", "in single pairs"], rows)


def _slowest(figures: Sequence[dict[str, Any]]) -> str:
    value, cell, name = max(
        (value, str(Cell(*(figure[field] for field in Cell._fields))), name)
        for figure in figures
        for name, value in figure["ratios"].items()
        if name != "bare"
    )
    return f"Slowest beside the baseline: {name} in {cell}, {value:.3f} times its time."
