"""Measures the norms of steps for those who want to know them, and looks for spikes among them."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import tensorflow as tf

from tfmp.core.distribute import Distribution
from tfmp.core.managers import LossScaleManager
from tfmp.core.monitors.gradient_norm import GradientNorm
from tfmp.core.monitors.graph_records import RecordedNorm, norms_of_graph, record_norm
from tfmp.core.overflow.results import StepResult
from tfmp.core.spikes.detector import SpikeDetector
from tfmp.core.spikes.reports import SpikeRecord, SpikeReport
from tfmp.core.spikes.watch import Look, SpikeWatch
from tfmp.core.step.facts import WantedNorm
from tfmp.core.step.measured import Measured
from tfmp.core.step.update import Update
from tfmp.core.storage.by_variables import ByVariables
from tfmp.core.storage.graph_variables import in_graph_itself
from tfmp.core.storage.state_variables import NotCheckpointed
from tfmp.types import Done, Gradients


class StepNorm(NamedTuple):
    """The norm of the gradients of a step."""

    #: The norm, the same on all replicas; float64.
    norm: tf.Tensor
    #: How it compares with the bound of the spike detector; None if there is no detector.
    look: Look | None


class StepNorms(NotCheckpointed):
    """The norms of the steps of one optimizer or scaler, which tracks this module, so that steps can be exported.

        method       what it does                                               result
        measure      computes the norm of a step, if somebody wants to know     StepNorm or None
        store        stores it, and lets the spike detector learn from it
        read         returns the norm of the last step

    Examples:
        >>> import tfmp
        >>> norms = StepNorms(tfmp.FixedLossScaleManager(8))
        >>> norms.wanted.name
        'NO'
        >>> norms.record()
        >>> norms.wanted.name, float(norms.read())
        ('YES', nan)
    """

    def __init__(self, manager: LossScaleManager, spike_detector: SpikeDetector | None = None) -> None:
        super().__init__()
        self._manager = manager
        #: Looks for steps that are skipped because their norm is an outlier; None if nobody does.
        self.spikes = None if spike_detector is None else SpikeWatch(spike_detector)
        #: What is known of the last spikes.
        self.spike_records = ByVariables(SpikeRecord)
        #: The norm of the last step; None unless it is recorded.
        self.last: GradientNorm | None = None
        if self.spikes is not None:
            self.record()

    def record(self) -> None:
        """Let the steps that are built from now on store their norms."""
        if self.last is None:
            self.last = GradientNorm()

    @property
    def wanted(self) -> WantedNorm:
        """Whether somebody wants to know the norm of the step that is being built."""
        if self.last is not None:
            return WantedNorm.YES
        return WantedNorm.WITHOUT_EXCHANGE if in_graph_itself() else WantedNorm.NO

    def measure(self, update: Update, is_usable: tf.Tensor) -> StepNorm | None:
        """Return the norm of a step, which need not be right if it is not usable; None if nobody wants to know it."""
        if update.measured is None:
            return None
        norm = update.measured.norm(update.adapter.names, update.distribution, is_usable)
        look = None if self.spikes is None else self.spikes.look(update.adapter.optimizers, norm)
        return StepNorm(norm, look)

    def store(self, step_norm: StepNorm, result: StepResult, update: Update) -> Done:
        """Store the norm of a step, infinite or NaN if a gradient overflowed; called on each replica."""
        norm, look = step_norm
        # An overflow need not show in the norm: an accumulator leaves out the micro-batches that overflowed.
        is_right = tf.logical_or(result.usable, tf.logical_not(tf.math.is_finite(norm)))
        shown = tf.where(is_right, norm, tf.constant(np.inf, norm.dtype))

        def keep() -> Done:
            return tf.group(*self._keep(shown, result.usable), *([] if look is None else [look.store(result)]))

        return update.distribution.once(keep)

    def _keep(self, norm: tf.Tensor, of_step: tf.Tensor) -> list[Done]:
        """Store a norm, and let it be fetched from a graph with the step that computes `of_step`."""
        if not tf.executing_eagerly():
            record_norm(RecordedNorm(self._manager, self, norm, of_step.op))
        return [] if self.last is None else [self.last.store(norm)]

    def describe_spike(self, update: Update, look: Look, held: Gradients) -> Done:
        """Store which gradients made a step a spike; called on each replica, if it was skipped as one."""
        norms = update.distribution.maximum(update.norm_of_each(held), "norms_in_spike")
        squares = tf.square(tf.math.divide_no_nan(norms, tf.reduce_max(norms)))
        record = self.spike_records.of(update.adapter.names)
        return update.distribution.once(lambda: record.store(squares / tf.reduce_sum(squares), look.norm, look.bound))

    def count(self, result: StepResult) -> list[Done]:
        """Count a step if it was skipped as a spike, and no gradient of it overflowed; called once for all replicas."""
        if self.spikes is None or result.spike is None:
            return []
        return [self.spikes.detector.count(tf.logical_and(result.usable, result.spike))]

    def store_unchecked(self, grads: Gradients, distribution: Callable[[], Distribution]) -> Done:
        """Store the norm of gradients in true magnitude that are applied without a check, if somebody wants it."""
        wanted = self.wanted
        if wanted is WantedNorm.NO:
            return None
        is_summed = distribution().num_summed == 1
        if wanted is WantedNorm.WITHOUT_EXCHANGE and not is_summed:
            return None
        norm = Measured(grads, None, is_summed).norm([], distribution())
        return distribution().once(lambda: tf.group(*self._keep(norm, norm)))

    def read(self) -> tf.Tensor:
        """Return the norm of the last step; in a graph, a tensor to fetch together with the step."""
        here = [recorded.norm for recorded in norms_of_graph() if recorded.norms is self and recorded.norm is not None]
        if here and not tf.compat.v1.get_default_graph().building_function:
            return here[-1]
        if self.last is None:
            # An AttributeError, so that `hasattr` and whatever looks at all attributes can handle it.
            raise AttributeError(
                "the norm of the gradients is not recorded: call record_gradient_norm() before the first step is "
                "built, or pass skip_spikes."
            )
        return self.last.read()

    def spike_reports(self) -> list[SpikeReport]:
        """Return one report for each list of variables with which a step can be skipped as a spike."""
        return [record.report() for record in self.spike_records]
