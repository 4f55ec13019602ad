"""Lets contenders take steps in turns, and measures the steps."""

import functools
import math
import random
import statistics
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np
import tensorflow as tf

from benchmarks.harness import report
from benchmarks.harness.peak_memory import device_of_allocator

#: How many steps are the first ones: in eager code, tfmp compiles its update for the second step.
_FIRST_CALLS = 2

#: The approximate duration of a turn of the slowest contender. A turn takes several steps if steps are shorter, because
#: the time of a single short step varies too much.
_SECONDS_OF_TURN = 0.1

#: The largest number of steps of a contender. All gradients are scaled by the initial loss scale, and the wrappers
#: raise theirs after 2000 good steps.
MOST_STEPS = 1900

_Step: TypeAlias = Callable[[], object]


class Contender(NamedTuple):
    """An optimizer whose steps are measured, or a yardstick such as a copy of all gradients.

    Attributes:
        name: The name in tables.
        step: A function that takes a step, and returns when the step is done.
        weights: A function that returns the trained weights; None for a yardstick, which trains nothing.
    """

    name: str
    step: _Step
    weights: Callable[[], list[np.ndarray]] | None = None


class Results(NamedTuple):
    """The results of a measurement, by the contenders' names.

    Attributes:
        first_calls: The seconds of each of the first steps, which trace and compile.
        peak_memory: The peak memory of a step, in bytes above the memory in use before it; None if it is not known.
        turns: The seconds of each contender's step in each round; the mean if a turn has several steps.
    """

    first_calls: dict[str, list[float]]
    peak_memory: dict[str, int | None]
    turns: dict[str, list[float]]

    def seconds(self, name: str) -> float:
        """Return the median time of a contender's step.

        Args:
            name: The contender.
        """
        return statistics.median(self.turns[name])

    def ratio(self, name: str, base: str) -> float:
        """Return a contender's time divided by another contender's time in the same round; the median of all rounds.

        Args:
            name: The contender.
            base: The contender to divide by.

        Examples:
            >>> Results({}, {}, {"a": [1.0, 4.0, 9.0], "b": [1.0, 2.0, 3.0]}).ratio("a", "b")
            2.0
        """
        return report.median_ratio(self.turns[name], self.turns[base])

    def spread(self, name: str, base: str) -> tuple[float, float]:
        """Return the bounds of the middle half of a contender's ratios to another one, over all rounds.

        Args:
            name: The contender.
            base: The contender to divide by.

        Examples:
            >>> Results({}, {}, {"a": [1.0, 2.0, 3.0, 4.0, 9.0], "b": [1.0] * 5}).spread("a", "b")
            (2.0, 4.0)
        """
        ratios = [one / other for one, other in zip(self.turns[name], self.turns[base], strict=True)]
        low, high = np.percentile(ratios, [25, 75])
        return float(low), float(high)

    def cost(self, name: str, base: str, unit: str) -> float:
        """Return the extra time of a contender beside another one, in units of a third one's time; the median.

        Args:
            name: The contender.
            base: The contender whose time is subtracted.
            unit: The contender whose time is the unit.

        Examples:
            >>> Results({}, {}, {"a": [5.0], "b": [2.0], "c": [1.5]}).cost("a", "b", "c")
            2.0
        """
        turns = zip(self.turns[name], self.turns[base], self.turns[unit], strict=True)
        return statistics.median((one - other) / third for one, other, third in turns)


def measure(contenders: Sequence[Contender], rounds: int) -> Results:
    """Let contenders take steps in turns.

    Every round has a random order. A step finds in the caches what the step before it left there, so no contender
    should always follow the same one. All contenders take the same number of steps in a turn: one, or several if a step
    is short.

    Args:
        contenders: The contenders.
        rounds: The number of turns of each contender.

    Examples:
        >>> results = measure([Contender("sleep", lambda: time.sleep(0.001))], rounds=3)
        >>> len(results.turns["sleep"]), results.seconds("sleep") > 0.001
        (3, True)
    """
    first_calls = {each.name: [seconds_of(each.step) for _ in range(_FIRST_CALLS)] for each in contenders}
    slowest = max(seconds_of(each.step) for each in contenders)
    steps = max(1, min(round(_SECONDS_OF_TURN / slowest), MOST_STEPS // rounds))
    peak_memory = {each.name: _peak_memory(each.step) for each in contenders}
    turns: dict[str, list[float]] = {each.name: [] for each in contenders}
    orders = random.Random(0)
    for _ in range(rounds):
        for each in orders.sample(contenders, len(contenders)):
            turns[each.name].append(seconds_of(functools.partial(taken, each.step, steps)) / steps)
    return Results(first_calls, peak_memory, turns)


def taken(step: Callable[[], object], steps: int) -> None:
    """Take several steps.

    Args:
        step: A function that takes a step, and returns when the step is done.
        steps: How many steps to take.
    """
    for _ in range(steps):
        step()


def seconds_of(step: Callable[[], object]) -> float:
    """Take a step, and return how many seconds it took.

    Args:
        step: A function that takes a step, and returns when the step is done.
    """
    started = time.perf_counter()
    step()
    return time.perf_counter() - started


def with_wrong_steps(contenders: Sequence[Contender], outcome: str) -> list[str]:
    """Return the names of the contenders that took wrong steps.

    All contenders have taken the same number of steps, from weights of 0. If the steps should be applied, all weights
    should equal those of the first contender up to rounding. If the steps should be skipped, only the weights of bare
    optimizers should have changed.

    Args:
        contenders: The contenders after the measurement.
        outcome: The outcome that the steps should have, "good" or "skipped".

    Examples:
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
    """Return the results as a Markdown table.

    Args:
        results: The results.
        bases: The contenders by whose times the others' times are divided, with a column for each.
    """
    header = ["", "ms", *(f"/ {base}" for base in bases), "peak MiB", "first two calls, s"]
    rows = [
        [
            name,
            milliseconds(results.seconds(name)),
            *(ratio_with_spread(results, name, base) for base in bases),
            mebibytes(results.peak_memory[name]),
            ", ".join(f"{seconds:.2f}" for seconds in first),
        ]
        for name, first in results.first_calls.items()
    ]
    return report.table(header, rows)


def milliseconds(seconds: float) -> str:
    """Return a time in milliseconds, with three digits or more.

    Args:
        seconds: The time in seconds.

    Examples:
        >>> [milliseconds(seconds) for seconds in (1.2345, 0.054321, 0.0054321, 0.00054321)]
        ['1234', '54.3', '5.43', '0.543']
    """
    return f"{1000 * seconds:.{max(0, min(3, 2 - math.floor(math.log10(1000 * seconds))))}f}"


def ratio_with_spread(results: Results, name: str, base: str) -> str:
    """Return the ratio of two contenders' times with the bounds of the middle half, as a text.

    Args:
        results: The results.
        name: The contender.
        base: The contender to divide by.
    """
    low, high = results.spread(name, base)
    return f"{results.ratio(name, base):.2f} ({low:.2f} to {high:.2f})"


def mebibytes(size: int | None) -> str:
    """Return a size in MiB as a text, which is empty if the size is None.

    Args:
        size: The size in bytes.
    """
    return "" if size is None else f"{size / 2**20:.0f}"


def _peak_memory(step: _Step) -> int | None:
    """Take a step; return its peak memory by the statistics of TensorFlow's allocator, or None if there are none."""
    # The memory of the process would not do: the allocator keeps memory that was freed. The statistics of TensorFlow
    # 2.15 to 2.21 count tensors of 256 KiB or more, those of a GPU all tensors.
    device = device_of_allocator()
    try:
        tf.config.experimental.reset_memory_stats(device)
    except ValueError:
        step()
        return None
    before = tf.config.experimental.get_memory_info(device)["current"]
    step()
    return tf.config.experimental.get_memory_info(device)["peak"] - before
