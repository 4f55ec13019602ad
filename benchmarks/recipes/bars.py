"""What the recipes should keep: each expectation as a sentence with what was measured."""

import statistics
from collections.abc import Callable, Iterator

from benchmarks.recipes.results import Results, accuracy, deviation, peak, ratio
from benchmarks.recipes.training import PRECISIONS, Cell, Measured

_LEAST_LOSS = 20.0
_MOST_MEMORY = 0.55
_MOST_DIFFERENCE = 0.3


def sentences(results: Results) -> list[str]:
    """Return a sentence for each expectation of which something was measured.

    Args:
        results: The results.
    """
    checks: list[Callable[[Results], Iterator[str]]] = [
        _scaled_like_float32,
        _unscaled_fails,
        _recomputation_saves,
        _all_run,
        _half_state_is_as_good,
    ]
    return [sentence for check in checks for sentence in check(results)]


def _scaled_like_float32(results: Results) -> Iterator[str]:
    for net in dict.fromkeys(cell.net for cell in results):
        expected, found = (_accuracies(results, net, precision) for precision in ("float32", "float16-tfmp"))
        if not expected or not found:
            continue
        difference, allowed = statistics.mean(found) - statistics.mean(expected), deviation(expected)
        yield (
            f"{net}: float16 with tfmp is {difference:+.2f} points beside float32, whose trainings deviate by "
            f"{allowed:.2f}: that it is within one deviation {_holds(abs(difference) <= allowed)}."
        )


def _unscaled_fails(results: Results) -> Iterator[str]:
    losses = [
        mean - other
        for cell, measured in _of(results, "branched", "float32")
        if (mean := accuracy(measured)) is not None
        and (other := accuracy(results.get(cell._replace(precision="float16-unscaled"), {}))) is not None
    ]
    if losses:
        yield (
            f"branched: float16 without scaling is {min(losses):.1f} to {max(losses):.1f} points below float32: that "
            f"it is at least {_LEAST_LOSS:.0f} {_holds(min(losses) >= _LEAST_LOSS)}."
        )


def _recomputation_saves(results: Results) -> Iterator[str]:
    for precision in PRECISIONS:
        quotients = {
            cell.state: quotient
            for cell, _ in _of(results, "transformer", precision)
            if cell.way == "recomputation"
            and (quotient := ratio(results, peak, cell, cell._replace(way="plain"))) is not None
        }
        if quotients:
            each = ", ".join(f"{100 * quotient:.0f} % ({state} state)" for state, quotient in quotients.items())
            yield (
                f"transformer, {precision}: recomputation takes {each} of the memory of plain: that it is at most "
                f"{100 * _MOST_MEMORY:.0f} % {_holds(max(quotients.values()) <= _MOST_MEMORY)}."
            )


def _all_run(results: Results) -> Iterator[str]:
    errors = [f"{cell} raises {measured['error']}" for cell, measured in results.items() if "error" in measured]
    yield f"{len(results) - len(errors)} of {len(results)} cells ran: that all run {_holds(not errors)}."
    yield from errors


def _half_state_is_as_good(results: Results) -> Iterator[str]:
    """Compare the means over all ways: those of single cells differ by chance."""
    for net in dict.fromkeys(cell.net for cell in results):
        differences = {}
        for precision in PRECISIONS:
            float32, half = (_accuracies(results, net, precision, state) for state in ("float32", "half"))
            # A net that does not learn has accuracies by chance.
            if float32 and half and precision != "float16-unscaled":
                differences[precision] = statistics.mean(half) - statistics.mean(float32)
        if differences:
            each = ", ".join(f"{difference:+.2f} points ({name})" for name, difference in differences.items())
            largest = max(map(abs, differences.values()))
            yield (
                f"{net}: half state is {each} beside float32 state: that it is within {_MOST_DIFFERENCE} "
                f"{_holds(largest <= _MOST_DIFFERENCE)}."
            )


def _accuracies(results: Results, net: str, precision: str, state: str | None = None) -> list[float]:
    """Return the accuracies of all trainings of a net in a precision, of all ways and of one state or both."""
    return [
        each
        for cell, measured in _of(results, net, precision)
        if state in (None, cell.state)
        for each in measured.get("accuracies", [])
    ]


def _of(results: Results, net: str, precision: str) -> Iterator[tuple[Cell, Measured]]:
    return ((cell, each) for cell, each in results.items() if (cell.net, cell.precision) == (net, precision))


def _holds(condition: bool) -> str:
    return "holds" if condition else "does not hold"
