"""What a hook fetches from a graph to show the norms of gradients, and the steps that were skipped as spikes."""

from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

from tfmp.core.graph_search import ancestors
from tfmp.core.log import visible_logger
from tfmp.core.managers import LossScaleManager
from tfmp.core.managers.step_counters import LossScaleStatus
from tfmp.core.monitors.graph_records import norms_of_graph
from tfmp.core.spikes.reports import SpikeReport
from tfmp.monitoring.loss_fetches import fetched_ops
from tfmp.monitoring.spike_messages import SpikeMessages


class GraphSpikes:
    """The norms and the spikes of the steps of one manager, in the current graph.

    `norms_of_run` are to be fetched in the `session.run` call that takes a step, and `fetches` after it.
    """

    def __init__(self, manager: LossScaleManager) -> None:
        self._graph = tf.compat.v1.get_default_graph()
        recorded = [record for record in norms_of_graph() if record.manager is manager]
        stored = [record.norms.read_stored() for record in recorded[-1:] if record.norms.is_recorded]
        self._fetchable = [] if stored else [record for record in recorded if record.norm is not None]
        self._norms_of_runs: dict[frozenset[tf.Operation], list[tf.Tensor]] = {}
        all_norms = dict.fromkeys(record.norms for record in recorded)
        spikes = [each.spikes for each in all_norms if each.spikes is not None]
        self._detectors = [each.detector for each in spikes]
        self._reports: list[SpikeReport] = [report for each in all_norms for report in each.spike_reports()]
        self._messages = SpikeMessages()
        self.fetches: Mapping[str, Any] = {
            "norm": stored,
            "skipped_spikes": [detector.skipped_spikes for detector in self._detectors],
            "lasting_changes": [detector.lasting_changes for detector in self._detectors],
            "reports": [tuple(report[1:]) for report in self._reports],
        }

    def norms_of_run(self, fetches: Any) -> list[tf.Tensor]:  # noqa: ANN401 - whatever `session.run` takes
        """Return the norm of a step that a `session.run` call with these fetches takes; none if it takes no step.

        The norm of another step must not be fetched: that would compute its gradients, and exchange them with workers
        that do not take part.
        """
        ops = fetched_ops(self._graph, fetches)
        if ops is None:
            return []
        if ops not in self._norms_of_runs:
            run = set(ancestors(ops, along_control=True)) if self._fetchable else set()
            norms = [record.norm for record in self._fetchable if record.op in run]
            self._norms_of_runs[ops] = norms[-1:]
        return self._norms_of_runs[ops]

    def start(self, session: tf.compat.v1.Session) -> None:
        """Leave out of the messages what the session restored from a checkpoint."""
        if self._detectors:
            lasting_changes = session.run(self.fetches["lasting_changes"])
            self._messages = SpikeMessages(lasting_changes=int(sum(lasting_changes)))

    def shown(
        self, status: LossScaleStatus, fetched: Mapping[str, Any], norms_of_step: Sequence[float]
    ) -> dict[str, float]:
        """Return what a report shows: the norm, if it is known, and the number of spikes, if there is a detector."""
        norms = [*fetched["norm"], *norms_of_step] if status.attempted_steps else []
        spikes = {"skipped_spikes": int(sum(fetched["skipped_spikes"]))} if self._detectors else {}
        return {**({"gradient_norm": float(norms[-1])} if norms else {}), **spikes}

    def report(self, fetched: Mapping[str, Any]) -> None:
        """Log the last spikes, and that steps are applied again after many spikes in a row, if it is new."""
        if not self._detectors:
            return
        reports = [
            SpikeReport(report.names, *values) for report, values in zip(self._reports, fetched["reports"], strict=True)
        ]
        for sentence in self._messages.new_spikes(reports):
            visible_logger().info("%s", sentence)
        most = max(detector.max_consecutive_skips for detector in self._detectors)
        for sentence in self._messages.new_changes(int(sum(fetched["lasting_changes"])), most):
            visible_logger().warning("%s", sentence)
