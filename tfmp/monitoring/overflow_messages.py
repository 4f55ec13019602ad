"""Puts into words which variables' gradients overflowed."""

from collections.abc import Sequence

import numpy as np

from tfmp.core.overflow import KINDS
from tfmp.core.overflow_counts import OverflowReport


class GuiltyVariables:
    """Names the variables of reports of overflows, those that overflowed since it last did.

    It remembers the counts of each report: those of a network that overflowed long ago are not named again when
    another one overflows.

    Args:
        reports: The reports as they are at the start, with counts as arrays. What they count is left out.

    Example:
        >>> guilty = GuiltyVariables()
        >>> report = OverflowReport(["kernel", "bias"], np.array([[0, 12, 0], [0, 0, 0]]), np.array([3, 0]))
        >>> guilty.sentences([report]), guilty.sentences([report])
        (['overflow in kernel: 12 nan'], [])
        >>> print(*guilty.tables([report]))
        overflows by variable:
        variable  skipped steps  at the last one
        kernel                3  12 nan
    """

    def __init__(self, reports: Sequence[OverflowReport] = ()) -> None:
        # By place: reports come in the order in which they were made, and none goes.
        self._at_start = _steps_by_place(reports)
        self._shown = dict(self._at_start)

    def sentences(self, reports: Sequence[OverflowReport]) -> list[str]:
        """Return which variables overflowed at the last skipped step, for each report that changed.

        Args:
            reports: The reports as they are now, with counts as arrays.
        """
        before, self._shown = self._shown, _steps_by_place(reports)
        changed = [report for place, report in enumerate(reports) if self._shown[place] != _like(before, place, report)]
        found = [last_overflow(report.names, np.asarray(report.last)) for report in changed]
        return [sentence for sentence in found if sentence is not None]

    def tables(self, reports: Sequence[OverflowReport]) -> list[str]:
        """Return how often each variable overflowed since the start, a table for each report that has any.

        Args:
            reports: The reports as they are now, with counts as arrays.
        """
        since = [
            np.subtract(report.steps, _like(self._at_start, place, report)) for place, report in enumerate(reports)
        ]
        found = [
            overflow_table(report.names, np.asarray(report.last), steps)
            for report, steps in zip(reports, since, strict=True)
        ]
        return [f"overflows by variable:\n{table}" for table in found if table is not None]


def _steps_by_place(reports: Sequence[OverflowReport]) -> dict[int, list[int]]:
    return {place: np.asarray(report.steps).tolist() for place, report in enumerate(reports)}


def _like(steps: dict[int, list[int]], place: int, report: OverflowReport) -> list[int]:
    """Return the steps of a report, none of them where it is new."""
    return steps.get(place, [0] * len(report.names))


def last_overflow(names: list[str], last: np.ndarray, at_most: int = 4) -> str | None:
    """Return which variables overflowed at the last skipped step, in a sentence; None if none did.

    Args:
        names: The names of the variables.
        last: The counts of their elements that were infinite, NaN and saturated.
        at_most: How many to name; those with the largest counts come first.

    Example:
        >>> last_overflow(["kernel", "scale", "bias"], np.array([[0, 12, 0], [0, 0, 0], [3, 1, 0]]))
        'overflow in kernel: 12 nan; bias: 3 inf, 1 nan'
    """
    totals = np.sum(last, axis=1)
    order = [index for index in np.argsort(-totals, kind="stable") if totals[index]]
    if not order:
        return None
    parts = [f"{names[index]}: {_counts(last[index])}" for index in order[:at_most]]
    if len(order) > at_most:
        parts.append(f"and {len(order) - at_most} more")
    return "overflow in " + "; ".join(parts)


def overflow_table(names: list[str], last: np.ndarray, steps: np.ndarray, at_most: int = 20) -> str | None:
    """Return a table of the variables that overflowed and how often, most often first; None if none did.

    Args:
        names: The names of the variables.
        last: The counts of their elements that were infinite, NaN and saturated at the last skipped step.
        steps: In how many skipped steps each overflowed.
        at_most: How many rows to show.

    Example:
        >>> print(overflow_table(["kernel", "bias"], np.array([[0, 12, 0], [0, 0, 0]]), np.array([3, 10])))
        variable  skipped steps  at the last one
        bias                 10
        kernel                3  12 nan
    """
    order = [index for index in np.argsort(-np.asarray(steps), kind="stable") if steps[index]]
    if not order:
        return None
    shown = order[:at_most]
    width = max(len("variable"), *(len(names[index]) for index in shown))
    rows = [f"{'variable':{width}}  skipped steps  at the last one"]
    rows += [f"{names[index]:{width}}  {steps[index]:13d}  {_counts(last[index])}".rstrip() for index in shown]
    if len(order) > at_most:
        rows.append(f"and {len(order) - at_most} more")
    return "\n".join(rows)


def _counts(row: np.ndarray) -> str:
    return ", ".join(f"{count} {kind}" for count, kind in zip(row, KINDS, strict=True) if count)
