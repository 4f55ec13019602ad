"""The path of a gradient through a step, the same for every host framework."""

from collections.abc import Sequence
from typing import NamedTuple

import tensorflow as tf

from tfmp.core.accumulation import GradientAccumulator
from tfmp.core.adapter import OptimizerAdapter, Program
from tfmp.core.distribute import Distribution
from tfmp.core.gradients import arithmetic
from tfmp.core.gradients.clipping import unclipped
from tfmp.core.gradients.measures import global_norm, large_norm_of_each
from tfmp.core.monitors import RecordedGradients, record_gradients, records_of_graph
from tfmp.core.overflow.found import Checked, Found, GradientCheck
from tfmp.core.spikes.watch import Look
from tfmp.core.step.norms import Measured
from tfmp.core.step.scaler import Facts, LossScaler
from tfmp.core.tracing import without_autograph
from tfmp.types import Done, Gradient, Gradients


class Step(NamedTuple):
    """One step of an optimizer on one replica; `step_of` decides how it runs, and `take` takes it.

    A strategy calls `apply` of the first replica's step for all replicas, so it gets what each of them holds.
    """

    adapter: OptimizerAdapter
    #: The gradients that are checked and applied.
    grads: Gradients
    facts: Facts
    gradient_check: GradientCheck
    #: The number by which the gradients are still multiplied; None if they are in true magnitude.
    scaled_by: tf.Tensor | None
    #: Unscales, clips and applies the gradients; None if `adapter.apply` does.
    program: Program | None
    #: What is known of the gradients already: from `GradScaler.unscale`, or from the micro-batches of a window.
    checked: Checked | None
    #: The gradients whose norm is that of the step; None if nobody asks for it.
    measured: Measured | None

    def hold(self, is_usable: tf.Tensor) -> "HeldByStep":
        """Return what differs between replicas.

        If this replica's gradients are not usable, no replica applies any, and the norm need not be right.
        """
        clips = self.program is not None and self.program.clips
        # In a graph this needs only the sums that the check computes anyway. Eager code would compute them in each
        # step, for the few that are skipped.
        has_sums = self.checked is None and not tf.executing_eagerly()
        return HeldByStep(
            list(self.grads),
            global_norm(self.grads, is_needed=is_usable) if clips else None,
            self.gradient_check.are_suspect(self.grads) if has_sums else None,
            None if self.checked is None else self.checked.window_counts,
        )

    def apply(self, held: "HeldByStep") -> Done:
        """Unscale and apply the gradients."""
        adapter, scaled_by = self.adapter, self.scaled_by
        if self.program is not None:
            # In a program, dividing by 1 costs nothing.
            return self.program.run(held.grads, tf.ones([]) if scaled_by is None else scaled_by, held.norm)
        if scaled_by is None:
            return adapter.apply(held.grads)
        return adapter.apply(adapter.typed(arithmetic.unscale(held.grads, scaled_by)))


class HeldByStep(NamedTuple):
    """What may differ between replicas: the argument of what the first replica's step runs for all of them."""

    grads: list[Gradient]
    #: The norm of the gradients as they are held, float64; None unless a program clips by it.
    norm: tf.Tensor | None
    #: Which large gradients may have values that overflowed; None if that is not known without reading them again.
    are_suspect: tf.Tensor | None
    #: The numbers of values that overflowed in micro-batches; None if there are none.
    window_counts: tf.Tensor | None


def step_of(
    adapter: OptimizerAdapter,
    grads: Gradients,
    facts: Facts,
    *,
    are_scaled: bool = False,
    checked: Checked | None = None,
) -> Step:
    """Decide how a step with this replica's gradients runs; `checked` is what is known of those in true magnitude.

    Scaled gradients stay scaled until they are applied, if they may be checked so: a step that is skipped then saves
    unscaling them. Otherwise they are unscaled here. Those in true magnitude are cast to the types of their variables.
    """
    scaler, _, loss_scale = facts
    may_check_scaled = scaler.detector.ignores_scale and scaler.manager.lowest_loss_scale >= 1
    if are_scaled and may_check_scaled and not adapter.reduces and adapter.can_unscale_late(grads):
        scaled_by, typed = loss_scale, grads
    else:
        grads = in_true_magnitude(adapter, grads, loss_scale) if are_scaled else grads
        scaled_by, typed = None, adapter.typed(grads)
    reduced = adapter.reduce(typed)
    check = facts.check(
        are_summed=adapter.sums_first,
        overwritten=adapter.overwritten,
        are_scaled=scaled_by is not None,
        of_window=checked is not None and checked.of_window,
    )
    measured = None
    if scaler.norms.are_wanted:
        whole = list(map(unclipped, grads)) if checked is None or checked.unclipped is None else checked.unclipped
        measured = _measured(adapter, whole, typed, reduced, facts, scaled_by)
    return Step(adapter, reduced, facts, check, scaled_by, adapter.program(reduced), checked, measured)


def in_true_magnitude(adapter: OptimizerAdapter, grads: Gradients, loss_scale: tf.Tensor) -> list[Gradient]:
    """Unscale the gradients of a scaled loss, except those that are the next values of their variables."""
    unscaled = arithmetic.unscale(grads, loss_scale)
    return [grads[index] if index in adapter.overwritten else grad for index, grad in enumerate(unscaled)]


def _measured(
    adapter: OptimizerAdapter,
    whole: Gradients,
    typed: Gradients,
    reduced: Gradients,
    facts: Facts,
    scaled_by: tf.Tensor | None,
) -> Measured | None:
    """Return the gradients whose norm somebody wants to know: before they were clipped, if they were.

    `whole` are those before clipping, `typed` those that were clipped and cast to the types of their variables, and
    `reduced` those that were then summed or averaged over the replicas. None if only an exchange could tell the norm,
    and it is not recorded.
    """
    is_summed = adapter.sums_first or facts.distribution.num_summed == 1
    # Clipped, or cast.
    differ = bool(arithmetic.values_of(arithmetic.without(whole, typed)))
    exchanges = not is_summed or (differ and adapter.reduces)
    # A norm that is not recorded may be fetched on one worker alone, which would wait for the others.
    if exchanges and not facts.scaler.norms.is_recorded:
        return None
    measured = reduced
    if differ:
        # Horovod distinguishes tensors by their names, which can be used again when the first exchange is over.
        with tf.control_dependencies(arithmetic.values_of(reduced) if exchanges else []):
            measured = adapter.reduce(whole)
    next_values = adapter.overwritten if len(measured) == len(adapter.variables) else ()
    grads = [None if index in next_values else grad for index, grad in enumerate(measured)]
    return Measured(grads, scaled_by, is_summed)


@without_autograph
def take(step: Step) -> Done:
    """Take a step: check, agree, apply or record, adjust the loss scale by what was found, and count the step."""
    done, found = apply_or_skip(step)

    def advance() -> Done:
        on_step = step.adapter.on_step(found.applied)
        return tf.group(step.facts.scaler.advance(found), *([] if on_step is None else [on_step]))

    return tf.group(done, step.facts.distribution.once(advance))


@without_autograph
def apply_or_skip(step: Step) -> tuple[Done, Found]:
    """Apply the gradients, unless one overflowed on any replica or the step is a spike; also return what was found."""
    (scaler, distribution, _), names = step.facts, step.adapter.names
    here = step.gradient_check.find(step.grads, step.checked)
    held = step.hold(here.usable)
    norm = None if step.measured is None else step.measured.norm(names, distribution, here.usable)
    spikes = scaler.norms.spikes
    look = None if norm is None or spikes is None else spikes.look(step.adapter.optimizers, norm)
    found = agree(here, scaler, distribution, look, step.grads, names)
    done = [_apply_or_record(step, held, found, look)]
    if norm is not None:
        done.append(distribution.once(lambda: scaler.norms.store(norm, look, found)))
    # For hooks, which fetch the gradients of a graph; and for the ranges of gradients.
    record_gradients(RecordedGradients(scaler.manager, names, step.grads, step.scaled_by))
    if scaler.monitor is not None:
        done.append(scaler.monitor._record(names, step.grads, step.scaled_by, distribution))
    return tf.group(*done), found


def agree(
    found: Found,
    scaler: LossScaler,
    distribution: Distribution,
    look: Look | None = None,
    grads: Gradients = (),
    names: Sequence[str] = (),
) -> Found:
    """Combine what each replica found into one answer for all.

    All replicas must have `grads` for the same variables: an error names those of which they have not.
    """
    # Of each answer, all get the largest. So a flag says what forbids the step: it is True if it is on any replica.
    answers = {"unusable": tf.logical_not(found.usable)}
    if look is not None:
        # All replicas compute the same norm, but perhaps not in every bit. So they agree on what follows from it, too.
        answers |= {"is_above": look.is_above, "is_skipped": look.is_skipped}
    if scaler.manager.needs_max_abs:
        answers["max_abs"] = found.max_abs
    agreed = dict(zip(answers, distribution.agree(list(answers.values()), grads, names), strict=True))
    usable = tf.logical_not(agreed["unusable"])
    spike = None if look is None else tf.logical_and(usable, agreed["is_skipped"])
    # `complete` is the same on all already.
    return Found(usable, agreed.get("max_abs"), found.complete, agreed.get("is_above"), spike)


def _apply_or_record(step: Step, held: HeldByStep, found: Found, look: Look | None) -> Done:
    """Apply the gradients; or, if the step is skipped, store which of them overflowed, or made it a spike."""
    (scaler, distribution, _), names = step.facts, step.adapter.names
    # Made here, and not in a branch.
    overflow_counts = scaler.overflow_counts.of(names)

    def record(counts: tf.Tensor) -> Done:
        of_all = distribution.maximum(counts, "overflow_counts")

        def store() -> Done:
            # Only the first replica comes here: if each replica has made a manager of its own, the first one's is used.
            records_of_graph().steps.append((scaler.manager, overflow_counts))
            return overflow_counts.record(of_all)

        return distribution.once(store)

    def apply(held: HeldByStep) -> Done:
        applied = step.apply(held)
        # Micro-batches that overflowed are counted, although the step is applied without them.
        return applied if held.window_counts is None else tf.group(applied, record(held.window_counts))

    def count(held: HeldByStep) -> Done:
        counts = step.gradient_check.counts(held.grads, held.are_suspect)
        return record(counts if held.window_counts is None else counts + held.window_counts)

    if look is None:
        return distribution.conditional_update(found.applied, held, apply, count)

    def describe(held: HeldByStep) -> Done:
        norms = distribution.maximum(large_norm_of_each(held.grads), "norms_in_spike")
        described = distribution.once(lambda: scaler.norms.describe_spike(look, norms, names))
        return described if held.window_counts is None else tf.group(described, record(held.window_counts))

    def skip(held: HeldByStep) -> Done:
        return distribution.conditional_update(found.spike, held, describe, count)

    return distribution.conditional_update(found.applied, held, apply, skip)


@without_autograph
def accumulate(adapter: OptimizerAdapter, grads: Gradients, facts: Facts, accumulator: GradientAccumulator) -> Done:
    """Add the unscaled gradients of a micro-batch, and take a step with the mean when the window ends."""
    keeps_max_abs = facts.scaler.manager.needs_max_abs
    added = accumulator.add_unscaled(grads, facts.loss_scale, keeps_max_abs=keeps_max_abs)
    # The same on all replicas without an exchange: all add as many micro-batches, those that overflowed included.
    with tf.control_dependencies([added]):
        is_full = accumulator.is_full

    def end_window(_: HeldByStep) -> Done:
        mean, checked, emptied = drain(accumulator, facts.distribution)
        return tf.group(take(step_of(adapter, mean, facts, checked=checked)), emptied)

    return facts.distribution.conditional_update(is_full, [], end_window, lambda _: tf.no_op())


@without_autograph
def drain(accumulator: GradientAccumulator, distribution: Distribution) -> tuple[list[Gradient], Checked, Done]:
    """Return this replica's part of the mean, the check of its micro-batches, and the op that empties the window."""
    return accumulator.drain(lambda values: distribution.total(values, "micro_batches"))
