"""What a callback does with the norms of gradients during `fit`, and with the steps that were skipped as spikes."""

import math
from typing import Any

import numpy as np

from tfmp.core.log import visible_logger
from tfmp.core.spikes.reports import SpikeReport
from tfmp.core.step.properties import StepProperties
from tfmp.monitoring.norm_history import NormHistory
from tfmp.monitoring.spike_messages import SpikeMessages


class FitSpikes:
    """Reads the norms of the gradients of one optimizer or scaler, and reports its spikes.

    `shows_norm` tells whether anybody wants to see the norms. Spikes are shown wherever there is a detector.
    """

    def __init__(self, *, shows_norm: bool) -> None:
        self.history = NormHistory()
        self._shows_norm = shows_norm
        self._opt: StepProperties | None = None
        self._messages = SpikeMessages()

    def begin(self, model: Any, opt: StepProperties, *, several: bool) -> None:  # noqa: ANN401 - of any Keras
        """Prepare a model for the `fit` that begins; `several` tells whether several processes train together."""
        self._opt = opt
        # If replicas sum gradients to measure the norm, all processes must, and perhaps only one has a callback.
        if self._shows_norm and not several:
            opt.record_gradient_norm()
            # While no norm is known, the training step may have been traced before, without the ops that measure.
            if getattr(model, "train_function", None) is not None and math.isnan(float(opt.gradient_norm)):
                model.make_train_function(force=True)
        changes = 0 if opt.spike_detector is None else int(opt.spike_detector.lasting_changes)
        self._messages = SpikeMessages(self._reports(), changes)

    def scalars(self) -> dict[str, float]:
        """Return what the logs show, and keep it in the history."""
        opt = self._opt
        if opt is None:
            return {}
        skipped_spikes = int(opt.skipped_spikes)
        spikes: dict[str, float] = {} if opt.spike_detector is None else {"skipped_spikes": skipped_spikes}
        if not (self._shows_norm and opt.records_gradient_norm):
            return spikes
        norm = float(opt.gradient_norm)
        self.history._add(norm, opt.manager.get_status(), skipped_spikes)
        return {"gradient_norm": norm, **spikes}

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
