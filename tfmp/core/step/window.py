"""A step with the mean of several micro-batches."""

import tensorflow as tf

from tfmp.core.accumulation.accumulator import GradientAccumulator
from tfmp.core.adapters import OptimizerAdapter
from tfmp.core.distribute import Distribution
from tfmp.core.overflow.local_check import LocalCheck
from tfmp.core.step.choice import update_of_unscaled
from tfmp.core.step.facts import Facts
from tfmp.core.step.scaler import LossScaler
from tfmp.core.tracing import without_autograph
from tfmp.types import Done, Gradient, Gradients


@without_autograph
def accumulate(
    scaler: LossScaler, adapter: OptimizerAdapter, grads: Gradients, facts: Facts, accumulator: GradientAccumulator
) -> Done:
    """Add the gradients of a micro-batch, and run a step with their mean when the window ends.

    Args:
        scaler: Runs the step.
        adapter: The optimizer and its variables.
        grads: The gradients of the micro-batch on this replica, unscaled.
        facts: What the step must know of its gradients.
        accumulator: Stores the sums of the gradients.
    """
    distribution = facts.distribution
    added = accumulator.add_unscaled(grads, facts.loss_scale, keeps_max_abs=facts.needs_max_abs)
    # All replicas add the same number of micro-batches, those that overflowed included, so this flag is the same on all
    # of them without an exchange.
    with tf.control_dependencies([added]):
        is_full = accumulator.is_full

    def end_window(_: Gradients) -> Done:
        mean, known = drain(accumulator, distribution)
        return scaler.step(update_of_unscaled(adapter, mean, facts, known))

    return distribution.conditional_update(is_full, [], end_window, lambda _: tf.no_op())


@without_autograph
def drain(accumulator: GradientAccumulator, distribution: Distribution) -> tuple[list[Gradient], LocalCheck]:
    """Empty an accumulator; return this replica's part of the mean and the result of checking its micro-batches.

    Args:
        accumulator: The accumulator, whose window is at its end.
        distribution: How the replicas act together.
    """
    return accumulator.drain(lambda values: distribution.total(values, "micro_batches"))
