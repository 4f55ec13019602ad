"""What a step does on one replica: which values must be finite, and what is done if they are and if they are not."""

import abc

import tensorflow as tf

from tfmp.core.adapters import OptimizerAdapter
from tfmp.core.distribute import Distribution
from tfmp.core.gradients.norms import global_norm, large_norm_of_each
from tfmp.core.overflow.gradient_check import GradientCheck
from tfmp.core.overflow.results import EarlierCheck, LocalResult
from tfmp.core.step.measured import Measured
from tfmp.types import Done, Gradient, Gradients


class Update(abc.ABC):
    """One step of an optimizer on one replica.

    This is all that `LossScaler.run` knows of a step. There is a subclass for each way in which a step can run;
    `choice.py` chooses one. `loss_scale` is the number by which `grads` are still multiplied; None if they are in true
    magnitude. `measured` are the gradients whose norm is that of the step; None if nobody asks for it.

    `check` is called first, on every replica. A strategy then calls the other functions of the first replica's update
    for all replicas. So `check` also returns the tensors that these use and that may differ between replicas, and they
    get them back as their argument `held`.
    """

    def __init__(
        self,
        adapter: OptimizerAdapter,
        grads: Gradients,
        distribution: Distribution,
        loss_scale: tf.Tensor | None = None,
        measured: Measured | None = None,
    ) -> None:
        self.adapter = adapter
        self.grads = grads
        self.distribution = distribution
        self.loss_scale = loss_scale
        self.measured = measured

    @abc.abstractmethod
    def check(self) -> tuple[LocalResult, list[Gradient]]:
        """Check the values that must be finite before `apply`; return the result, and what the replica holds."""

    @abc.abstractmethod
    def apply(self, held: Gradients) -> Done:
        """Apply the gradients."""

    @abc.abstractmethod
    def counts(self, held: Gradients) -> tf.Tensor:
        """Count the values that overflowed, as `OverflowDetector.counts` does, if the step is skipped."""

    @abc.abstractmethod
    def norm_of_each(self, held: Gradients) -> tf.Tensor:
        """Return the norm of each gradient, a float64 vector, if all are finite; perhaps scaled and clipped."""

    def counts_if_finite(self, held: Gradients) -> tf.Tensor | None:
        """Count the values that overflowed although the gradients are finite; None if there can be none."""
        del held
        return None


class CheckedUpdate(Update):
    """A step for which this replica's own gradients must be finite.

    `earlier` is the result of an earlier check of gradients on this replica, if there was one. `clips` is True if
    `apply` uses the global norm besides the gradients.
    """

    def __init__(
        self,
        adapter: OptimizerAdapter,
        grads: Gradients,
        distribution: Distribution,
        check: GradientCheck,
        earlier: EarlierCheck | None = None,
        *,
        loss_scale: tf.Tensor | None = None,
        clips: bool = False,
        measured: Measured | None = None,
    ) -> None:
        super().__init__(adapter, grads, distribution, loss_scale, measured)
        self._check = check
        self._earlier = earlier
        self._clips = clips

    def check(self) -> tuple[LocalResult, list[Gradient]]:
        """Check the gradients; those that were checked before and did not change are not read again.

        The replica holds the gradients, perhaps their norm, and what tells `counts` which gradients it must read.
        """
        checked = self._check.checked_form(self.grads)
        result = self._check.of(checked, self._earlier)
        norm = [global_norm(self.grads, is_finite=result.usable)] if self._clips else []
        return result, [*self.grads, *norm, *self._check.squares(checked)]

    def counts(self, held: Gradients) -> tf.Tensor:
        """Count the values that overflowed."""
        grads, _, squares = self._parts(held)
        return self._check.counts(self._check.checked_form(grads), squares)

    def norm_of_each(self, held: Gradients) -> tf.Tensor:
        """Return the norm of each gradient."""
        return large_norm_of_each(self._parts(held)[0])

    def _parts(self, held: Gradients) -> tuple[Gradients, Gradients, Gradients]:
        norm, squares = len(self.grads), len(self.grads) + int(self._clips)
        return held[:norm], held[norm:squares], held[squares:]


class OptimizerUpdate(CheckedUpdate):
    """Applies gradients in true magnitude by the optimizer itself; this works with every optimizer."""

    def apply(self, held: Gradients) -> Done:
        """Call the optimizer."""
        return self.adapter.apply(self._parts(held)[0])
