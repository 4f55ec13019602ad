"""Runs contenders in turns, and tells what a step of each costs."""

import random
import statistics
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np
import tensorflow as tf

from benchmarks.harness import report

#: Steps that are not measured, after the first.
_WARM_UP = 1

_Step: TypeAlias = Callable[[], object]


class Contender(NamedTuple):
    """What takes a step.

    Attributes:
        name: What a table calls it.
        step: Takes a step, and returns when it is done.
        weights: Returns what the steps train; None for a yardstick, which trains nothing.
    """

    name: str
    step: _Step
    weights: Callable[[], list[np.ndarray]] | None = None


class Results(NamedTuple):
    """What was measured, by the contenders' names.

    Attributes:
        first_call: Seconds of the first step, which traces and compiles.
        peak_memory: The most bytes that a step needs beside what there is before it; None where it cannot be told.
        turns: Seconds of each step after those, in the order of the rounds.
    """

    first_call: dict[str, float]
    peak_memory: dict[str, int | None]
    turns: dict[str, list[float]]

    def seconds(self, name: str) -> float:
        """Return the median time of a contender's step.

        Args:
            name: The contender.
        """
        return statistics.median(self.turns[name])

    def ratio(self, name: str, base: str) -> float:
        """Return the median, over the rounds, of a contender's time as a multiple of another's in the same round.

        Args:
            name: The contender.
            base: The other.

        Example:
            >>> Results({}, {}, {"a": [1.0, 4.0, 9.0], "b": [1.0, 2.0, 3.0]}).ratio("a", "b")
            2.0
        """
        return report.median_ratio(self.turns[name], self.turns[base])

    def cost(self, name: str, base: str, unit: str) -> float:
        """Return the median of what a contender takes longer than another, as a multiple of a third one's time.

        Args:
            name: The contender.
            base: The other.
            unit: The third.

        Example:
            >>> Results({}, {}, {"a": [5.0], "b": [2.0], "c": [1.5]}).cost("a", "b", "c")
            2.0
        """
        turns = zip(self.turns[name], self.turns[base], self.turns[unit], strict=True)
        return statistics.median((one - other) / third for one, other, third in turns)


def measure(contenders: Sequence[Contender], rounds: int) -> Results:
    """Let contenders take steps in turns.

    Every round has its own order: a step finds in the caches what the one before it left there, and no contender should
    always follow the same one.

    Args:
        contenders: Who takes part.
        rounds: How many turns each has.

    Example:
        >>> results = measure([Contender("sleep", lambda: time.sleep(0.001))], rounds=3)
        >>> len(results.turns["sleep"]), results.seconds("sleep") > 0.001
        (3, True)
    """
    first_call = {each.name: seconds_of(each.step) for each in contenders}
    for each in _WARM_UP * list(contenders):
        each.step()
    peak_memory = {each.name: _peak_memory(each.step) for each in contenders}
    turns: dict[str, list[float]] = {each.name: [] for each in contenders}
    orders = random.Random(0)
    for _ in range(rounds):
        for each in orders.sample(contenders, len(contenders)):
            turns[each.name].append(seconds_of(each.step))
    return Results(first_call, peak_memory, turns)


def seconds_of(step: Callable[[], object]) -> float:
    """Return how long a step takes.

    Args:
        step: Takes a step, and returns when it is done.
    """
    started = time.perf_counter()
    step()
    return time.perf_counter() - started


def with_wrong_steps(contenders: Sequence[Contender], outcome: str) -> list[str]:
    """Return the names of the contenders that did not take the steps they should.

    All have taken equally many, from weights of 0: when steps are applied, all should be where the first of them is,
    but for rounding; when they are skipped, only bare optimizers should have moved.

    Args:
        contenders: Who took part.
        outcome: What the steps should have been, "good" or "skipped".

    Example:
        >>> ends = {"bare": 1.0, "tfmp": 1.0001, "other": 2.0, "idle": 0.0}
        >>> contenders = [Contender(name, len, lambda end=end: [np.full(3, end)]) for name, end in ends.items()]
        >>> with_wrong_steps(contenders, "good")
        ['other', 'idle']
        >>> with_wrong_steps(contenders, "skipped")
        ['tfmp', 'other']
    """
    trained = {each.name: each.weights for each in contenders if each.weights is not None}
    expected = next(iter(trained.values()))()
    wrong = []
    for name, weights in trained.items():
        if outcome == "good" or name.startswith("bare"):
            right = all(map(_have_moved_to, weights(), expected))
        else:
            right = not any(map(np.any, weights()))
        if not right:
            wrong.append(name)
    return wrong


def _have_moved_to(weights: np.ndarray, expected: np.ndarray) -> bool:
    return bool(np.any(weights)) and np.allclose(weights, expected, rtol=1e-3, atol=1e-3 * np.max(np.abs(expected)))


def table(results: Results, bases: Sequence[str]) -> str:
    """Return what was measured as a table.

    Args:
        results: What was measured.
        bases: The contenders to give times as multiples of.
    """
    header = ["", "ms", *(f"/ {base}" for base in bases), "peak MiB", "first call, s"]
    rows = [
        [
            name,
            f"{1000 * results.seconds(name):.1f}",
            *(f"{results.ratio(name, base):.2f}" for base in bases),
            _mebibytes(results.peak_memory[name]),
            f"{first:.1f}",
        ]
        for name, first in results.first_call.items()
    ]
    return report.table(header, rows)


def _peak_memory(step: _Step) -> int | None:
    """Take a step; return what TensorFlow's allocator counted, where it counts."""
    # Not the process' memory: the allocator keeps what was freed. TensorFlow 2.15 to 2.21 count from 256 KiB.
    try:
        tf.config.experimental.reset_memory_stats("CPU:0")
    except ValueError:
        step()
        return None
    before = tf.config.experimental.get_memory_info("CPU:0")["current"]
    step()
    return tf.config.experimental.get_memory_info("CPU:0")["peak"] - before


def _mebibytes(size: int | None) -> str:
    return "" if size is None else f"{size / 2**20:.0f}"
