"""What a callback does with the norms of gradients during `fit`, and with the steps that were skipped as spikes."""

from typing import Any

import numpy as np

from tfmp.core.log import visible_logger
from tfmp.core.spikes.reports import SpikeReport
from tfmp.core.step.properties import StepProperties
from tfmp.monitoring.norm_history import NormHistory
from tfmp.monitoring.spike_messages import SpikeMessages


class FitSpikes:
    """Reads the norms of the gradients of one optimizer or scaler, and reports its spikes."""

    def __init__(self) -> None:
        self.history = NormHistory()
        self._opt: StepProperties | None = None
        self._messages = SpikeMessages()

    def begin(self, model: Any, opt: StepProperties, *, records: bool) -> None:  # noqa: ANN401 - of any Keras
        """Prepare a model for the `fit` that begins; `records` says whether its steps are to measure norms."""
        self._opt = opt
        if records and not opt.records_gradient_norm:
            opt.record_gradient_norm()
            if getattr(model, "train_function", None) is not None:
                # The training step may have been traced before, without the ops that measure.
                model.make_train_function(force=True)
        changes = 0 if opt.spike_detector is None else int(opt.spike_detector.lasting_changes)
        self._messages = SpikeMessages(self._reports(), changes)

    def scalars(self) -> dict[str, float]:
        """Return what the logs show, and keep it in the history."""
        opt = self._opt
        if opt is None or not opt.records_gradient_norm:
            return {}
        norm, spikes = float(opt.gradient_norm), int(opt.skipped_spikes)
        steps = int(opt.attempted_steps)
        if steps:
            self.history._add(step=steps, norm=norm, skipped_spikes=spikes)
        return {"gradient_norm": norm, **({} if opt.spike_detector is None else {"skipped_spikes": spikes})}

    def report(self) -> None:
        """Log the last spike, and that steps are applied again after many spikes in a row, if it is new."""
        detector = None if self._opt is None else self._opt.spike_detector
        if detector is None:
            return
        for sentence in self._messages.new_spikes(self._reports()):
            visible_logger().info("%s", sentence)
        for sentence in self._messages.new_changes(int(detector.lasting_changes), detector.max_consecutive_skips):
            visible_logger().warning("%s", sentence)

    def _reports(self) -> list[SpikeReport]:
        reports = [] if self._opt is None else self._opt.spike_reports()
        return [SpikeReport(report.names, *map(np.asarray, report[1:])) for report in reports]
