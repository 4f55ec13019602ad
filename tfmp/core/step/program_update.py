"""A step whose gradients a program of the optimizer unscales, clips and applies."""

from collections.abc import Sequence

import tensorflow as tf

from tfmp.core.adapters import OptimizerAdapter, Program
from tfmp.core.distribute import Distribution
from tfmp.core.gradients.derived_gradients import Change
from tfmp.core.overflow.gradient_check import GradientCheck
from tfmp.core.overflow.results import EarlierCheck
from tfmp.core.step.measured import Measured
from tfmp.core.step.update import CheckedUpdate
from tfmp.types import Done, Gradients


class ProgramUpdate(CheckedUpdate):
    """Unscales, clips and applies gradients by one program.

    `changes` holds for each gradient what the program clips the unscaled values by, or None; it is empty if no gradient
    is clipped. The check looks at gradients that are not clipped: `earlier` is not usable if clipping could make finite
    values infinite or NaN, or the reverse.
    """

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
        changes: Sequence[Change | None] = (),
        measured: Measured | None = None,
    ) -> None:
        # In a program, dividing by 1 costs nothing.
        divisor = tf.ones([]) if loss_scale is None else loss_scale
        # What is measured of scaled gradients says nothing about those that are changed later.
        measures = [] if changes else program.measure(grads, divisor)
        super().__init__(
            adapter, grads, distribution, check, earlier, loss_scale=loss_scale, measures=measures, measured=measured
        )
        self._program = program
        self._divisor = divisor
        self._changes = changes

    def apply(self, held: Gradients) -> Done:
        """Run the program."""
        grads, measures, _ = self._parts(held)
        return self._program.apply(grads, self._divisor, measures, self._changes)
