"""Fetches the ranges of weights, gradients and probes together with a step of a TF1 graph."""

from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

from tfmp.core.distribute.horovod import Horovod
from tfmp.core.distribute.horovod_detection import running_horovod
from tfmp.core.gradients import arithmetic
from tfmp.core.managers import LossScaleManager
from tfmp.core.monitors.graph_records import gradients_of_graph, losses_of_graph, managers_of_graph
from tfmp.ranges.exponents import exponent_counts
from tfmp.ranges.history import RangeHistory, RangeRecording, histograms_by_name
from tfmp.ranges.probes import probes_of_graph
from tfmp.types import Gradient


class GraphRanges:
    """The recordings of one hook, of the steps of one manager.

    The gradients are the tensors of the step itself. So a recording is a part of the `session.run` call that takes the
    step, and other calls compute nothing more.
    """

    def __init__(self, every_n_steps: int) -> None:
        self._every_n_steps = every_n_steps
        self.history = RangeHistory()

    def begin(self, manager: LossScaleManager) -> None:
        """Add the ops that count to the current graph, for the steps of a manager."""
        self._next = self._every_n_steps
        # Under Estimator each replica makes a manager of its own, of which the first one alone takes steps.
        others = [each for each in managers_of_graph() if each is not manager]
        recorded = [each for each in gradients_of_graph() if each.manager not in others]
        if not any(each.manager is manager for each in recorded):
            raise ValueError(
                "ranges_every_n_steps is given, and the graph has no gradients that a hook can fetch: it cannot fetch "
                "those of steps inside of a tf.function, a loop or a conditional, such as windows of micro-batches."
            )
        self._manager_scale = manager.get_loss_scale()
        self._fed_scale = tf.compat.v1.placeholder(tf.float32, [], "loss_scale_of_look")
        # The same variable stands in a record of each replica.
        gradients = [
            (name, _unscaled(grad, each.loss_scale))
            for each in recorded
            for name, grad in zip(each.names, each.grads, strict=True)
        ]
        weights = [
            (variable.op.name, tf.convert_to_tensor(variable)) for variable in tf.compat.v1.trainable_variables()
        ]
        kinds = {"gradients": gradients, "weights": weights, **_probe_kinds(others, self._fed_scale)}
        with tf.name_scope("tfmp_ranges"):
            self._names = {kind: [name for name, _ in named] for kind, named in kinds.items()}
            counts = {kind: exponent_counts([tensor for _, tensor in named]) for kind, named in kinds.items() if named}
            self._fetches = _summed_over_workers(counts)

    def is_due(self, step: int) -> bool:
        """Return whether a step, numbered from 1, is one to record. If its call takes no step, the next one is."""
        return step >= self._next

    def fetches(self, session: tf.compat.v1.Session) -> tuple[Mapping[str, tf.Tensor], Mapping[tf.Tensor, float]]:
        """Return what is to be fetched together with a step, and what must be fed for that."""
        # Read here: what reads a reference variable during the step may see the scale before the step or after it.
        self._scale = float(session.run(self._manager_scale))
        return self._fetches, {self._fed_scale: self._scale}

    def record(self, call: int, step: int, fetched: Mapping[str, Any]) -> RangeRecording:
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
        recording = RangeRecording(step, self._scale, histograms)
        self.history._add(recording)
        return recording


def _probe_kinds(others: Sequence[LossScaleManager], loss_scale: tf.Tensor) -> dict[str, list[tuple[str, Gradient]]]:
    probes = probes_of_graph()
    if not probes:
        return {}
    losses = [each.loss for each in losses_of_graph() if each.manager not in others]
    scaled = [arithmetic.scale(loss, loss_scale) for loss in losses]
    grads = tf.gradients(scaled, [probe.tensor for probe in probes]) if scaled else []
    # The graph may hold other models, too, such as one for evaluation.
    reached = [(probe, grad) for probe, grad in zip(probes, grads, strict=False) if grad is not None]
    return {
        "activations": [tuple(probe) for probe, _ in reached],
        "activation_gradients": [(probe.name, grad) for probe, grad in reached],
    }


def _unscaled(grad: Gradient, loss_scale: tf.Tensor | None) -> Gradient:
    return grad if loss_scale is None else arithmetic.unscale([grad], loss_scale)[0]


def _summed_over_workers(counts: Mapping[str, tf.Tensor]) -> dict[str, tf.Tensor]:
    horovod = running_horovod()
    if horovod is None or horovod.size() == 1:
        return dict(counts)
    total = Horovod(horovod).total
    return {kind: total(each, f"ranges_{kind}") for kind, each in counts.items()}
