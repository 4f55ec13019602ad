"""A step whose gradients are summed over the replicas before they are checked."""

import tensorflow as tf

from tfmp.core.adapters import OptimizerAdapter, ProgramOnSums
from tfmp.core.gradients import arithmetic
from tfmp.core.gradients.norms import large_norm_of_each
from tfmp.core.overflow.gradient_check import Scaling
from tfmp.core.overflow.results import LocalResult
from tfmp.core.step.facts import Facts, WantedNorm
from tfmp.core.step.measured import Measured
from tfmp.core.step.update import Update
from tfmp.types import Done, Gradient, Gradients


class SummedUpdate(Update):
    """Sums scaled gradients over the replicas, so that only the sums need to be checked, and applies the sums."""

    def __init__(self, adapter: OptimizerAdapter, program: ProgramOnSums, grads: Gradients, facts: Facts) -> None:
        self._program = program
        self._sums = program.sum(grads)
        is_measured = facts.norm is not WantedNorm.NO
        measured = Measured(self._sums, facts.loss_scale, is_summed=True) if is_measured else None
        super().__init__(adapter, grads, facts.distribution, facts.loss_scale, measured)
        # The rows of sparse gradients are not added up yet.
        is_sparse = any(map(arithmetic.is_sparse, self._sums))
        num_summed = facts.distribution.num_summed
        self._check_of_sums = facts.gradient_check(Scaling.CHECK_SCALED, num_summed if is_sparse else 1)
        self._check_of_grads = facts.gradient_check(Scaling.CHECK_SCALED, num_summed)

    def check(self) -> tuple[LocalResult, list[Gradient]]:
        """Check the sums, which are the same on all replicas; the replica holds the sums and its gradients."""
        usable = self.distribution.once(lambda: self._check_of_sums.all_finite(self._sums))
        return LocalResult(usable), [*self._sums, *self.grads]

    def apply(self, held: Gradients) -> Done:
        """Run the program of each replica."""
        return self._program.apply(held[: len(self._sums)], self.loss_scale)

    def norm_of_each(self, held: Gradients) -> tf.Tensor:
        """Return the norm of each sum."""
        return large_norm_of_each(held[: len(self._sums)])

    def counts(self, held: Gradients) -> tf.Tensor:
        """Count the values of this replica's gradients that overflowed, or could overflow in the sum."""
        return self._check_of_grads.counts(held[len(self._sums) :])
