"""Chooses how a step runs: as the first of these updates whose conditions hold.

Gradients of a scaled loss:

* `ProgramUpdate`, if the optimizer has a program for them.
* Otherwise they are unscaled, and one of the last two updates of gradients in true magnitude is chosen.

Gradients in true magnitude:

* `ProgramUpdate`, if the optimizer has a program for them.
* `OptimizerUpdate`.

If they are the mean of micro-batches, a `WindowUpdate` around it adds the overflows that were counted in these.
"""

import tensorflow as tf

from tfmp.core.adapters import OptimizerAdapter
from tfmp.core.gradients import arithmetic
from tfmp.core.gradients.unclipped import unclipped
from tfmp.core.overflow.gradient_check import GradientCheck, Scaling
from tfmp.core.overflow.results import EarlierCheck
from tfmp.core.step.facts import Facts, WantedNorm
from tfmp.core.step.measured import Measured
from tfmp.core.step.program_update import ProgramUpdate
from tfmp.core.step.update import OptimizerUpdate, Update
from tfmp.core.step.window_update import WindowUpdate
from tfmp.types import Gradient, Gradients


def update_of_scaled(adapter: OptimizerAdapter, grads: Gradients, facts: Facts) -> Update:
    """Return the update of a step with this replica's gradients of a scaled loss."""
    program = adapter.program(grads)
    if program is None:
        return _unscaled_update(adapter, unscaled(adapter, grads, facts.loss_scale), facts, None)
    scaling = Scaling.CHECK_SCALED if facts.may_check_scaled else Scaling.UNSCALE_FIRST
    check, reduced = _gradient_check(adapter, facts, scaling), adapter.reduce(grads)
    return ProgramUpdate(
        adapter,
        program,
        reduced,
        facts.distribution,
        check,
        loss_scale=facts.loss_scale,
        measured=_measured(adapter, reduced, facts, facts.loss_scale),
    )


def update_of_unscaled(
    adapter: OptimizerAdapter, grads: Gradients, facts: Facts, earlier: EarlierCheck | None = None
) -> Update:
    """Return the update of a step with gradients in true magnitude, which the user may have clipped.

    `earlier` is the result of an earlier check of gradients on this replica, if there was one.
    """
    update = _unscaled_update(adapter, grads, facts, earlier)
    if earlier is None or earlier.overflow_counts is None:
        return update
    return WindowUpdate(update, earlier.overflow_counts)


def _unscaled_update(
    adapter: OptimizerAdapter, grads: Gradients, facts: Facts, earlier: EarlierCheck | None
) -> OptimizerUpdate | ProgramUpdate:
    typed = adapter.typed(grads)
    reduced = adapter.reduce(typed)
    check = _gradient_check(adapter, facts, Scaling.UNSCALED, earlier)
    measured = _measured_of_unscaled(adapter, grads, typed, reduced, facts, earlier)
    program = adapter.program(reduced)
    if program is not None:
        return ProgramUpdate(adapter, program, reduced, facts.distribution, check, earlier, measured=measured)
    return OptimizerUpdate(adapter, reduced, facts.distribution, check, earlier, measured=measured)


def _measured_of_unscaled(
    adapter: OptimizerAdapter,
    grads: Gradients,
    typed: Gradients,
    reduced: Gradients,
    facts: Facts,
    earlier: EarlierCheck | None,
) -> Measured | None:
    """Return the gradients before they were clipped, and cast to the types of their variables.

    `typed` are those that were cast, and `reduced` those that were then summed or averaged over the replicas.
    """
    if facts.norm is WantedNorm.NO:
        return None
    before = list(map(unclipped, grads)) if earlier is None or earlier.unclipped is None else earlier.unclipped
    if not arithmetic.without(before, typed):
        return _measured(adapter, reduced, facts)
    if reduced is typed:
        return _measured(adapter, before, facts)
    if facts.norm is WantedNorm.WITHOUT_EXCHANGE:
        return None
    # Horovod distinguishes tensors by their names. The same names can be used again when the first exchange is over.
    with tf.control_dependencies(arithmetic.values_of(reduced)):
        return _measured(adapter, adapter.reduce(before), facts)


def _measured(
    adapter: OptimizerAdapter, grads: Gradients, facts: Facts, loss_scale: tf.Tensor | None = None
) -> Measured | None:
    is_summed = adapter.sums_first or facts.distribution.num_summed == 1
    if facts.norm is WantedNorm.NO or (facts.norm is WantedNorm.WITHOUT_EXCHANGE and not is_summed):
        return None
    next_values = adapter.overwritten if len(grads) == len(adapter.variables) else ()
    return Measured([None if index in next_values else grad for index, grad in enumerate(grads)], loss_scale, is_summed)


def unscaled(adapter: OptimizerAdapter, grads: Gradients, loss_scale: tf.Tensor) -> list[Gradient]:
    """Unscale the gradients of a scaled loss, except those that are the next values of their variables."""
    in_true_magnitude = arithmetic.unscale(grads, loss_scale)
    return [grads[index] if index in adapter.overwritten else grad for index, grad in enumerate(in_true_magnitude)]


def _gradient_check(
    adapter: OptimizerAdapter, facts: Facts, scaling: Scaling, earlier: EarlierCheck | None = None
) -> GradientCheck:
    num_summed = 1 if adapter.sums_first else facts.distribution.num_summed
    of_micro_batches = earlier is not None and earlier.of_micro_batches
    return facts.gradient_check(scaling, num_summed, adapter.overwritten, of_micro_batches=of_micro_batches)
