"""Writes the messages that name the variables whose gradients overflowed."""

from collections.abc import Sequence

import numpy as np

from tfmp.core.overflow.detectors import KINDS
from tfmp.core.overflow.overflow_counts import OverflowReport


class OverflowMessages:
    """Turns overflow reports into messages for the log, and leaves out what an earlier message already said.

    The class remembers how many overflows each report had counted at the last call. A network of a GAN whose gradients
    overflowed long ago is therefore not named again each time the gradients of the other network overflow.

    The counts in the reports must be NumPy arrays. A list of reports may grow between two calls, but it must keep its
    order. The overflows that were counted at the start of training are left out of all messages.

    Examples:
        >>> messages = OverflowMessages()
        >>> report = OverflowReport(["kernel", "bias"], np.array([[0, 12, 0], [0, 0, 0]]), np.array([3, 0]))
        >>> messages.new_overflows([report]), messages.new_overflows([report])
        (['overflow in kernel: 12 nan'], [])
        >>> print(*messages.summary_tables([report]))
        overflows by variable:
        variable  skipped steps  at the last one
        kernel                3  12 nan
    """

    def __init__(self, reports: Sequence[OverflowReport] = ()) -> None:
        # The key is the position of a report: reports are created in a fixed order, and none is ever removed.
        self._steps_at_start = _steps_by_position(reports)
        self._steps_shown = dict(self._steps_at_start)

    def new_overflows(self, reports: Sequence[OverflowReport]) -> list[str]:
        """Return the `last_overflow_sentence` of each report that counted an overflow since the previous call."""
        before, self._steps_shown = self._steps_shown, _steps_by_position(reports)
        changed = [
            report
            for position, report in enumerate(reports)
            if self._steps_shown[position] != _steps_or_zeros(before, position, report)
        ]
        sentences = [last_overflow_sentence(report.names, np.asarray(report.last)) for report in changed]
        return [sentence for sentence in sentences if sentence is not None]

    def summary_tables(self, reports: Sequence[OverflowReport]) -> list[str]:
        """Return the `overflow_table` since training started of each report that counted an overflow since then."""
        steps_since_start = [
            np.subtract(report.steps, _steps_or_zeros(self._steps_at_start, position, report))
            for position, report in enumerate(reports)
        ]
        tables = [
            overflow_table(report.names, np.asarray(report.last), steps)
            for report, steps in zip(reports, steps_since_start, strict=True)
        ]
        return [f"overflows by variable:\n{table}" for table in tables if table is not None]


def _steps_by_position(reports: Sequence[OverflowReport]) -> dict[int, list[int]]:
    return {position: np.asarray(report.steps).tolist() for position, report in enumerate(reports)}


def _steps_or_zeros(steps: dict[int, list[int]], position: int, report: OverflowReport) -> list[int]:
    """Return the steps that are stored for a report, or zeros if the report is new."""
    return steps.get(position, [0] * len(report.names))


def last_overflow_sentence(names: list[str], last: np.ndarray, at_most: int = 4) -> str | None:
    """Return a sentence that names the variables whose gradients overflowed at the last skipped step; None if none did.

    `last` has shape `[len(names), 3]`: how many elements of each gradient were infinite, NaN and saturated. The
    variables with the largest counts come first.

    Examples:
        >>> last_overflow_sentence(["kernel", "scale", "bias"], np.array([[0, 12, 0], [0, 0, 0], [3, 1, 0]]))
        'overflow in kernel: 12 nan; bias: 3 inf, 1 nan'
    """
    totals = np.sum(last, axis=1)
    order = [index for index in np.argsort(-totals, kind="stable") if totals[index]]
    if not order:
        return None
    parts = [f"{names[index]}: {_counts_in_words(last[index])}" for index in order[:at_most]]
    if len(order) > at_most:
        parts.append(f"and {len(order) - at_most} more")
    return "overflow in " + "; ".join(parts)


def overflow_table(names: list[str], last: np.ndarray, steps: np.ndarray, at_most: int = 20) -> str | None:
    """Return a table of the variables whose gradients overflowed, the most frequent first; None if none did.

    `last` is that of `last_overflow_sentence`. `steps` has shape `[len(names)]`: in how many skipped steps the gradient
    of each variable overflowed.
    """
    order = [index for index in np.argsort(-np.asarray(steps), kind="stable") if steps[index]]
    if not order:
        return None
    shown = order[:at_most]
    width = max(len("variable"), *(len(names[index]) for index in shown))
    rows = [f"{'variable':{width}}  skipped steps  at the last one"]
    rows += [f"{names[index]:{width}}  {steps[index]:13d}  {_counts_in_words(last[index])}".rstrip() for index in shown]
    if len(order) > at_most:
        rows.append(f"and {len(order) - at_most} more")
    return "\n".join(rows)


def _counts_in_words(row: np.ndarray) -> str:
    return ", ".join(f"{count} {kind}" for count, kind in zip(row, KINDS, strict=True) if count)
