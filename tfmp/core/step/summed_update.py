"""A step whose gradients are summed over the replicas before they are checked."""

import itertools

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
        # Overflows are counted in the gradients that the optimizer would check without this program.
        counted = self._sums if adapter.sums_first else grads
        super().__init__(adapter, counted, facts.distribution, facts.loss_scale, measured)
        # The rows of sparse gradients are not added up yet.
        is_sparse = any(map(arithmetic.is_sparse, self._sums))
        num_summed = facts.distribution.num_summed
        self._check_of_sums = facts.gradient_check(Scaling.CHECK_SCALED, num_summed if is_sparse else 1)
        self._check_of_counted = (
            self._check_of_sums if adapter.sums_first else facts.gradient_check(Scaling.CHECK_SCALED, num_summed)
        )

    def check(self) -> tuple[LocalResult, list[Gradient]]:
        """Check the sums, which are the same on all replicas; the replica holds them, and what is counted."""

        def check_and_measure() -> tuple[tf.Tensor, list[tf.Tensor], list[tf.Tensor]]:
            squares = self._check_of_sums.squares(self._sums) if self._sums_tell_suspects else []
            return self._check_of_sums.all_finite(self._sums), squares, self._program.measure(self._sums)

        usable, squares, measures = self.distribution.once(check_and_measure)
        self._num_squares = len(squares)
        return LocalResult(usable), [*self._sums, *self.grads, *squares, *measures]

    @property
    def _sums_tell_suspects(self) -> bool:
        """True if the squares of the sums tell in which gradients no value can have overflowed."""
        return self.grads is self._sums or all(map(_is_read_alike, self.grads, self._sums))

    def apply(self, held: Gradients) -> Done:
        """Run the program of each replica."""
        sums, _, _, measures = self._parts(held)
        return self._program.apply(sums, self.loss_scale, measures)

    def norm_of_each(self, held: Gradients) -> tf.Tensor:
        """Return the norm of each sum."""
        return large_norm_of_each(self._parts(held)[0])

    def counts(self, held: Gradients) -> tf.Tensor:
        """Count the values of what is counted that overflowed, or could overflow in the sum over the replicas."""
        _, counted, squares, _ = self._parts(held)
        return self._check_of_counted.counts(counted, squares)

    def _parts(self, held: Gradients) -> list[Gradients]:
        bounds = itertools.accumulate([0, len(self._sums), len(self.grads), self._num_squares])
        return [held[start:end] for start, end in itertools.pairwise([*bounds, len(held)])]


def _is_read_alike(grad: Gradient, total: Gradient) -> bool:
    """Return whether a gradient is read in the same parts as its sum, which may be wider or have more rows."""
    if grad is None or total is None:
        return True
    return grad.dtype == total.dtype and not arithmetic.is_sparse(grad)
