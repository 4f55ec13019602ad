"""What decides how a step runs, apart from the optimizer and its gradients."""

import enum
from collections.abc import Collection
from typing import NamedTuple

import tensorflow as tf

from tfmp.core.distribute import Distribution
from tfmp.core.overflow.detectors import NonFiniteDetector, OverflowDetector
from tfmp.core.overflow.gradient_check import GradientCheck, Scaling


class WantedNorm(enum.Enum):
    """Whether somebody wants to know the norm of the gradients of a step."""

    #: Nobody asks.
    NO = enum.auto()
    #: Somebody may fetch it from the graph that is being built, but not on all workers. So no worker may have to wait
    #: for the others to compute it.
    WITHOUT_EXCHANGE = enum.auto()
    #: Each step computes it.
    YES = enum.auto()


class Facts(NamedTuple):
    """What decides how a step runs, with any optimizer; gathered once for each step."""

    distribution: Distribution
    #: The loss scale before the step, a float32 scalar.
    loss_scale: tf.Tensor
    detector: OverflowDetector
    #: True if the manager needs the largest magnitude of the gradients.
    needs_max_abs: bool
    #: The lowest scale that the manager chooses.
    lowest_loss_scale: float
    #: Whether somebody wants to know the norm of the gradients.
    norm: WantedNorm

    @property
    def may_check_scaled(self) -> bool:
        """True if gradients may be checked before they are unscaled; see `Scaling.CHECK_SCALED`."""
        return self.detector.ignores_scale and self.lowest_loss_scale >= 1

    def gradient_check(
        self,
        scaling: Scaling,
        num_summed: int,
        overwritten: Collection[int] = (),
        *,
        of_micro_batches: bool = False,
    ) -> GradientCheck:
        """Return the check of one replica's gradients; for the arguments see `GradientCheck` and `EarlierCheck`."""
        # A replica's part of a mean can be larger than any micro-batch. A detector that compares magnitudes with a
        # limit, as it has done for each micro-batch, could reject it wrongly.
        detector = NonFiniteDetector() if of_micro_batches else self.detector
        return GradientCheck(detector, self.loss_scale, scaling, num_summed, overwritten, self.needs_max_abs)
