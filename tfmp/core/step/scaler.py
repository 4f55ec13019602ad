"""What an optimizer or a GradScaler knows of its steps: the scale, what to check, what was counted and measured."""

import logging
from collections.abc import Collection, Sequence
from typing import NamedTuple

import tensorflow as tf

from tfmp.core.distribute import Distribution, current_distribution
from tfmp.core.distribute.horovod_detection import running_horovod
from tfmp.core.gradients import arithmetic
from tfmp.core.gradients.clipping import keep_unclipped
from tfmp.core.managers import FixedLossScaleManager, LossScaleManager
from tfmp.core.monitors import StepMonitor, record_loss, records_of_graph
from tfmp.core.overflow.detectors import NonFiniteDetector, OverflowDetector
from tfmp.core.overflow.found import Found, GradientCheck, OverflowCounts, OverflowReport
from tfmp.core.spikes.detector import SpikeDetector
from tfmp.core.step.norms import StepNorms
from tfmp.core.storage.state_variables import ByVariables
from tfmp.core.tracing import conditional_update, without_autograph
from tfmp.types import Done, Gradient, Gradients

_logger = logging.getLogger("tfmp")


class LossScaler:
    """Scales losses, unscales and averages gradients, and keeps what steps find; `step.py` takes the steps.

    `is_distributed` is True if the user states that several processes train together. `aggregation_dtype` is the dtype
    in which gradients are sent between Horovod's workers; None for their own.
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
        self._aggregation_dtype = aggregation_dtype
        #: The numbers of overflowed values in the gradient of each variable.
        self.overflow_counts = ByVariables(OverflowCounts)
        #: Looks at the gradients of each step; None unless somebody wants to.
        self.monitor: StepMonitor | None = None
        #: The norms of the gradients.
        self.norms = StepNorms(manager, spike_detector)
        is_one = isinstance(manager, FixedLossScaleManager) and manager.get_config()["loss_scale"] == 1
        self._tells_of_bfloat16 = not is_one
        self._tells_of_horovod = not is_distributed

    def distribution(self) -> Distribution:
        """Return how the replicas of the step that is being built act together."""
        return current_distribution(self._is_distributed)

    def facts(self) -> "Facts":
        """Return what decides how the step that is being built runs."""
        return Facts(self, self.distribution(), self.manager.get_loss_scale())

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
        loss = tf.convert_to_tensor(loss)
        if not loss.dtype.is_floating:
            raise TypeError(f"the loss must be of a floating-point type, got {loss.dtype.name}.")
        return arithmetic.scale(loss, self.manager.get_loss_scale())

    @without_autograph
    def unscale(self, grads: Gradients, loss_scale: tf.Tensor | None = None) -> list[Gradient]:
        """Return the gradients divided by the loss scale (read now if it is None), in float32 or float64."""
        if loss_scale is None:
            loss_scale = self.manager.get_loss_scale()
        unscaled = arithmetic.unscale(grads, loss_scale)
        if self.norms.are_wanted:
            for grad in unscaled:
                keep_unclipped(grad)
        return unscaled

    @without_autograph
    def mean_over_workers(
        self, grads: Gradients, names: Sequence[str], distribution: Distribution, *, are_scaled: bool = True
    ) -> list[Gradient]:
        """Return the mean of the gradients over Horovod's workers; without such workers, the gradients themselves.

        In a dtype of its own they are sent scaled, because small unscaled values would become 0 in half precision;
        `are_scaled` is True if they are those of a scaled loss. Errors show the `names` of the variables.
        """
        self.warn_if_not_averaged()
        if are_scaled or self._aggregation_dtype is None:
            return distribution.mean(grads, names, self._aggregation_dtype)
        loss_scale = self.manager.get_loss_scale()
        scaled = [arithmetic.map_values(lambda values: arithmetic.scale(values, loss_scale), grad) for grad in grads]
        means = arithmetic.unscale(distribution.mean(scaled, names, self._aggregation_dtype), loss_scale)
        return [
            mean if grad is None else arithmetic.cast(mean, grad.dtype) for mean, grad in zip(means, grads, strict=True)
        ]

    def warn_if_not_averaged(self) -> None:
        """Warn, once, if Horovod runs several processes and the user did not state that they train together."""
        horovod = running_horovod() if self._tells_of_horovod else None
        if horovod is None or horovod.size() == 1:
            return
        # Eager code calls this at every step.
        self._tells_of_horovod = False
        _logger.warning(
            "Horovod runs %d processes, and nothing averages the gradients over them: pass is_distributed=True to "
            "tfmp.LossScaleOptimizer, or wrap the optimizer in hvd.DistributedOptimizer.",
            horovod.size(),
        )

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
            counted = [self.manager.note_step(found.applied, *([] if are_same else [found.finite]))]
            if self.norms.spikes is not None and found.spike is not None:
                # A step with an overflow is none that was skipped as a spike.
                counted.append(self.norms.spikes.detector.count(tf.logical_and(found.usable, found.spike)))
            return tf.group(*counted)

        return count([]) if is_step is None else conditional_update(is_step, [], count)

    def overflow_reports(self) -> list[OverflowReport]:
        """Return one report for each list of variables; in a graph, of the steps built there, with tensors to fetch."""
        with tf.init_scope():
            eager = tf.executing_eagerly()
            here = list(self.overflow_counts) if eager else records_of_graph().overflow_counts(self.manager)
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

    def check(
        self,
        *,
        are_summed: bool = False,
        overwritten: Collection[int] = (),
        are_scaled: bool = False,
        of_window: bool = False,
    ) -> GradientCheck:
        """Return the check of one replica's gradients, which may have been summed over all; see `GradientCheck`."""
        # See `Checked.of_window`.
        detector = NonFiniteDetector() if of_window else self.scaler.detector
        num_summed = 1 if are_summed or detector.ignores_sums else self.distribution.num_summed
        needs_max_abs = self.scaler.manager.needs_max_abs
        return GradientCheck(detector, self.loss_scale, are_scaled, num_summed, overwritten, needs_max_abs)
