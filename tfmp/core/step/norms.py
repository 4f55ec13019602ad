"""Measures the norms of steps for those who want to know them, and looks for spikes among them."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import tensorflow as tf

from tfmp.core.distribute import Distribution
from tfmp.core.gradients import arithmetic
from tfmp.core.gradients.measures import global_norm
from tfmp.core.managers import LossScaleManager
from tfmp.core.monitors import RecordedNorm, can_be_fetched, records_of_graph
from tfmp.core.overflow.found import Found
from tfmp.core.spikes.detector import SpikeDetector
from tfmp.core.spikes.watch import Look, SpikeRecord, SpikeReport, SpikeWatch
from tfmp.core.storage.state_variables import ByVariables, NotCheckpointed, StateVariables
from tfmp.types import Done, Gradients


class Measured(NamedTuple):
    """The gradients whose norm, once they are summed over all replicas and unscaled, is that of a step."""

    grads: Gradients
    #: The number by which the gradients are still multiplied; None if they are in true magnitude.
    loss_scale: tf.Tensor | None
    #: True if they are the same on all replicas: summed over them, or averaged over Horovod's workers.
    is_summed: bool

    def norm(self, names: Sequence[str], distribution: Distribution, is_needed: tf.Tensor | None = None) -> tf.Tensor:
        """Return the norm, a float64 scalar, the same on all replicas.

        Errors show the `names` of the variables, if there is one for each gradient. `is_needed` is False if nobody will
        use the norm, which need not be right then.
        """
        grads = self.grads
        scaled_by = self.loss_scale
        if any(isinstance(grad, tf.IndexedSlices) for grad in grads) or not self.is_summed:
            grads = [arithmetic.map_values(arithmetic.widen, grad) for grad in grads]
        if not self.is_summed:
            if scaled_by is not None:
                # A sum of scaled gradients could overflow.
                grads, scaled_by = arithmetic.unscale(grads, scaled_by), None
            is_named = len(names) == len(grads)
            grads = distribution.sums(grads, names if is_named else [f"gradient {i}" for i in range(len(grads))])
        norm = global_norm(list(map(arithmetic.added_up, grads)), is_needed=is_needed)
        return norm if scaled_by is None else norm / tf.cast(scaled_by, tf.float64)


class _LastNorm(NamedTuple):
    gradient_norm: tf.Tensor


class StepNorms(NotCheckpointed):
    """The norms of the steps of one optimizer or scaler, which tracks this module, so that steps can be exported."""

    def __init__(self, manager: LossScaleManager, spike_detector: SpikeDetector | None = None) -> None:
        super().__init__()
        self._manager = manager
        #: Looks for steps that are skipped because their norm is an outlier; None if nobody does.
        self.spikes = None if spike_detector is None else SpikeWatch(spike_detector)
        #: What is known of the last spikes.
        self.spike_records = ByVariables(SpikeRecord)
        # The norm of the last step, NaN before the first one; None unless it is recorded.
        self._last: StateVariables[_LastNorm] | None = None
        if self.spikes is not None:
            self.record()

    def record(self) -> None:
        """Let the steps that are built from now on store their norms."""
        if self._last is None:
            self._last = StateVariables(_LastNorm(np.float64(np.nan)), saved=False)

    @property
    def is_recorded(self) -> bool:
        """True if the steps that are built now store their norms."""
        return self._last is not None

    @property
    def are_wanted(self) -> bool:
        """True if somebody may want to know the norm of the step that is being built.

        If it is not recorded, somebody may fetch it from the graph, but not on all workers. So no worker may have to
        wait for others to compute it.
        """
        in_graph_itself = not (tf.executing_eagerly() or tf.compat.v1.get_default_graph().building_function)
        return self._last is not None or in_graph_itself

    def store(self, norm: tf.Tensor, look: Look | None, found: Found) -> Done:
        """Store the float64 norm of a step, infinite or NaN if a gradient overflowed; called once for all replicas."""
        # An overflow need not show in the norm: an accumulator leaves out the micro-batches that overflowed.
        is_right = tf.logical_or(found.usable, tf.logical_not(tf.math.is_finite(norm)))
        shown = tf.where(is_right, norm, tf.constant(np.inf, norm.dtype))
        return tf.group(*self._keep(shown, found.usable), *([] if look is None else [look.store(found)]))

    def _keep(self, norm: tf.Tensor, of_step: tf.Tensor) -> list[Done]:
        """Store a norm, and let it be fetched from a graph with the step that computes `of_step`."""
        if not tf.executing_eagerly():
            fetched = norm if can_be_fetched(norm) else None
            records_of_graph().norms.append(RecordedNorm(self._manager, self, fetched, of_step.op))
        return [] if self._last is None else [self._last.assign(_LastNorm(norm))]

    def describe_spike(self, look: Look, norm_of_each: tf.Tensor, names: Sequence[str]) -> Done:
        """Store which gradients made a step a spike; called once for all replicas, if it was skipped as one."""
        squares = tf.square(tf.math.divide_no_nan(norm_of_each, tf.reduce_max(norm_of_each)))
        return self.spike_records.of(names).store(squares / tf.reduce_sum(squares), look.norm, look.bound)

    def store_unchecked(self, grads: Gradients, distribution: Callable[[], Distribution]) -> Done:
        """Store the norm of gradients in true magnitude that are applied without a check, if somebody wants it."""
        if not self.are_wanted:
            return None
        is_summed = distribution().num_summed == 1
        if not (is_summed or self.is_recorded):
            return None
        norm = Measured(grads, None, is_summed).norm([], distribution())
        return distribution().once(lambda: tf.group(*self._keep(norm, norm)))

    def read(self) -> tf.Tensor:
        """Return the norm of the last step; in a graph, a tensor to fetch together with the step."""
        here = [each.norm for each in records_of_graph().norms if each.norms is self and each.norm is not None]
        if here and not tf.compat.v1.get_default_graph().building_function:
            return here[-1]
        return self.read_stored()

    def read_stored(self) -> tf.Tensor:
        """Return the norm that the last step stored."""
        if self._last is None:
            # An AttributeError, so that `hasattr` and whatever looks at all attributes can handle it.
            raise AttributeError(
                "the norm of the gradients is not recorded: call record_gradient_norm() before the first step is "
                "built, or pass skip_spikes."
            )
        return self._last.get("gradient_norm")

    def spike_reports(self) -> list[SpikeReport]:
        """Return one report for each list of variables with which a step can be skipped as a spike."""
        return [record.report() for record in self.spike_records]
