"""Averages gradients over Horovod's workers, for optimizers that do not average them themselves."""

import logging
from collections.abc import Sequence

import tensorflow as tf

from tfmp.core.distribute import Distribution
from tfmp.core.distribute.horovod_detection import running_horovod
from tfmp.core.gradients import arithmetic
from tfmp.core.managers import LossScaleManager
from tfmp.core.tracing import without_autograph
from tfmp.types import Gradient, Gradients

_logger = logging.getLogger("tfmp")


class WorkerAverage:
    """The mean of gradients over Horovod's workers, which send them in `dtype`; in their own dtypes if it is None.

    `is_distributed` is True if the user states that several processes train together.
    """

    def __init__(self, manager: LossScaleManager, is_distributed: bool, dtype: tf.DType | None = None) -> None:
        self._manager = manager
        self._is_distributed = is_distributed
        self._dtype = dtype
        self._has_warned = False

    @without_autograph
    def mean(
        self, grads: Gradients, names: Sequence[str], distribution: Distribution, *, are_scaled: bool = True
    ) -> list[Gradient]:
        """Return the mean of the gradients over Horovod's workers; without such workers, the gradients themselves.

        If a dtype is set, gradients are sent scaled, because small unscaled values would become 0 in half precision;
        `are_scaled` is True if they are those of a scaled loss. Errors show the `names` of the variables.
        """
        self.warn_if_missing()
        if are_scaled or self._dtype is None:
            return distribution.mean(grads, names, self._dtype)
        loss_scale = self._manager.get_loss_scale()
        scaled = [arithmetic.map_values(lambda values: arithmetic.scale(values, loss_scale), grad) for grad in grads]
        means = arithmetic.unscale(distribution.mean(scaled, names, self._dtype), loss_scale)
        return [
            mean if grad is None else arithmetic.cast(mean, grad.dtype) for mean, grad in zip(means, grads, strict=True)
        ]

    def warn_if_missing(self) -> None:
        """Warn, once, if Horovod runs several processes and the user did not state that they train together."""
        horovod = running_horovod()
        if self._is_distributed or self._has_warned or horovod is None or horovod.size() == 1:
            return
        # Eager code calls this at every step.
        self._has_warned = True
        _logger.warning(
            "Horovod runs %d processes, and nothing averages the gradients over them: pass is_distributed=True to "
            "tfmp.LossScaleOptimizer, or wrap the optimizer in hvd.DistributedOptimizer.",
            horovod.size(),
        )
