"""The path of a gradient through a step, the same for every host framework."""

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import tensorflow as tf

from tfmp.core.accumulation.accumulator import GradientAccumulator
from tfmp.core.adapters import OptimizerAdapter
from tfmp.core.control_flow import conditional_update
from tfmp.core.distribute import Distribution, current_distribution
from tfmp.core.gradients import arithmetic
from tfmp.core.gradients.origins import Change, Derivation, Origin, derivation_of, note, origin_of
from tfmp.core.managers import LossScaleManager
from tfmp.core.overflow.detectors import NonFiniteDetector, OverflowDetector
from tfmp.core.overflow.gradient_check import GradientCheck, Scaling
from tfmp.core.overflow.local_check import LocalCheck
from tfmp.core.overflow.overflow_counts import AllOverflowCounts, OverflowCounts, OverflowReport
from tfmp.core.step.bfloat16_notice import Bfloat16Notice
from tfmp.core.step.gradient_ranges import GradientRanges
from tfmp.core.step.graph_records import (
    RecordedGradients,
    overflow_counts_of_graph,
    record_gradients,
    record_loss,
    record_step,
)
from tfmp.core.step.result import StepResult
from tfmp.core.step.worker_average import WorkerAverage
from tfmp.core.tracing import without_autograph
from tfmp.types import Gradient, Gradients


class Step(NamedTuple):
    """One step of an optimizer on one replica: its gradients, and how they are to be checked and applied.

    Attributes:
        adapter: The optimizer and its variables.
        grads: This replica's gradients, one for each variable.
        scaling: Whether the gradients are scaled, and whether they are unscaled before the check.
        loss_scale: The number by which the adapter divides the gradients when it applies them; None if it applies them
            as they are.
        changes: For each gradient a function of its unscaled values, by which the adapter clips them; empty if there is
            none. The check needs to know nothing of them: they keep finite values finite, and others not finite.
        sums_first: True if the gradients are summed over the replicas before they are checked, and not by the optimizer
            when it applies them. The check then reads only the sums.
        is_averaged: False if the gradients are still to be averaged over Horovod's workers. Only steps of TensorFlow 1
            and Keras 2 need that, and their gradients are unscaled.
    """

    adapter: OptimizerAdapter
    grads: Gradients
    scaling: Scaling = Scaling.UNSCALED
    loss_scale: tf.Tensor | None = None
    changes: Sequence[Change | None] = ()
    sums_first: bool = False
    is_averaged: bool = True


class _Held(NamedTuple):
    """What the step's conditional takes as its argument, because it differs between replicas.

    Attributes:
        grads: The replica's gradients.
        counts: The counts of what overflowed in the replica's micro-batches; empty without a window.
        measures: What the adapter measured of the gradients.
        squares: What the check tells of them, for the counts of a skipped step.
    """

    grads: Gradients
    counts: Gradients
    measures: Gradients
    squares: Gradients

    def flat(self) -> list[Gradient]:
        return [value for part in self for value in part]

    def like(self, flat: Gradients) -> "_Held":
        """Return the parts of another list that `flat` returned."""
        rest = iter(flat)
        return _Held(*(list(itertools.islice(rest, len(part))) for part in self))


class LossScaler:
    """Scales losses, unscales gradients, and applies the gradients of a step if they are finite on all replicas.

        method       what it does                                               result
        scale        loss * loss_scale                                          float32
        unscale      grads / loss_scale                                         float32
        run          reduce: sum or average, if the optimizer does not          the gradients
                     check: this replica's gradients                            LocalCheck
                     agree: one answer for all replicas                         StepResult
                     apply the gradients, or count what overflowed
        advance      the manager adjusts the loss scale; the step is counted
        accumulate   adds a micro-batch; runs a step when the window ends

    `step` is `run` and then `advance`. The scaler itself has no state that training changes, apart from the overflow
    counts: the loss scale and the step counters belong to the manager. A front-end looks up the `distribution` once for
    each step, and passes it to all methods that need it.

    Args:
        manager: Decides the loss scale.
        detector: Decides which gradients overflowed.
        is_distributed: True if the user states that several processes train together.
        aggregation_dtype: The dtype in which gradients are sent between Horovod's workers; by default their own.

    Examples:
        >>> import tfmp
        >>> from tfmp.core.distribute import SingleProcess
        >>> manager = tfmp.ExponentialUpdateLossScaleManager(8, 2, decr_every_n_nan_or_inf=1, decr_ratio=0.5)
        >>> scaler = LossScaler(manager, tfmp.NonFiniteDetector(), is_distributed=False)
        >>> float(scaler.scale(tf.constant(3.0)))
        24.0
        >>> w = tf.Variable(1.0)
        >>> adapter = OptimizerAdapter(tf.compat.v1.train.GradientDescentOptimizer(0.5), [w])
        >>> scaler.step(Step(adapter, [tf.constant(float("inf"))]), SingleProcess())
        >>> float(manager.get_loss_scale()), float(w)
        (4.0, 1.0)
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
        #: Averages gradients over Horovod's workers.
        self.worker_average = WorkerAverage(manager, is_distributed, aggregation_dtype)
        #: The numbers of overflowed values in the gradient of each variable.
        self.overflow_counts = AllOverflowCounts()
        #: The powers of two of gradients; None unless somebody wants to see them.
        self.gradient_ranges: GradientRanges | None = None
        self._bfloat16_notice = Bfloat16Notice(manager)

    def distribution(self) -> Distribution:
        """Return the distribution of the step that is being built: how its replicas act together."""
        return current_distribution(self._is_distributed)

    @without_autograph
    def scale(self, loss: tf.Tensor) -> tf.Tensor:
        """Return the loss times the current scale, in float32 or float64.

        Args:
            loss: The loss, of a floating-point type.
        """
        record_loss(self._manager, loss)
        self._bfloat16_notice.look_at(loss)
        return arithmetic.scale(loss, self._manager.get_loss_scale())

    @without_autograph
    def unscale(self, grads: Gradients) -> list[Gradient]:
        """Return the gradients divided by the current scale, in float32 or float64.

        Args:
            grads: Gradients of a loss scaled by `scale`.
        """
        loss_scale = self._manager.get_loss_scale()
        unscaled = arithmetic.unscale(grads, loss_scale)
        for grad, scaled in zip(unscaled, grads, strict=True):
            note(grad, Origin(scaled, loss_scale))
        return unscaled

    def step_of_scaled_grads(self, adapter: OptimizerAdapter, grads: Gradients, distribution: Distribution) -> Step:
        """Return a step with the gradients of a scaled loss.

        If the adapter can unscale the gradients when it applies them, they stay scaled in the step. Otherwise they are
        unscaled here.

        Args:
            adapter: The optimizer and its variables.
            grads: This replica's gradients.
            distribution: How the replicas act together.
        """
        sums_first = self._sums_first(adapter, grads, distribution)
        if not (sums_first or adapter.unscales(grads)):
            return Step(adapter, adapter.typed(self.unscaled_grads(adapter, grads)))
        scaling = Scaling.CHECK_SCALED if self._checks_scaled() else Scaling.UNSCALE_FIRST
        return Step(adapter, grads, scaling, self._manager.get_loss_scale(), sums_first=sums_first)

    def _sums_first(self, adapter: OptimizerAdapter, grads: Gradients, distribution: Distribution) -> bool:
        may_sum = distribution.can_sum_first and self._seeks_only_finite() and self._checks_scaled()
        return may_sum and adapter.can_sum_first(grads)

    def _seeks_only_finite(self) -> bool:
        """Return whether nothing has to be known of the gradients of a replica but whether they are finite."""
        looks_closely = self._manager.needs_max_abs or self.gradient_ranges is not None
        return type(self._detector) is NonFiniteDetector and not looks_closely

    def _checks_scaled(self) -> bool:
        # See Scaling.CHECK_SCALED for why the scale must be 1 or more.
        return self._detector.ignores_scale and self._manager.lowest_loss_scale >= 1

    def step_of_unscaled_grads(
        self, adapter: OptimizerAdapter, grads: Gradients, known: LocalCheck | None = None
    ) -> tuple[Step, LocalCheck | None]:
        """Return a step with unscaled gradients, which the user may have clipped, and what is known of them.

        In a graph it is a step with the scaled gradients from which they were computed, if the adapter can compute them
        again in the program that applies them.

        Args:
            adapter: The optimizer and its variables.
            grads: This replica's gradients.
            known: The result of an earlier check of gradients on this replica; None if there was none.
        """
        derivation = derivation_of(grads)
        if derivation is None or not self._may_derive(derivation) or not adapter.unscales(derivation.scaled):
            return Step(adapter, adapter.typed(grads)), known
        changes = () if derivation.is_unscaling else derivation.changes
        step = Step(adapter, derivation.scaled, Scaling.CHECK_SCALED, derivation.loss_scale, changes)
        return step, _known_of_scaled(known, derivation.keeps_finite)

    def _may_derive(self, derivation: Derivation) -> bool:
        """Return whether nothing but the adapter has to see the gradients as they are after unscaling and clipping."""
        return self._checks_scaled() and (self._seeks_only_finite() or derivation.is_unscaling)

    def unscaled_grads(self, adapter: OptimizerAdapter, grads: Gradients) -> list[Gradient]:
        """Unscale the gradients of a scaled loss, except those that are the next values of their variables.

        Args:
            adapter: The optimizer and its variables.
            grads: This replica's gradients.
        """
        unscaled = self.unscale(grads)
        return [grads[index] if index in adapter.overwritten else grad for index, grad in enumerate(unscaled)]

    @without_autograph
    def check_early(self, grads: Gradients, distribution: Distribution, *, already_checked: bool = False) -> LocalCheck:
        """Check unscaled gradients before the user clips or changes them; pass the result to the step as `known`.

        Args:
            grads: This replica's gradients, unscaled.
            distribution: How the replicas act together.
            already_checked: True if these are the mean of micro-batches that the detector has checked one by one. Only
                the finiteness of the mean is checked then.
        """
        detector, loss_scale = self._detector_for(already_checked=already_checked), self._manager.get_loss_scale()
        derivation, num_summed = derivation_of(grads), distribution.num_summed
        if derivation is not None and derivation.is_unscaling and num_summed == 1 and self._checks_scaled():
            # In a graph the unscaled gradients may then not be computed at all.
            check, read = GradientCheck(detector, loss_scale, Scaling.CHECK_SCALED), derivation.scaled
        else:
            check, read = GradientCheck(detector, loss_scale, num_summed=num_summed), grads
        max_abs = check.max_abs(read) if self._manager.needs_max_abs else None
        return LocalCheck(check.all_finite(read), max_abs=max_abs, checked=grads)

    @without_autograph
    def agree_early(self, known: LocalCheck, distribution: Distribution) -> StepResult:
        """Return the result that a step would have with gradients that `check_early` or `drain` has checked.

        Args:
            known: What this replica knows of its gradients.
            distribution: How the replicas act together.
        """
        return self._agree(known, [], [], distribution)

    @without_autograph
    def step(self, step: Step, distribution: Distribution, known: LocalCheck | None = None) -> tf.Operation:
        """Run a step, then adjust the loss scale according to its result.

        Args:
            step: The gradients, and how they are to be checked and applied.
            distribution: How the replicas act together.
            known: The result of an earlier check of gradients on this replica; None if there was none.

        Returns:
            The op of the whole step; None in eager mode.
        """
        done, result = self.run(step, distribution, known)

        def advance() -> tf.Operation:
            on_step = step.adapter.on_step(result.applied)
            return tf.group(self.advance(result), *([] if on_step is None else [on_step]))

        return tf.group(done, distribution.once(advance))

    @without_autograph
    def run(
        self, step: Step, distribution: Distribution, known: LocalCheck | None = None
    ) -> tuple[tf.Operation, StepResult]:
        """Apply the gradients if they are finite on every replica, without adjusting the loss scale.

        Args:
            step: The gradients, and how they are to be checked and applied.
            distribution: How the replicas act together.
            known: The result of an earlier check of gradients on this replica; None if there was none.

        Returns:
            The op that does this (None in eager mode) and the result of the step, which `advance` takes.
        """
        step = step._replace(grads=self._reduce(step, distribution))
        check = self._gradient_check(step, distribution, known)
        if step.sums_first:
            sums, local_check = self._sum_and_check(step, distribution)
            result = self._agree(local_check, step.grads, step.adapter.names, distribution)
            done = self._apply_sums_or_count(step, sums, check, result.applied, distribution)
        else:
            local_check = self._check(step.grads, check, known)
            result = self._agree(local_check, step.grads, step.adapter.names, distribution)
            done = self._apply_or_count(step, check, local_check, result.applied, distribution)
        return tf.group(done, *self._record_ranges(step, distribution)), result

    def _record_ranges(self, step: Step, distribution: Distribution) -> list[tf.Operation]:
        """Return the ops that let monitors see the powers of two of the gradients; none if nobody asked for them."""
        record_gradients(RecordedGradients(self._manager, step.adapter.names, step.grads, step.loss_scale))
        if self.gradient_ranges is None:
            return []
        return [self.gradient_ranges.record(step.adapter.names, step.grads, step.loss_scale, distribution)]

    def _reduce(self, step: Step, distribution: Distribution) -> Gradients:
        """Sum the gradients over replicas, or average them over workers, unless the optimizer does so itself later."""
        grads = step.adapter.reduce(step.grads)
        if step.is_averaged:
            return grads
        return self.worker_average.mean(grads, step.adapter.names, distribution, are_scaled=False)

    def _gradient_check(self, step: Step, distribution: Distribution, known: LocalCheck | None) -> GradientCheck:
        num_summed = 1 if step.adapter.sums_first else distribution.num_summed
        detector = self._detector_for(already_checked=known is not None and known.already_checked)
        loss_scale = self._manager.get_loss_scale()
        return GradientCheck(detector, loss_scale, step.scaling, num_summed, step.adapter.overwritten)

    def _detector_for(self, *, already_checked: bool) -> OverflowDetector:
        # A replica's part of a mean can be larger than any micro-batch. A detector that compares magnitudes with a
        # limit, as it has done for each micro-batch, could reject it wrongly.
        return NonFiniteDetector() if already_checked else self._detector

    def _check(self, grads: Gradients, check: GradientCheck, known: LocalCheck | None) -> LocalCheck:
        """Check this replica's gradients; those that were checked before and did not change are not read again."""
        grads = check.checked_form(grads)
        if known is None:
            local_check = LocalCheck(check.all_finite(grads))
        else:
            changed = arithmetic.without(grads, known.checked)
            usable = tf.logical_and(check.all_finite(changed), known.usable) if changed else known.usable
            local_check = known._replace(usable=usable)
        if self._manager.needs_max_abs and local_check.max_abs is None:
            return local_check._replace(max_abs=check.max_abs(grads))
        return local_check

    def _sum_and_check(self, step: Step, distribution: Distribution) -> tuple[Gradients, LocalCheck]:
        """Return the sums of the gradients over the replicas, and the check of them, which is the same on all."""
        sums = step.adapter.sum(step.grads)
        # The rows of sparse gradients are not added up yet.
        num_summed = distribution.num_summed if any(map(arithmetic.is_sparse, sums)) else 1
        check = GradientCheck(self._detector, self._manager.get_loss_scale(), step.scaling, num_summed)
        return sums, LocalCheck(distribution.once(lambda: check.all_finite(sums)))

    def _agree(
        self, local_check: LocalCheck, grads: Gradients, names: Sequence[str], distribution: Distribution
    ) -> StepResult:
        """Combine the checks of all replicas into one result."""
        max_abs = local_check.max_abs if self._manager.needs_max_abs else None
        applied, max_abs = distribution.agree(local_check.usable, max_abs, grads, names)
        complete = local_check.complete
        return StepResult(applied, applied if complete is None else tf.logical_and(applied, complete), max_abs)

    def _apply_or_count(
        self, step: Step, check: GradientCheck, local_check: LocalCheck, applied: tf.Tensor, distribution: Distribution
    ) -> tf.Operation:
        """Apply the gradients; or, if the step is skipped, count the values that overflowed in each gradient.

        All replicas do the same, since they agree on `applied`. If the gradients are the mean of a window, the counts
        of the micro-batches that overflowed are stored in both cases.
        """
        window_counts = [] if local_check.overflow_counts is None else [local_check.overflow_counts]
        # What is measured of scaled gradients says nothing about those that are changed later.
        measures = [] if step.changes else step.adapter.measure(step.grads, step.loss_scale)
        squares = check.squares(check.checked_form(step.grads))
        held = _Held(step.grads, window_counts, measures, squares)
        stored_counts = self.overflow_counts.of(step.adapter.names)

        # A strategy calls the first replica's functions for all replicas, so what differs comes as an argument.
        def apply(flat: Gradients) -> tf.Operation:
            grads, counts, measures, _ = held.like(flat)
            done = step.adapter.apply(grads, step.loss_scale, measures, step.changes)
            return tf.group(done, *(self._record_overflows(stored_counts, each, distribution) for each in counts))

        def count(flat: Gradients) -> tf.Operation:
            grads, counts, _, squares = held.like(flat)
            found = tf.add_n([check.counts(check.checked_form(grads), squares), *counts])
            return self._record_overflows(stored_counts, found, distribution)

        done = distribution.conditional_update(applied, held.flat(), apply, count)
        return done if local_check.emptied is None else tf.group(done, local_check.emptied)

    def _apply_sums_or_count(
        self, step: Step, sums: Gradients, check: GradientCheck, applied: tf.Tensor, distribution: Distribution
    ) -> tf.Operation:
        """Apply the sums; or, if the step is skipped, count the values that overflowed in this replica's gradients."""
        stored_counts = self.overflow_counts.of(step.adapter.names)

        def apply(held: Gradients) -> tf.Operation:
            return step.adapter.apply_sums(held[: len(sums)], step.loss_scale)

        def count(held: Gradients) -> tf.Operation:
            found = check.counts(check.checked_form(held[len(sums) :]))
            return self._record_overflows(stored_counts, found, distribution)

        return distribution.conditional_update(applied, [*sums, *step.grads], apply, count)

    def _record_overflows(self, stored: OverflowCounts, counts: tf.Tensor, distribution: Distribution) -> tf.Operation:
        of_all = distribution.maximum(counts, "overflow_counts")

        def store() -> tf.Operation:
            # The step is recorded here, where only the first replica's function runs: if each replica has made a
            # manager of its own, the manager of the first replica is the one that is used.
            record_step(self._manager, stored)
            return stored.record(of_all)

        return distribution.once(store)

    @without_autograph
    def advance(self, result: StepResult, is_step: tf.Tensor | None = None) -> tf.Operation:
        """Adjust the loss scale and count the step; to be called once for all replicas.

        Args:
            result: The result of the step.
            is_step: A boolean scalar: is the step to be counted? None if it certainly is.

        Returns:
            The op that does both; None in eager mode.
        """
        seen = [result.finite] if result.max_abs is None else [result.finite, result.max_abs]
        # If micro-batches can be dropped, `finite` is a second tensor, by which the manager records a drop.
        applied = [result.applied] if result.finite is result.applied else [result.applied, result.finite]

        def count(_: Gradients) -> tf.Operation:
            return self._manager.note_step(*applied)

        adjusted = self._manager.update_loss_scale(*seen)
        return tf.group(adjusted, count([]) if is_step is None else conditional_update(is_step, [], count))

    @without_autograph
    def accumulate(self, step: Step, distribution: Distribution, accumulator: GradientAccumulator) -> tf.Operation:
        """Add the gradients of a micro-batch, and run a step with their mean when the window ends.

        Args:
            step: The step as it would be with this micro-batch alone, with unscaled gradients.
            distribution: How the replicas act together.
            accumulator: Stores the sums of the gradients.

        Returns:
            The op that does both; None in eager mode.
        """
        needs_max_abs = self._manager.needs_max_abs
        added = accumulator.add_unscaled(step.grads, self._manager.get_loss_scale(), keeps_max_abs=needs_max_abs)
        # All replicas add the same number of micro-batches, those that overflowed included, so this flag is the same on
        # all of them without an exchange.
        with tf.control_dependencies([added]):
            is_full = accumulator.is_full

        def end_window(_: Gradients) -> tf.Operation:
            grads, local_check = self.drain(accumulator, distribution)
            return self.step(step._replace(grads=grads), distribution, local_check)

        return distribution.conditional_update(is_full, [], end_window, lambda _: tf.no_op())

    @without_autograph
    def drain(self, accumulator: GradientAccumulator, distribution: Distribution) -> tuple[list[Gradient], LocalCheck]:
        """Empty an accumulator; return this replica's part of the mean and the result of checking its micro-batches.

        Args:
            accumulator: The accumulator, whose window is at its end.
            distribution: How the replicas act together.
        """
        return accumulator.drain(lambda values: distribution.total(values, "micro_batches"))

    def overflow_reports(self) -> list[OverflowReport]:
        """Return how often the gradient of each variable overflowed: one report for each list of variables.

        In a graph the reports are about the steps that were built in that graph, and contain tensors to fetch.
        """
        with tf.init_scope():
            eager = tf.executing_eagerly()
            here = list(self.overflow_counts) if eager else overflow_counts_of_graph(self._manager)
            return [counts.report() for counts in self.overflow_counts if counts in here]

    def prepare(self, names: Sequence[str]) -> None:
        """Make the variables that a step needs, so that a SavedModel that is exported before any step contains them.

        Args:
            names: The names of the variables that will be trained.
        """
        # Not on the replicas of a strategy: each of them would make variables of its own.
        if tf.distribute.in_cross_replica_context() or not tf.distribute.has_strategy():
            self.overflow_counts.of(names).create()


def _known_of_scaled(known: LocalCheck | None, keeps_finite: Sequence[tf.Tensor]) -> LocalCheck | None:
    """Return what is known of scaled gradients from what is known of those that were computed from them.

    Args:
        known: The result of an earlier check; None if there was none.
        keeps_finite: Whether each change of the gradients keeps finite values finite. A step where one does not is
            skipped.
    """
    if known is None and not keeps_finite:
        return None
    known = known or LocalCheck(tf.constant(True))
    origins = [origin_of(grad) for grad in known.checked]
    checked = [grad if origin is None else origin.scaled for origin, grad in zip(origins, known.checked, strict=True)]
    return known._replace(usable=tf.reduce_all([known.usable, *keeps_finite]), checked=checked)
