"""Writes the messages about steps that were skipped as spikes."""

from collections.abc import Mapping, Sequence

import numpy as np

from tfmp.core.spikes.reports import SpikeReport


class SpikeMessages:
    """Turns spike reports into messages for the log, and leaves out what an earlier message already said.

    The values in the reports must be NumPy's. A list of reports may grow between two calls, but must keep its order.

    Examples:
        >>> messages = SpikeMessages()
        >>> report = SpikeReport(["kernel", "bias"], *map(np.array, ([0.75, 0.25], 100.0, 8.0, 1)))
        >>> messages.new_spikes([report]), messages.new_spikes([report])
        (['spike: gradient norm 100 above the bound 8, from kernel (75 %), bias (25 %); 1 skipped so far'], [])
    """

    def __init__(self, reports: Sequence[SpikeReport] = (), lasting_changes: int = 0) -> None:
        self._spikes = _spikes(reports)
        self._lasting_changes = lasting_changes

    def new_spikes(self, reports: Sequence[SpikeReport]) -> list[str]:
        """Return a sentence on the last spike of each report that counted one since the previous call."""
        before, self._spikes = self._spikes, _spikes(reports)
        changed = [report for index, report in enumerate(reports) if self._spikes[index] != before.get(index, 0)]
        return [_sentence(report) for report in changed]

    def new_changes(self, lasting_changes: int, max_consecutive_skips: int) -> list[str]:
        """Return a sentence if so many spikes came in a row that steps are applied again."""
        before, self._lasting_changes = self._lasting_changes, lasting_changes
        if lasting_changes <= before:
            return []
        return [
            f"the number of spikes in a row reached max_consecutive_skips={max_consecutive_skips}: the gradients have "
            "grown for good, or training diverges. Steps are applied until a norm is within the bound again."
        ]


def _spikes(reports: Sequence[SpikeReport]) -> Mapping[int, int]:
    return {index: int(report.spikes) for index, report in enumerate(reports)}


def _sentence(report: SpikeReport, at_most: int = 3) -> str:
    shares = np.asarray(report.shares)
    first, *others = np.argsort(-shares, kind="stable")[:at_most]
    # In a model of many variables, even the largest share may be small.
    named = [first, *(index for index in others if shares[index] >= _LEAST)]
    largest = ", ".join(f"{report.names[index]} ({_in_percent(shares[index])})" for index in named)
    return (
        f"spike: gradient norm {report.norm:.4g} above the bound {report.bound:.4g}, from {largest}; "
        f"{report.spikes} skipped so far"
    )


#: Smaller shares are rounded to 0 %.
_LEAST = 0.005


def _in_percent(share: float) -> str:
    return f"{100 * share:.0f} %" if share >= _LEAST else "below 1 %"
