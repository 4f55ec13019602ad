"""The path of a gradient through a step, the same for every host framework."""

from collections.abc import Sequence

import tensorflow as tf

from tfmp.core.control_flow import conditional_update
from tfmp.core.distribute import Distribution, current_distribution
from tfmp.core.gradients import arithmetic
from tfmp.core.gradients.unclipped import keep_unclipped
from tfmp.core.managers import LossScaleManager
from tfmp.core.monitors.bfloat16_notice import Bfloat16Notice
from tfmp.core.monitors.gradient_ranges import GradientRanges
from tfmp.core.monitors.graph_records import (
    RecordedGradients,
    overflow_counts_of_graph,
    record_gradients,
    record_loss,
    record_step,
)
from tfmp.core.overflow.detectors import OverflowDetector
from tfmp.core.overflow.overflow_counts import OverflowCounts, OverflowReport
from tfmp.core.overflow.results import EarlierCheck, LocalResult, StepResult
from tfmp.core.spikes.detector import SpikeDetector
from tfmp.core.step.facts import Facts, WantedNorm
from tfmp.core.step.step_norms import StepNorm, StepNorms
from tfmp.core.step.update import Update
from tfmp.core.step.worker_average import WorkerAverage
from tfmp.core.storage.by_variables import ByVariables
from tfmp.core.tracing import without_autograph
from tfmp.types import Done, Gradient, Gradients


class LossScaler:
    """Scales losses, unscales gradients, and applies the gradients of a step if they are finite on all replicas.

        method       what it does                                               result
        scale        loss * loss_scale                                          float32 or float64
        unscale      grads / loss_scale                                         float32 or float64
        run          check: the update checks what must be finite               LocalResult
                     measure: the norm, if somebody wants to know it            StepNorm
                     agree: one answer for all replicas                         StepResult
                     apply the gradients, or count what overflowed
        advance      the manager adjusts the loss scale; the step is counted

    `step` is `run`, then `advance` and the adapter's `on_step`. A front-end gathers the `facts` once for each step, and
    `choice.py` makes an `Update` of them and of the gradients. The scaler itself stores only the overflow counts, and
    the ranges and norms of gradients if somebody wants to know them; the manager stores the loss scale and the step
    counters.

    `is_distributed` is True if the user states that several processes train together. `aggregation_dtype` is the dtype
    in which gradients are sent between Horovod's workers; None for their own.

    Examples:
        >>> import tfmp
        >>> from tfmp.core.adapters import OptimizerAdapter
        >>> from tfmp.core.step.choice import update_of_unscaled
        >>> manager = tfmp.ExponentialUpdateLossScaleManager(8, 2, decr_every_n_nan_or_inf=1, decr_ratio=0.5)
        >>> scaler = LossScaler(manager, tfmp.NonFiniteDetector(), is_distributed=False)
        >>> float(scaler.scale(tf.constant(3.0)))
        24.0
        >>> w = tf.Variable(1.0)
        >>> adapter = OptimizerAdapter(tf.compat.v1.train.GradientDescentOptimizer(0.5), [w])
        >>> scaler.step(update_of_unscaled(adapter, [tf.constant(float("inf"))], scaler.facts()))
        >>> float(manager.get_loss_scale()), float(w)
        (4.0, 1.0)
    """

    def __init__(
        self,
        manager: LossScaleManager,
        detector: OverflowDetector,
        is_distributed: bool,
        aggregation_dtype: tf.DType | None = None,
        spike_detector: SpikeDetector | None = None,
    ) -> None:
        self._manager = manager
        self._detector = detector
        self._is_distributed = is_distributed
        #: Averages gradients over Horovod's workers.
        self.worker_average = WorkerAverage(manager, is_distributed, aggregation_dtype)
        #: The numbers of overflowed values in the gradient of each variable.
        self.overflow_counts = ByVariables(OverflowCounts)
        #: The powers of two of gradients; None unless somebody wants to see them.
        self.gradient_ranges: GradientRanges | None = None
        #: The norms of the gradients.
        self.norms = StepNorms(manager, spike_detector)
        self._bfloat16_notice = Bfloat16Notice(manager)

    def distribution(self) -> Distribution:
        """Return how the replicas of the step that is being built act together."""
        return current_distribution(self._is_distributed)

    def facts(self, distribution: Distribution | None = None) -> Facts:
        """Return what decides how the step that is being built runs."""
        return Facts(
            self.distribution() if distribution is None else distribution,
            self._manager.get_loss_scale(),
            self._detector,
            self._manager.needs_max_abs,
            self._manager.lowest_loss_scale,
            norm=self.norms.wanted,
        )

    @without_autograph
    def scale(self, loss: tf.Tensor) -> tf.Tensor:
        """Return the loss times the current scale, in float32 or float64."""
        record_loss(self._manager, loss)
        self._bfloat16_notice.look_at(loss)
        return arithmetic.scale(loss, self._manager.get_loss_scale())

    @without_autograph
    def unscale(self, grads: Gradients, loss_scale: tf.Tensor | None = None) -> list[Gradient]:
        """Return the gradients divided by the loss scale (read now if it is None), in float32 or float64."""
        if loss_scale is None:
            loss_scale = self._manager.get_loss_scale()
        unscaled = arithmetic.unscale(grads, loss_scale)
        if self.norms.wanted is not WantedNorm.NO:
            for grad in unscaled:
                keep_unclipped(grad)
        return unscaled

    @without_autograph
    def step(self, update: Update) -> Done:
        """Run a step, then adjust the loss scale according to its result."""
        done, result = self.run(update)

        def advance() -> Done:
            on_step = update.adapter.on_step(result.applied)
            return tf.group(self.advance(result), *([] if on_step is None else [on_step]))

        return tf.group(done, update.distribution.once(advance))

    @without_autograph
    def run(self, update: Update) -> tuple[Done, StepResult]:
        """Apply the gradients if they are finite on every replica; also return the result, which `advance` takes."""
        local_result, held = update.check()
        norm = self.norms.measure(update, local_result.usable)
        result = self._agree(local_result, update.grads, update.adapter.names, update.distribution, norm)
        done = self._apply_or_count(update, held, result, norm)
        stored = [] if norm is None else [self.norms.store(norm, result, update)]
        return tf.group(done, *stored, *self._record_ranges(update)), result

    @without_autograph
    def agree_early(self, earlier: EarlierCheck, distribution: Distribution) -> StepResult:
        """Return the result that a step would have with the gradients that were checked earlier."""
        return self._agree(earlier.result, [], [], distribution)

    def _agree(
        self,
        local_result: LocalResult,
        grads: Gradients,
        names: Sequence[str],
        distribution: Distribution,
        norm: StepNorm | None = None,
    ) -> StepResult:
        """Combine the checks of all replicas into one result."""
        max_abs = local_result.max_abs if self._manager.needs_max_abs else None
        look = None if norm is None else norm.look
        if look is None:
            usable, max_abs = distribution.agree(local_result.usable, max_abs, grads, names)
            return StepResult(usable, max_abs, local_result.complete)
        # All replicas compute the same norm, but perhaps not in every bit. So they agree on what follows from it, too.
        answers = tf.stack([local_result.usable, tf.logical_not(look.is_above), tf.logical_not(look.is_skipped)])
        agreed, max_abs = distribution.agree(answers, max_abs, grads, names)
        usable, is_within, is_not_skipped = tf.unstack(agreed)
        spike = tf.logical_and(usable, tf.logical_not(is_not_skipped))
        return StepResult(usable, max_abs, local_result.complete, tf.logical_not(is_within), spike)

    def _apply_or_count(self, update: Update, held: Gradients, result: StepResult, norm: StepNorm | None) -> Done:
        """Apply the gradients; or, if the step is skipped, store which of them overflowed, or made it a spike."""
        distribution = update.distribution
        stored = self.overflow_counts.of(update.adapter.names)

        def record(counts: tf.Tensor) -> Done:
            return self._record_overflows(stored, counts, distribution)

        def record_dropped(held: Gradients) -> list[Done]:
            counts = update.counts_if_finite(held)
            return [] if counts is None else [record(counts)]

        # A strategy calls the first replica's functions for all replicas, so what differs comes as an argument.
        def apply(held: Gradients) -> Done:
            done = update.apply(held)
            return tf.group(done, *record_dropped(held))

        def count(held: Gradients) -> Done:
            return record(update.counts(held))

        def skip(held: Gradients) -> Done:
            if result.spike is None or norm is None or norm.look is None:
                return count(held)
            look = norm.look

            def describe(held: Gradients) -> Done:
                done = self.norms.describe_spike(update, look, held)
                return tf.group(done, *record_dropped(held))

            return distribution.conditional_update(result.spike, held, describe, count)

        return distribution.conditional_update(result.applied, held, apply, skip)

    def _record_ranges(self, update: Update) -> list[Done]:
        """Let monitors see the powers of two of the gradients; return the ops, none if nobody asked for them."""
        names, grads = update.adapter.names, update.grads
        record_gradients(RecordedGradients(self._manager, names, grads, update.loss_scale))
        if self.gradient_ranges is None:
            return []
        return [self.gradient_ranges._record(names, grads, update.loss_scale, update.distribution)]

    def _record_overflows(self, stored: OverflowCounts, counts: tf.Tensor, distribution: Distribution) -> Done:
        of_all = distribution.maximum(counts, "overflow_counts")

        def store() -> Done:
            # The step is recorded here, where only the first replica's function runs: if each replica has made a
            # manager of its own, the manager of the first replica is the one that is used.
            record_step(self._manager, stored)
            return stored.record(of_all)

        return distribution.once(store)

    @without_autograph
    def advance(self, result: StepResult, is_step: tf.Tensor | None = None) -> Done:
        """Adjust the loss scale and, unless `is_step` is False, count the step; called once for all replicas."""
        answers = [result.finite, *([] if result.max_abs is None else [result.max_abs])]
        return tf.group(self._manager.update_loss_scale(*answers), self.count(result, is_step))

    def count(self, result: StepResult, is_step: tf.Tensor | None = None) -> Done:
        """Count the step, unless `is_step` is False; called once for all replicas."""

        def count(_: Gradients) -> Done:
            # The manager records by the second flag if micro-batches were dropped, or a spike was skipped.
            are_same = result.complete is None and result.spike is None
            counted = self._manager.note_step(result.applied, *([] if are_same else [result.finite]))
            return tf.group(counted, *self.norms.count(result))

        return count([]) if is_step is None else conditional_update(is_step, [], count)

    def overflow_reports(self) -> list[OverflowReport]:
        """Return one report for each list of variables; in a graph, of the steps built there, with tensors to fetch."""
        with tf.init_scope():
            eager = tf.executing_eagerly()
            here = list(self.overflow_counts) if eager else overflow_counts_of_graph(self._manager)
            return [counts.report() for counts in self.overflow_counts if counts in here]

    def prepare(self, names: Sequence[str]) -> None:
        """Make the variables that a step needs, so that a SavedModel exported before any step contains them."""
        # Not on the replicas of a strategy: each of them would make variables of its own.
        if tf.distribute.in_cross_replica_context() or not tf.distribute.has_strategy():
            self.overflow_counts.of(names).create()
