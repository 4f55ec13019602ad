"""The one path that a gradient takes, whatever the host."""

import logging
from collections.abc import Callable, Collection, Sequence

import tensorflow as tf

from tfmp.core import numerics
from tfmp.core.accumulation import GradientAccumulator
from tfmp.core.autograph import without_autograph
from tfmp.core.distribute import current_distribution
from tfmp.core.horovods import running_horovod
from tfmp.core.inspection import Inspection
from tfmp.core.managers import LossScaleManager
from tfmp.core.noted_losses import note_loss
from tfmp.core.overflow import NonFiniteDetector, OverflowDetector
from tfmp.core.overflow_counts import AllOverflowCounts, OverflowReport
from tfmp.core.steps_of_graph import counts_of_graph, note_in_graph
from tfmp.core.verdicts import Seen, Verdict
from tfmp.types import ApplyGradients, Gradient, Gradients

_logger = logging.getLogger("tfmp")


class LossScaler:
    """Scales losses, unscales gradients, and applies those that are finite everywhere.

        scale      loss * scale                          float32
        share      the mean over the workers, where no optimizer sees to it
        unscale    grads / scale                         float32, true magnitude
        step       grads = reduce_fn(grads)
                   finite = all replicas agree that the detector saw no overflow
                   apply_fn(grads) if finite, else count by variable what overflowed
                   manager.update_loss_scale(finite)

    The state is the manager's, and the distribution is looked up at each step.

    Args:
        manager: Decides the scale.
        detector: Tells which gradients overflowed.
        is_distributed: Whether the user says that more than one device takes part.
        aggregation_dtype: The type that gradients travel in between workers; by default their own.

    Example:
        >>> import tfmp
        >>> manager = tfmp.ExponentialUpdateLossScaleManager(8, 2, decr_every_n_nan_or_inf=1, decr_ratio=0.5)
        >>> scaler = LossScaler(manager, tfmp.NonFiniteDetector(), is_distributed=False)
        >>> float(scaler.scale(tf.constant(3.0)))
        24.0
        >>> scaler.step([tf.constant(float("inf"))], ["kernel"], print)
        >>> float(manager.get_loss_scale())
        4.0
    """

    def __init__(
        self,
        manager: LossScaleManager,
        detector: OverflowDetector,
        is_distributed: bool,
        aggregation_dtype: tf.DType | None = None,
    ) -> None:
        self._manager = manager
        self._detector = detector
        self._is_distributed = is_distributed
        self._aggregation_dtype = aggregation_dtype
        self._told_of_horovod = False
        #: Which variables' gradients overflowed.
        self.overflow_counts = AllOverflowCounts()

    @without_autograph
    def scale(self, loss: tf.Tensor) -> tf.Tensor:
        """Return the loss times the current scale, in float32 or float64.

        Args:
            loss: The loss, of a floating-point type.
        """
        note_loss(self._manager, loss)
        return numerics.scale(loss, self._manager.get_loss_scale())

    @without_autograph
    def share(self, grads: Gradients, names: Sequence[str], *, scaled: bool = True) -> list[Gradient]:
        """Return the mean of the gradients over the workers, if the user says that there are some.

        For an optimizer that does not share gradients itself. In half precision they travel scaled: small ones would
        be lost otherwise.

        Args:
            grads: This worker's gradients.
            names: The names of their variables.
            scaled: Whether they are those of a scaled loss.
        """
        distribution = current_distribution(self._is_distributed)
        self.warn_if_nothing_averages()
        if scaled or self._aggregation_dtype is None:
            return distribution.mean(grads, names, self._aggregation_dtype)
        loss_scale = self._manager.get_loss_scale()
        scale_up = [numerics.map_values(lambda values: numerics.scale(values, loss_scale), grad) for grad in grads]
        means = self.unscale(distribution.mean(scale_up, names, self._aggregation_dtype))
        return [
            mean if grad is None else numerics.cast(mean, grad.dtype) for mean, grad in zip(means, grads, strict=True)
        ]

    def warn_if_nothing_averages(self) -> None:
        """Warn, once, if Horovod runs several processes and the user does not say that they train together."""
        horovod = running_horovod()
        if self._is_distributed or self._told_of_horovod or horovod is None or horovod.size() == 1:
            return
        # Once: eager code comes here at every step.
        self._told_of_horovod = True
        _logger.warning(
            "Horovod runs %d processes, and nothing averages the gradients over them: pass is_distributed=True to "
            "tfmp.LossScaleOptimizer, or wrap the optimizer in hvd.DistributedOptimizer.",
            horovod.size(),
        )

    @without_autograph
    def unscale(self, grads: Gradients) -> list[Gradient]:
        """Return the gradients in true magnitude, in float32 or float64.

        Args:
            grads: Gradients of a loss scaled by `scale`.
        """
        return numerics.unscale(grads, self._manager.get_loss_scale())

    @without_autograph
    def step(
        self,
        grads: Gradients,
        names: Sequence[str],
        apply_fn: ApplyGradients,
        reduce_fn: Callable[[Gradients], Gradients] | None = None,
        note_fn: Callable[[tf.Tensor], tf.Operation] | None = None,
        *,
        scaled: bool = False,
        next_values: Collection[int] = (),
        accumulator: GradientAccumulator | None = None,
    ) -> tf.Operation:
        """Apply the gradients if they are finite on every replica, and move the scale.

        Args:
            grads: This replica's unscaled gradients.
            names: The names of their variables.
            apply_fn: Applies one replica's gradients; called on all replicas or on none.
            reduce_fn: Sums the gradients over the replicas, for a host that does so before it applies them.
            note_fn: Told of every step, once for all replicas, whether it was applied; for a host that keeps books.
            scaled: Whether the gradients are those of a scaled loss, which `apply_fn` then unscales.
            next_values: Indices of those that are no gradients but the next values of their variables, never scaled.
            accumulator: Takes the gradients, those of a micro-batch; a step is taken when its window ends.

        Returns:
            The op of the whole step; None in eager mode.
        """
        distribution = current_distribution(self._is_distributed)

        def take_step(grads: Gradients, *, scaled: bool, seen: Seen | None = None) -> tf.Operation:
            applied, verdict = self.attempt(
                grads, names, apply_fn, reduce_fn, scaled=scaled, next_values=next_values, seen=seen
            )

            def update() -> tf.Operation:
                noted = [] if note_fn is None else [note_fn(verdict.applied)]
                return tf.group(self.update(verdict), *noted)

            return tf.group(applied, distribution.once(update))

        def end_window(_: Gradients) -> tf.Operation:
            assert accumulator is not None
            grads, seen = self.take(accumulator)
            return take_step(grads, scaled=False, seen=seen)

        if accumulator is None:
            return take_step(grads, scaled=scaled)
        true_grads = self.unscale(grads) if scaled else grads
        loss_scale, needs_max_abs = self._manager.get_loss_scale(), self._manager.needs_max_abs
        with tf.control_dependencies([accumulator.add_unscaled(true_grads, loss_scale, keeps_largest=needs_max_abs)]):
            is_full = accumulator.is_full
        return distribution.call_either(is_full, [], end_window, lambda _: tf.no_op())

    @without_autograph
    def take(self, accumulator: GradientAccumulator) -> tuple[list[Gradient], Seen]:
        """Return the gradients of a window, this replica's part, and what is known of them; empty the accumulator.

        Args:
            accumulator: The accumulator.
        """
        distribution = current_distribution(self._is_distributed)
        return accumulator.take(lambda values: distribution.total(values, "micro_batches"))

    @without_autograph
    def look_at(self, grads: Gradients, *, judged: bool = False) -> Seen:
        """Return what is found of unscaled gradients, for a step that may be attempted with others made of them.

        Args:
            grads: This replica's gradients.
            judged: As in `Seen`.
        """
        addends = current_distribution(self._is_distributed).addends
        inspection = Inspection(self._detector_of(judged), self._manager.get_loss_scale(), addends=addends)
        return Seen(usable=inspection.all_finite(grads))

    @without_autograph
    def attempt(
        self,
        grads: Gradients,
        names: Sequence[str],
        apply_fn: ApplyGradients,
        reduce_fn: Callable[[Gradients], Gradients] | None = None,
        *,
        scaled: bool = False,
        next_values: Collection[int] = (),
        seen: Seen | None = None,
    ) -> tuple[tf.Operation, Verdict]:
        """Apply the gradients if they are finite on every replica; the scale stays.

        Args:
            grads: This replica's gradients.
            names: As in `step`.
            apply_fn: As there.
            reduce_fn: As there.
            scaled: As there.
            next_values: As there.
            seen: What was found of them before.

        Returns:
            The op that does it, None in eager mode; and what was found, the same on each replica, for `update`.
        """
        distribution = current_distribution(self._is_distributed)
        counts = self.overflow_counts.of(names)
        addends = distribution.addends
        if reduce_fn is not None:
            grads, addends = reduce_fn(grads), 1
        detector = self._detector_of(seen is not None and seen.judged)
        # Whether it is finite, scaling does not change, unless by less than 1.
        stays_scaled = scaled and detector.ignores_scale and self._manager.lowest_loss_scale >= 1
        inspection = Inspection(
            detector,
            self._manager.get_loss_scale(),
            unscales=scaled and not stays_scaled,
            stays_scaled=stays_scaled,
            addends=addends,
            next_values=next_values,
        )
        usable = inspection.all_finite(grads)
        if seen is not None:
            usable = tf.logical_and(usable, seen.usable)
        applied = distribution.all_true(usable, grads, names)
        finite = applied
        if seen is not None and seen.complete is not None:
            finite = tf.logical_and(applied, seen.complete)
        max_abs = None
        if self._manager.needs_max_abs:
            largest = None if seen is None else seen.largest
            largest = inspection.max_abs(grads) if largest is None else largest
            max_abs = distribution.maximum(largest, "largest_gradient")

        def record(found: tf.Tensor) -> tf.Operation:
            of_all = distribution.maximum(found, "overflow_counts")

            def store() -> tf.Operation:
                # Once: replicas may have a manager each, of which one is used.
                note_in_graph(self._manager, counts)
                return counts.record(of_all)

            return distribution.once(store)

        # Counts that are known go with the gradients: both differ between replicas.
        known = [] if seen is None or seen.overflows is None else [seen.overflows]

        def apply(held: Gradients) -> tf.Operation:
            return tf.group(apply_fn(held[: len(names)]), *map(record, held[len(names) :]))

        def count(held: Gradients) -> tf.Operation:
            return record(tf.add_n([inspection.counts(held[: len(names)]), *held[len(names) :]]))

        step = distribution.call_either(applied, [*grads, *known], apply, count)
        done = step if seen is None or seen.done is None else tf.group(step, seen.done)
        return done, Verdict(applied, finite, max_abs)

    def _detector_of(self, judged: bool) -> OverflowDetector:
        return NonFiniteDetector() if judged else self._detector

    @without_autograph
    def update(self, verdict: Verdict) -> tf.Operation:
        """Move the scale, and count the step; once for all replicas.

        Args:
            verdict: What was found of the step's gradients.

        Returns:
            The op that does it; None in eager mode.
        """
        seen = [verdict.finite] if verdict.max_abs is None else [verdict.finite, verdict.max_abs]
        return tf.group(self._manager.update_loss_scale(*seen), self._manager.note_step(verdict.applied))

    def overflow_reports(self) -> list[OverflowReport]:
        """Return whose gradients overflowed, a report for each list of variables that steps were taken for.

        In a graph they hold tensors, to be fetched, of the steps that were built in it.
        """
        with tf.init_scope():
            here = list(self.overflow_counts) if tf.executing_eagerly() else counts_of_graph(self._manager)
            return [counts.report() for counts in self.overflow_counts if counts in here]

    def prepare(self, names: Sequence[str]) -> None:
        """Make what a step needs for a list of variables, so that a SavedModel has it that is exported before any step.

        Args:
            names: The names of the variables.
        """
        # Replicas would each make their own.
        if tf.distribute.in_cross_replica_context() or not tf.distribute.has_strategy():
            self.overflow_counts.of(names).create()
