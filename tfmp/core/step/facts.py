"""What decides, apart from the optimizer and its gradients, how a step runs."""

from collections.abc import Collection
from typing import NamedTuple

import tensorflow as tf

from tfmp.core.distribute import Distribution
from tfmp.core.overflow.detectors import NonFiniteDetector, OverflowDetector
from tfmp.core.overflow.gradient_check import GradientCheck, Scaling


class Facts(NamedTuple):
    """What decides how a step runs, whichever optimizer takes it; gathered once for each step.

    Attributes:
        distribution: How the replicas act together.
        loss_scale: The loss scale before the step, a float32 scalar.
        detector: Decides which gradients overflowed.
        needs_max_abs: True if the manager needs the largest magnitude of the gradients.
        lowest_loss_scale: The lowest scale that the manager chooses.
        records_ranges: True if a monitor looks at the ranges of the gradients.
    """

    distribution: Distribution
    loss_scale: tf.Tensor
    detector: OverflowDetector
    needs_max_abs: bool
    lowest_loss_scale: float
    records_ranges: bool

    @property
    def may_check_scaled(self) -> bool:
        """True if gradients may be checked before they are unscaled; see `Scaling.CHECK_SCALED`."""
        return self.detector.ignores_scale and self.lowest_loss_scale >= 1

    @property
    def needs_only_finiteness(self) -> bool:
        """True if nothing has to be known of the gradients of a replica but whether they are finite."""
        return type(self.detector) is NonFiniteDetector and not (self.needs_max_abs or self.records_ranges)

    def check(
        self,
        scaling: Scaling,
        num_summed: int,
        overwritten: Collection[int] = (),
        *,
        already_checked: bool = False,
    ) -> GradientCheck:
        """Return the check of one replica's gradients.

        Args:
            scaling: Whether the gradients are scaled, and whether they are unscaled for the check.
            num_summed: The number of replicas whose gradients are summed after the check.
            overwritten: Indices of gradients that are the next values of their variables.
            already_checked: True if these are the mean of micro-batches that the detector has checked one by one.
        """
        # A replica's part of a mean can be larger than any micro-batch. A detector that compares magnitudes with a
        # limit, as it has done for each micro-batch, could reject it wrongly.
        detector = NonFiniteDetector() if already_checked else self.detector
        return GradientCheck(detector, self.loss_scale, scaling, num_summed, overwritten, self.needs_max_abs)
