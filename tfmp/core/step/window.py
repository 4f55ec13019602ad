"""Steps with the mean of the micro-batches that an accumulator adds up in a window."""

import tensorflow as tf

from tfmp.core.accumulation.accumulator import GradientAccumulator
from tfmp.core.adapters import OptimizerAdapter
from tfmp.core.distribute import Distribution
from tfmp.core.overflow.results import EarlierCheck
from tfmp.core.step.choice import update_of_unscaled
from tfmp.core.step.facts import Facts
from tfmp.core.step.scaler import LossScaler
from tfmp.core.tracing import without_autograph
from tfmp.types import Done, Gradient, Gradients


@without_autograph
def accumulate(
    scaler: LossScaler, adapter: OptimizerAdapter, grads: Gradients, facts: Facts, accumulator: GradientAccumulator
) -> Done:
    """Add the unscaled gradients of a micro-batch, and run a step with the mean when the window ends."""
    distribution = facts.distribution
    added = accumulator.add_unscaled(grads, facts.loss_scale, keeps_max_abs=facts.needs_max_abs)
    # All replicas add the same number of micro-batches, those that overflowed included, so this flag is the same on all
    # of them without an exchange.
    with tf.control_dependencies([added]):
        is_full = accumulator.is_full

    def end_window(_: Gradients) -> Done:
        mean, earlier, emptied = drain(accumulator, distribution)
        return tf.group(scaler.step(update_of_unscaled(adapter, mean, facts, earlier)), emptied)

    return distribution.conditional_update(is_full, [], end_window, lambda _: tf.no_op())


@without_autograph
def drain(accumulator: GradientAccumulator, distribution: Distribution) -> tuple[list[Gradient], EarlierCheck, Done]:
    """Return this replica's part of the mean, the check of its micro-batches, and the op that empties the window."""
    return accumulator.drain(lambda values: distribution.total(values, "micro_batches"))
