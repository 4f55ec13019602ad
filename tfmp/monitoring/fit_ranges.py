"""Records the ranges of weights, gradients and activations while `fit` of any Keras trains."""

from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from tfmp.core.adapters import names_of
from tfmp.hosts.keras.which import keras_of
from tfmp.ranges.check.keras_models import KerasModel
from tfmp.ranges.check.model_runs import Precision
from tfmp.ranges.exponents import exponent_counts
from tfmp.ranges.gradient_ranges import GradientRanges, StepsWithRanges
from tfmp.ranges.histogram import RangeHistogram
from tfmp.ranges.history import RangeHistory, RangeRecording, histograms_by_name


class _Asked(NamedTuple):
    """A step that was asked for the ranges of its gradients."""

    #: Its number in this `fit`, from 1.
    step: int
    #: Its number among the attempted steps, from 1.
    attempt: int
    #: The loss scale before it.
    loss_scale: float


class FitRanges:
    """The recordings of one callback.

    The gradients of a step are counted within that step. Activations cannot be seen from outside of it, so they are
    recorded in a run of their own, of a batch that the user gives, if any.
    """

    def __init__(self, every_n_steps: int, batch: Any) -> None:  # noqa: ANN401 - whatever the model takes
        self._every_n_steps = every_n_steps
        self._batch = batch
        self.history = RangeHistory()
        self._gradient_ranges: GradientRanges | None = None

    def begin(self, model: Any, opt: StepsWithRanges) -> None:  # noqa: ANN401 - a model of any Keras
        """Prepare a model for the `fit` that begins."""
        self._model, self._opt = model, opt
        gradient_ranges = opt.record_gradient_ranges()
        if gradient_ranges is not self._gradient_ranges and getattr(model, "train_function", None) is not None:
            # The training step may have been traced before, without the ops that count.
            model.make_train_function(force=True)
        self._gradient_ranges = gradient_ranges
        self._steps = 0
        self._next = self._every_n_steps
        #: None if no step was asked for since the last recording.
        self._asked: _Asked | None = None
        # A model that is not built yet is built by its first step.
        self._activations = self._checked_model() if model.built else None

    def before_step(self) -> None:
        """Request the gradients of the coming step, if it is one to record."""
        if self._gradient_ranges is not None and self._asked is None and self._steps + 1 >= self._next:
            loss_scale = float(self._opt.manager.get_loss_scale())
            self._asked = _Asked(self._steps + 1, int(self._opt.attempted_steps) + 1, loss_scale)
            self._gradient_ranges.request()

    def after_steps(self, count: int) -> RangeRecording | None:
        """Return the recording of the `count` steps that just ended; None if none of them was one to record."""
        self._steps += count
        if self._gradient_ranges is None or self._asked is None:
            return None
        # A call that only adds a micro-batch to a window is no step: then the next one is recorded.
        records = self._gradient_ranges.read()
        if not records:
            return None
        names = [name for record in records for name in record.names]
        unscaled = [
            RangeHistogram(counts).times(1 / record.scaled_by).row for record in records for counts in record.counts
        ]
        kinds = {
            "gradients": histograms_by_name(names, unscaled),
            "weights": self._weights(),
            **self._activation_kinds(self._asked.loss_scale),
        }
        recording = RangeRecording(self._asked.attempt, self._asked.loss_scale, kinds)
        self.history._add(recording)
        self._next = (self._asked.step // self._every_n_steps + 1) * self._every_n_steps
        self._asked = None
        return recording

    def scalars(self) -> dict[str, float]:
        """Return what the logs show: the shares of the last recording, NaN before the first one."""
        if self.history.last is not None:
            return self.history.last.scalars()
        return dict.fromkeys(("gradients_zero", "gradients_lost", "gradients_subnormal"), np.nan)

    def _checked_model(self) -> KerasModel | None:
        keras = None if self._batch is None else keras_of(self._model, "layers.Layer")
        return None if keras is None else KerasModel(keras, self._model, None)

    def _weights(self) -> dict[str, RangeHistogram]:
        variables = self._model.trainable_variables
        counts = exponent_counts([tf.convert_to_tensor(each) for each in variables]).numpy() if variables else []
        return histograms_by_name(names_of(variables), counts)

    def _activation_kinds(self, loss_scale: float) -> dict[str, dict[str, RangeHistogram]]:
        self._activations = self._activations or self._checked_model()
        if self._activations is None:
            return {}
        run = self._activations.run(self._batch, Precision(None, loss_scale))
        return {
            "activations": {name: each.histogram for name, each in run.outputs.items()},
            "activation_gradients": {
                name: each.histogram.times(1 / loss_scale) for name, each in run.output_gradients.items()
            },
        }
