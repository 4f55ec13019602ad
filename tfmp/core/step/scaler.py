"""What an optimizer or a GradScaler knows of its steps: the scale, what to check, what was counted and measured."""

import logging
from collections.abc import Collection, Sequence
from typing import NamedTuple

import tensorflow as tf

from tfmp.core.distribute import Distribution, current_distribution
from tfmp.core.gradients import arithmetic
from tfmp.core.gradients.clipping import keep_unclipped
from tfmp.core.managers import FixedLossScaleManager, LossScaleManager
from tfmp.core.monitors import StepMonitor
from tfmp.core.monitors.graph_records import overflow_counts_of_graph, record_loss, record_step
from tfmp.core.overflow.check import GradientCheck
from tfmp.core.overflow.detectors import NonFiniteDetector, OverflowDetector
from tfmp.core.overflow.found import Found
from tfmp.core.overflow.overflow_counts import OverflowCounts, OverflowReport
from tfmp.core.spikes.detector import SpikeDetector
from tfmp.core.step.norms import StepNorms, WantedNorm
from tfmp.core.step.worker_average import WorkerAverage
from tfmp.core.storage.state_variables import ByVariables
from tfmp.core.tracing import conditional_update, without_autograph
from tfmp.types import Done, Gradient, Gradients

_logger = logging.getLogger("tfmp")


class LossScaler:
    """Scales losses, unscales gradients, and keeps what steps find; `step.py` takes the steps.

    `is_distributed` is True if the user states that several processes train together. `aggregation_dtype` is the dtype
    in which gradients are sent between Horovod's workers; None for their own.

    Examples:
        >>> import tfmp
        >>> manager = tfmp.ExponentialUpdateLossScaleManager(8, 2, decr_every_n_nan_or_inf=1, decr_ratio=0.5)
        >>> scaler = LossScaler(manager, tfmp.NonFiniteDetector(), is_distributed=False)
        >>> float(scaler.scale(tf.constant(3.0)))
        24.0
        >>> scaler.advance(Found(usable=tf.constant(False)))
        >>> float(manager.get_loss_scale())
        4.0
    """

    def __init__(
        self,
        manager: LossScaleManager,
        detector: OverflowDetector,
        is_distributed: bool,
        aggregation_dtype: tf.DType | None = None,
        spike_detector: SpikeDetector | None = None,
    ) -> None:
        self.manager = manager
        self.detector = detector
        self._is_distributed = is_distributed
        #: Averages gradients over Horovod's workers.
        self.worker_average = WorkerAverage(manager, is_distributed, aggregation_dtype)
        #: The numbers of overflowed values in the gradient of each variable.
        self.overflow_counts = ByVariables(OverflowCounts)
        #: Looks at the gradients of each step; None unless somebody wants to.
        self.monitor: StepMonitor | None = None
        #: The norms of the gradients.
        self.norms = StepNorms(manager, spike_detector)
        is_one = isinstance(manager, FixedLossScaleManager) and manager.get_config()["loss_scale"] == 1
        self._tells_of_bfloat16 = not is_one

    def distribution(self) -> Distribution:
        """Return how the replicas of the step that is being built act together."""
        return current_distribution(self._is_distributed)

    def facts(self, distribution: Distribution | None = None) -> "Facts":
        """Return what decides how the step that is being built runs."""
        given = self.distribution() if distribution is None else distribution
        return Facts(self, given, self.manager.get_loss_scale())

    @without_autograph
    def scale(self, loss: tf.Tensor) -> tf.Tensor:
        """Return the loss times the current scale, in float32 or float64."""
        record_loss(self.manager, loss)
        if self._tells_of_bfloat16 and getattr(loss, "dtype", None) == tf.bfloat16:
            self._tells_of_bfloat16 = False
            _logger.warning(
                "the loss is in bfloat16, which has the range of float32: it needs no loss scaling. The training is "
                "right as it is. To do without scaling and checks, use the optimizer inside the LossScaleOptimizer as "
                "it is, or pass enabled=False to tfmp.GradScaler."
            )
        return arithmetic.scale(loss, self.manager.get_loss_scale())

    @without_autograph
    def unscale(self, grads: Gradients, loss_scale: tf.Tensor | None = None) -> list[Gradient]:
        """Return the gradients divided by the loss scale (read now if it is None), in float32 or float64."""
        if loss_scale is None:
            loss_scale = self.manager.get_loss_scale()
        unscaled = arithmetic.unscale(grads, loss_scale)
        if self.norms.wanted is not WantedNorm.NO:
            for grad in unscaled:
                keep_unclipped(grad)
        return unscaled

    def store_overflows(self, names: Sequence[str], counts: tf.Tensor) -> Done:
        """Store the counts of a step for the variables of these names; called once for all replicas."""
        stored = self.overflow_counts.of(names)
        # Only the first replica comes here: if each replica has made a manager of its own, the first one's is used.
        record_step(self.manager, stored)
        return stored.record(counts)

    @without_autograph
    def advance(self, found: Found, is_step: tf.Tensor | None = None) -> Done:
        """Adjust the loss scale and, unless `is_step` is False, count the step; called once for all replicas."""
        answers = [found.finite, *([] if found.max_abs is None else [found.max_abs])]
        return tf.group(self.manager.update_loss_scale(*answers), self.count(found, is_step))

    def count(self, found: Found, is_step: tf.Tensor | None = None) -> Done:
        """Count the step, unless `is_step` is False; called once for all replicas."""

        def count(_: Gradients) -> Done:
            # The manager records by the second flag if micro-batches were dropped, or a spike was skipped.
            are_same = found.complete is None and found.spike is None
            counted = self.manager.note_step(found.applied, *([] if are_same else [found.finite]))
            return tf.group(counted, *self.norms.count(found))

        return count([]) if is_step is None else conditional_update(is_step, [], count)

    def overflow_reports(self) -> list[OverflowReport]:
        """Return one report for each list of variables; in a graph, of the steps built there, with tensors to fetch."""
        with tf.init_scope():
            eager = tf.executing_eagerly()
            here = list(self.overflow_counts) if eager else overflow_counts_of_graph(self.manager)
            return [counts.report() for counts in self.overflow_counts if counts in here]

    def prepare(self, names: Sequence[str]) -> None:
        """Make the variables that a step needs, so that a SavedModel exported before any step contains them."""
        # Not on the replicas of a strategy: each of them would make variables of its own.
        if tf.distribute.in_cross_replica_context() or not tf.distribute.has_strategy():
            self.overflow_counts.of(names).create()


class Facts(NamedTuple):
    """What decides how a step runs, with any optimizer; gathered once for each step."""

    scaler: LossScaler
    distribution: Distribution
    #: The loss scale before the step, a float32 scalar.
    loss_scale: tf.Tensor

    @property
    def needs_max_abs(self) -> bool:
        """True if the manager needs the largest magnitude of the gradients."""
        return self.scaler.manager.needs_max_abs

    @property
    def may_check_scaled(self) -> bool:
        """True if gradients may be checked before they are unscaled; see `GradientCheck.are_scaled`."""
        return self.scaler.detector.ignores_scale and self.scaler.manager.lowest_loss_scale >= 1

    def check(
        self, num_summed: int, overwritten: Collection[int] = (), *, are_scaled: bool = False, of_window: bool = False
    ) -> GradientCheck:
        """Return the check of one replica's gradients; for the arguments see `GradientCheck` and `Checked`."""
        # A replica's part of a mean can be larger than any micro-batch. A detector that compares magnitudes with a
        # limit, as it has done for each micro-batch, could reject it wrongly.
        detector = NonFiniteDetector() if of_window else self.scaler.detector
        return GradientCheck(detector, self.loss_scale, are_scaled, num_summed, overwritten)

    @without_autograph
    def check_early(self, grads: Gradients, *, of_window: bool = False) -> Found:
        """Check this replica's unscaled gradients before the user clips or changes them."""
        check = self.check(self.distribution.num_summed, of_window=of_window)
        return check.find(grads, needs_max_abs=self.needs_max_abs)
