"""Looks at the ranges of weights, gradients and activations while `fit` of any Keras trains."""

from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from tfmp.core.adapters import names_of
from tfmp.core.gradients.exponents import exponent_counts
from tfmp.core.monitors.gradient_ranges import GradientRanges
from tfmp.core.step.status import StepProperties
from tfmp.hosts.keras.which import keras_of
from tfmp.monitoring.range_history import RangeHistory, RangeLook, histograms_by_name
from tfmp.ranges.check.keras_models import KerasModel
from tfmp.ranges.check.model_runs import Precision
from tfmp.ranges.histogram import RangeHistogram


class _Asked(NamedTuple):
    """A step that was asked for the ranges of its gradients."""

    #: Its number in this `fit`, from 1.
    step: int
    #: Its number among the attempted steps, from 1.
    attempt: int
    #: The loss scale before it.
    loss_scale: float


class FitRanges:
    """The looks of one callback.

    The gradients of a step are counted within that step. Activations cannot be seen from outside of it, so they are
    looked at by a pass of their own, with a batch that the user gives, if any.
    """

    def __init__(self, every_n_steps: int, batch: Any) -> None:  # noqa: ANN401 - whatever the model takes
        self._every_n_steps = every_n_steps
        self._batch = batch
        self.history = RangeHistory()
        self._recording: GradientRanges | None = None

    def begin(self, model: Any, opt: StepProperties) -> None:  # noqa: ANN401 - a model of any Keras
        """Prepare a model for the `fit` that begins."""
        self._model, self._opt = model, opt
        recording = opt.record_gradient_ranges()
        if recording is not self._recording and getattr(model, "train_function", None) is not None:
            # The training step may have been traced before, without the ops that count.
            model.make_train_function(force=True)
        self._recording = recording
        self._steps = 0
        self._next = self._every_n_steps
        #: The step that was asked for, and its loss scale; None if none was since the last look.
        self._asked: _Asked | None = None
        # A model that is not built yet is built by its first step.
        self._activations = self._checked_model() if model.built else None

    def before_step(self) -> None:
        """Ask the step that comes for its gradients, if it is one to look at."""
        if self._recording is not None and self._asked is None and self._steps + 1 >= self._next:
            loss_scale = float(self._opt.manager.get_loss_scale())
            self._asked = _Asked(self._steps + 1, int(self._opt.attempted_steps) + 1, loss_scale)
            self._recording.request()

    def after_steps(self, count: int) -> RangeLook | None:
        """Return what the steps that just ended show; None if none of them was one to look at."""
        self._steps += count
        if self._recording is None or self._asked is None:
            return None
        # A call that only adds a micro-batch to a window is no step: then the next one is looked at.
        records = self._recording.read()
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
        look = RangeLook(self._asked.attempt, self._asked.loss_scale, kinds)
        self.history.add(look)
        self._next = (self._asked.step // self._every_n_steps + 1) * self._every_n_steps
        self._asked = None
        return look

    def scalars(self) -> dict[str, float]:
        """Return what the logs show: the shares of the last look, NaN before the first one."""
        look = self.history.last
        if look is not None:
            return look.scalars()
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
        seen = self._activations.run(self._batch, Precision(None, loss_scale))
        return {
            "activations": {name: each.histogram for name, each in seen.outputs.items()},
            "activation_gradients": {
                name: each.histogram.times(1 / loss_scale) for name, each in seen.output_gradients.items()
            },
        }
