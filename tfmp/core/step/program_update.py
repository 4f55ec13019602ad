"""A step whose gradients a program of the optimizer unscales, clips and applies."""

import tensorflow as tf

from tfmp.core.adapters import OptimizerAdapter, Program
from tfmp.core.distribute import Distribution
from tfmp.core.overflow.gradient_check import GradientCheck
from tfmp.core.overflow.results import EarlierCheck
from tfmp.core.step.measured import Measured
from tfmp.core.step.update import CheckedUpdate
from tfmp.types import Done, Gradients


class ProgramUpdate(CheckedUpdate):
    """Unscales, clips and applies gradients by one program."""

    def __init__(
        self,
        adapter: OptimizerAdapter,
        program: Program,
        grads: Gradients,
        distribution: Distribution,
        check: GradientCheck,
        earlier: EarlierCheck | None = None,
        *,
        loss_scale: tf.Tensor | None = None,
        measured: Measured | None = None,
    ) -> None:
        super().__init__(
            adapter, grads, distribution, check, earlier, loss_scale=loss_scale, clips=program.clips, measured=measured
        )
        self._program = program

    def apply(self, held: Gradients) -> Done:
        """Run the program."""
        grads, norm, _ = self._parts(held)
        # In a program, dividing by 1 costs nothing.
        divisor = tf.ones([]) if self.loss_scale is None else self.loss_scale
        return self._program.run(grads, divisor, *(norm or [None]))
