"""A step with the mean of micro-batches, some of which may have overflowed."""

import tensorflow as tf

from tfmp.core.overflow.results import LocalResult
from tfmp.core.step.update import Update
from tfmp.types import Done, Gradient, Gradients


class WindowUpdate(Update):
    """Runs the update of a mean, and adds the overflows that were counted in its micro-batches to those of the step.

    The step can be applied although some micro-batches overflowed: they are then left out of the mean.
    """

    def __init__(self, of_mean: Update, overflow_counts: tf.Tensor) -> None:
        super().__init__(of_mean.adapter, of_mean.grads, of_mean.distribution, of_mean.loss_scale, of_mean.measured)
        self._of_mean = of_mean
        self._overflow_counts = overflow_counts

    def check(self) -> tuple[LocalResult, list[Gradient]]:
        """Check the mean; the replica also holds the counts of its micro-batches."""
        result, held = self._of_mean.check()
        return result, [*held, self._overflow_counts]

    def apply(self, held: Gradients) -> Done:
        """Apply the mean."""
        return self._of_mean.apply(held[:-1])

    def counts(self, held: Gradients) -> tf.Tensor:
        """Count the values that overflowed in the mean and in its micro-batches."""
        return tf.add_n([self._of_mean.counts(held[:-1]), held[-1]])

    def norm_of_each(self, held: Gradients) -> tf.Tensor:
        """Return the norm of each gradient of the mean."""
        return self._of_mean.norm_of_each(held[:-1])

    def counts_if_finite(self, held: Gradients) -> tf.Tensor:
        """Count the values that overflowed in micro-batches."""
        return held[-1]
