"""Tells what a callback or a hook fetched: in the log, in summaries and histories, and whether training is stuck."""

import logging
from collections.abc import Hashable, Iterable, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np

from tfmp.core.managers import LossScaleManager
from tfmp.core.managers.step_counters import LossScaleStatus
from tfmp.core.messages import visible_logger
from tfmp.core.overflow.detectors import KINDS
from tfmp.core.overflow.found import OverflowReport
from tfmp.core.spikes.watch import SpikeReport
from tfmp.monitoring.norm_history import NormHistory
from tfmp.monitoring.stuck import LossScaleStuckError, OnStuck, StuckWatch
from tfmp.monitoring.summaries import FitSummaries, GraphSummaries
from tfmp.ranges.history import RangeHistory, RangeRecording


class StepValues(NamedTuple):
    """What is known after a step of one manager, in numbers of Python and NumPy."""

    manager: LossScaleManager
    status: LossScaleStatus
    #: None if it is not known.
    gradient_norm: float | None
    #: How many steps were skipped as spikes; None without a spike detector.
    skipped_spikes: int | None
    # What follows is fetched for reports only.
    #: One for each list of variables. There may be more in the next report, but in the same order.
    overflows: Sequence[OverflowReport] = ()
    spikes: Sequence[SpikeReport] = ()
    #: How often so many spikes came in a row that steps were applied again, and how many these must be.
    lasting_changes: int = 0
    max_consecutive_skips: int = 0
    #: The unscaled losses, if they are known.
    losses: Sequence[float] = ()

    def shown(self) -> dict[str, float]:
        """Return what is known of norms and spikes, by their names in logs and in TensorBoard."""
        numbers = {"gradient_norm": self.gradient_norm, "skipped_spikes": self.skipped_spikes}
        return {name: number for name, number in numbers.items() if number is not None}


_Report = TypeVar("_Report", OverflowReport, SpikeReport)


def with_values(report: _Report, values: Iterable[Any]) -> _Report:
    """Return a report with the values of its tensors."""
    return type(report)(report.names, *values)


class Reporter:
    """Reports on the steps of some managers, which are in the same order in each report.

    A report names only what was not counted at the last one: a network of a GAN whose gradients overflowed long ago is
    not named again each time those of the other network do.
    """

    def __init__(self, on_stuck: OnStuck, stuck_after: int) -> None:
        self.norms = NormHistory()
        self.ranges = RangeHistory()
        self._stuck = StuckWatch(on_stuck, stuck_after)

    def begin(
        self, summaries: FitSummaries | GraphSummaries, before: Sequence[StepValues] = (), *, several: bool
    ) -> None:
        """Begin with a training run, perhaps of `several` processes; leave out what was counted before it."""
        self._summaries = summaries
        self._stuck.start(several=several)
        self._seen: dict[Hashable, Any] = {}
        self.leave_out(before)
        self._at_start = dict(self._seen)

    def leave_out(self, found: Sequence[StepValues]) -> None:
        """Leave out of later reports what was counted until now."""
        self._news(found)

    def see(self, values: StepValues) -> None:
        """Keep the norm of a step, if it is known."""
        if values.gradient_norm is not None:
            self.norms._add(values.gradient_norm, values.status, values.skipped_spikes or 0)

    def record(self, recording: RangeRecording, step: int) -> None:
        """Keep a recording of ranges, and write it to the summaries of a step."""
        self.ranges._add(recording)
        self._summaries.write(step, recording.scalars(), recording.tagged())

    def report(self, found: Sequence[StepValues], step: int, *, at_end: bool = False) -> bool:
        """Report the values of each manager; return True if training should stop.

        `step` is that of the summaries. If training is `at_end`, a reason to stop is only logged.
        """
        self.see(found[0])
        for index, values in enumerate(found):
            numbers = {**values.status._asdict(), **values.shown()}
            suffix = f"_{index}" if index else ""
            self._summaries.write(step, {tag + suffix: number for tag, number in numbers.items()})
        for level, sentence in self._news(found):
            visible_logger().log(level, "%s", sentence)
        try:
            # Every manager must get its chance to warn.
            stops = [self._stuck.wants_stop(of.manager, of.status, of.losses, at_end=at_end) for of in found]
        except LossScaleStuckError:
            # Neither Keras nor a MonitoredSession tells a monitor of the end of training after an error.
            self.finish(found)
            raise
        return any(stops)

    def finish(self, found: Sequence[StepValues]) -> None:
        """Log how often the gradient of each variable overflowed since training began, and flush the summaries."""
        self._summaries.flush()
        for key, report in _overflows(found):
            steps = np.subtract(report.steps, self._at_start.get(key, 0))
            table = overflow_table(report.names, report.last, steps)
            if table is not None:
                visible_logger().info("%s", f"overflows by variable:\n{table}")

    def _news(self, found: Sequence[StepValues]) -> list[tuple[int, str]]:
        """Return what is to be said of overflows and spikes that were not counted at the last call, and its level."""
        changed = [report for key, report in _overflows(found) if np.any(self._growth(key, report.steps))]
        news = [(logging.INFO, overflow_sentence(report.names, report.last)) for report in changed]
        for index, each in enumerate(found):
            spikes = [spike for at, spike in enumerate(each.spikes) if self._growth((index, "spike", at), spike.spikes)]
            news += [(logging.INFO, spike_sentence(spike)) for spike in spikes]
            if self._growth((index, "changes"), each.lasting_changes) > 0:
                sentence = (
                    "the number of spikes in a row reached max_consecutive_skips="
                    f"{each.max_consecutive_skips}: the gradients have grown for good, or training diverges. Steps are "
                    "applied until a norm is within the bound again."
                )
                news.append((logging.WARNING, sentence))
        return [(level, sentence) for level, sentence in news if sentence is not None]

    def _growth(self, key: Hashable, count: Any) -> Any:  # noqa: ANN401 - a number or an array
        """Return by how much a count has grown since the last call with this key."""
        before = self._seen.get(key, 0)
        self._seen[key] = count
        return np.subtract(count, before)


def _overflows(found: Sequence[StepValues]) -> list[tuple[Hashable, OverflowReport]]:
    return [((index, at), report) for index, each in enumerate(found) for at, report in enumerate(each.overflows)]


def overflow_sentence(names: list[str], last: np.ndarray, at_most: int = 4) -> str | None:
    """Return a sentence that names the variables whose gradients overflowed at the last skipped step; None if none did.

    `last` has shape `[len(names), 3]`: how many elements of each gradient were infinite, NaN and saturated. The
    variables with the largest counts come first.
    """
    order = _largest_first(np.sum(last, axis=1))
    if not order:
        return None
    parts = [f"{names[index]}: {_counts_in_words(last[index])}" for index in order[:at_most]]
    return "overflow in " + "; ".join([*parts, *_rest(order, at_most)])


def overflow_table(names: list[str], last: np.ndarray, steps: np.ndarray, at_most: int = 20) -> str | None:
    """Return a table of the variables whose gradients overflowed, the most frequent first; None if none did.

    `last` is that of `overflow_sentence`. `steps` has shape `[len(names)]`: in how many skipped steps the gradient of
    each variable overflowed.
    """
    order = _largest_first(steps)
    if not order:
        return None
    shown = order[:at_most]
    width = max(len("variable"), *(len(names[index]) for index in shown))
    rows = [f"{names[index]:{width}}  {steps[index]:13d}  {_counts_in_words(last[index])}".rstrip() for index in shown]
    return "\n".join([f"{'variable':{width}}  skipped steps  at the last one", *rows, *_rest(order, at_most)])


def _largest_first(counts: np.ndarray) -> list[int]:
    """Return the positions of the counts that are not 0."""
    return [int(index) for index in np.argsort(-counts, kind="stable") if counts[index]]


def _rest(order: Sequence[int], at_most: int) -> list[str]:
    return [f"and {len(order) - at_most} more"] if len(order) > at_most else []


def _counts_in_words(row: np.ndarray) -> str:
    return ", ".join(f"{count} {kind}" for count, kind in zip(row, KINDS, strict=True) if count)


def spike_sentence(report: SpikeReport, at_most: int = 3) -> str:
    """Return a sentence on the last spike, with the variables whose gradients made its norm so large."""
    shares = np.asarray(report.shares)
    first, *others = np.argsort(-shares, kind="stable")[:at_most]
    # What is rounded to 0 % is left out. But in a model of many variables, even the largest share may be so small.
    named = [first, *(index for index in others if shares[index] >= 0.005)]
    percents = {index: f"{100 * shares[index]:.0f} %" if shares[index] >= 0.005 else "below 1 %" for index in named}
    largest = ", ".join(f"{report.names[index]} ({percent})" for index, percent in percents.items())
    return (
        f"spike: gradient norm {report.norm:.4g} above the bound {report.bound:.4g}, from {largest}; "
        f"{report.spikes} skipped so far"
    )
