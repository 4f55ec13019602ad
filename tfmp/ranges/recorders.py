"""Records the ranges of weights, gradients and activations every few steps, in the `fit` of a Keras and in sessions."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from tfmp.any_keras.which import keras_of
from tfmp.core import settings
from tfmp.core.adapter import names_of
from tfmp.core.distribute.horovod_detection import running_horovod
from tfmp.core.gradients import arithmetic
from tfmp.core.managers import LossScaleManager
from tfmp.core.monitors import records_of_graph
from tfmp.ranges.check.model_runs import Precision
from tfmp.ranges.exponents import exponent_counts
from tfmp.ranges.gradient_ranges import GradientRanges, StepsWithRanges
from tfmp.ranges.histogram import RangeHistogram
from tfmp.ranges.history import RangeRecording, histograms_by_name
from tfmp.ranges.probes import probes_of_graph
from tfmp.types import Gradient

if TYPE_CHECKING:
    from tfmp.ranges.check.keras_models import KerasModel


def trace_again(model: Any) -> None:  # noqa: ANN401 - a model of any Keras
    """Let `fit` trace the training step again, if it was traced before: without the ops that somebody asks for now."""
    if getattr(model, "train_function", None) is not None:
        model.make_train_function(force=True)


class FitRanges:
    """Records the steps of `fit`.

    The gradients of a step are counted within that step. Activations cannot be seen from outside of it, so they are
    recorded in a run of their own, of a batch that the user gives, if any.
    """

    def __init__(self, every_n_steps: int, batch: Any) -> None:  # noqa: ANN401 - whatever the model takes
        self._every_n_steps = settings.count("ranges_every_n_steps", every_n_steps)
        self._batch = batch
        self._gradient_ranges: GradientRanges | None = None

    def begin(self, model: Any, opt: StepsWithRanges) -> None:  # noqa: ANN401 - a model of any Keras
        """Prepare a model for the `fit` that begins."""
        self._model, self._opt = model, opt
        gradient_ranges = opt.record_gradient_ranges()
        if gradient_ranges is not self._gradient_ranges:
            trace_again(model)
        self._gradient_ranges = gradient_ranges
        self._steps, self._next = 0, self._every_n_steps
        #: The step that was asked for, without its histograms; None if none was since the last recording.
        self._asked: RangeRecording | None = None
        # A model that is not built yet is built by its first step.
        self._activations = self._checked_model() if model.built else None

    def before_step(self) -> None:
        """Request the gradients of the coming step, if it is one to record."""
        if self._gradient_ranges is not None and self._asked is None and self._steps + 1 >= self._next:
            loss_scale = float(self._opt.manager.get_loss_scale())
            self._asked = RangeRecording(int(self._opt.attempted_steps) + 1, loss_scale, {})
            self._next = ((self._steps + 1) // self._every_n_steps + 1) * self._every_n_steps
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
        gradients = [counts for record in records for counts in record.counts]
        variables = self._model.trainable_variables
        weights = exponent_counts([tf.convert_to_tensor(each) for each in variables]).numpy()
        recording, self._asked = self._asked, None
        return recording._replace(
            histograms={
                "gradients": histograms_by_name(names, gradients),
                "weights": histograms_by_name(names_of(variables), weights),
                **self._activation_kinds(recording.loss_scale),
            }
        )

    def _checked_model(self) -> "KerasModel | None":
        keras = None if self._batch is None else keras_of(self._model, "layers.Layer")
        if keras is None:
            return None
        # Not at the top of the file: few programs use it, and it takes half of the time to import the callback.
        from tfmp.ranges.check.keras_models import KerasModel

        return KerasModel(keras, self._model, None)

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


class GraphRanges:
    """Records the steps of one manager in a session of a TF1 graph.

    The gradients are the tensors of the step itself. So a recording is a part of the `session.run` call that takes the
    step, and other calls compute nothing more.
    """

    def __init__(self, every_n_steps: int) -> None:
        self._every_n_steps = settings.count("ranges_every_n_steps", every_n_steps)

    def begin(self, manager: LossScaleManager) -> None:
        """Add the ops that count to the current graph, for the steps of a manager."""
        self._next = self._every_n_steps
        # Under Estimator each replica makes a manager of its own, of which the first one alone takes steps.
        records = records_of_graph()
        others = [each for each in records.managers if each is not manager]
        recorded = [each for each in records.gradients if each.manager not in others]
        if not any(each.manager is manager for each in recorded):
            raise ValueError(
                "ranges_every_n_steps is given, and the graph has no gradients that a hook can fetch: it cannot fetch "
                "those of steps inside of a tf.function, a loop or a conditional, such as windows of micro-batches."
            )
        self._manager_scale = manager.get_loss_scale()
        self._fed_scale = tf.compat.v1.placeholder(tf.float32, [], "loss_scale_of_look")
        # The same variable stands in a record of each replica.
        gradients = [
            (name, grad if each.loss_scale is None else arithmetic.unscale([grad], each.loss_scale)[0])
            for each in recorded
            for name, grad in zip(each.names, each.grads, strict=True)
        ]
        weights = [
            (variable.op.name, tf.convert_to_tensor(variable)) for variable in tf.compat.v1.trainable_variables()
        ]
        horovod = running_horovod()
        several = horovod is not None and horovod.size() > 1
        kinds = {"gradients": gradients, "weights": weights, **_probe_kinds(others, self._fed_scale)}
        with tf.name_scope("tfmp_ranges"):
            self._names = {kind: [name for name, _ in named] for kind, named in kinds.items()}
            self._fetches = {
                kind: exponent_counts([tensor for _, tensor in named], is_distributed=several, name=f"ranges_{kind}")
                for kind, named in kinds.items()
                if named
            }

    def is_due(self, step: int) -> bool:
        """Return whether a step, numbered from 1, is one to record. If its call takes no step, the next one is."""
        return step >= self._next

    def fetches(self, session: tf.compat.v1.Session) -> tuple[Mapping[str, tf.Tensor], Mapping[tf.Tensor, float]]:
        """Return what is to be fetched together with a step, and what must be fed for that."""
        # Read here: what reads a reference variable during the step may see the scale before the step or after it.
        self._scale = float(session.run(self._manager_scale))
        return self._fetches, {self._fed_scale: self._scale}

    def recording(self, call: int, step: int, fetched: Mapping[str, Any]) -> RangeRecording:
        """Return the recording of a step, from the values of what `fetches` returned.

        `call` is the number of the `session.run` call that took the step, and `step` is its number among the attempted
        ones, both from 1.
        """
        self._next = (call // self._every_n_steps + 1) * self._every_n_steps
        histograms = {
            kind: histograms_by_name(names, fetched[kind]) for kind, names in self._names.items() if kind in fetched
        }
        if "activation_gradients" in histograms:
            scaled = histograms["activation_gradients"]
            histograms["activation_gradients"] = {name: each.times(1 / self._scale) for name, each in scaled.items()}
        return RangeRecording(step, self._scale, histograms)


def _probe_kinds(others: Sequence[LossScaleManager], loss_scale: tf.Tensor) -> dict[str, list[tuple[str, Gradient]]]:
    probes = probes_of_graph()
    losses = [each.loss for each in records_of_graph().losses if each.manager not in others]
    if not (probes and losses):
        return {}
    grads = tf.gradients([arithmetic.scale(loss, loss_scale) for loss in losses], [probe.tensor for probe in probes])
    # The graph may hold other models, too, such as one for evaluation.
    reached = [(probe, grad) for probe, grad in zip(probes, grads, strict=True) if grad is not None]
    return {
        "activations": [tuple(probe) for probe, _ in reached],
        "activation_gradients": [(probe.name, grad) for probe, grad in reached],
    }
