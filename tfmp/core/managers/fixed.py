"""The manager of a constant loss scale."""

import tensorflow as tf

from tfmp.core import settings
from tfmp.core.managers.base import LossScaleManager, Setting
from tfmp.core.storage.graph_variables import OncePerGraph


class FixedLossScaleManager(LossScaleManager):
    """A constant loss scale. Steps that overflow are still skipped.

    With a scale of 1 nothing is scaled, and the only effect is that steps with infinities or NaN are skipped. The
    attribute `loss_scale` can be read, and not be changed.

    Args:
        loss_scale: The scale, a finite number of at least 1.

    Raises:
        TypeError: The scale is not a number.
        ValueError: The scale is out of range.

    Examples:
        >>> float(FixedLossScaleManager(1024).get_loss_scale())
        1024.0

    Source: tf.contrib.mixed_precision, with its name and arguments.
    """

    loss_scale = Setting[float]()

    def __init__(self, loss_scale: float) -> None:
        super().__init__()
        self._loss_scale = float(settings.loss_scale("loss_scale", loss_scale))
        self._constant = OncePerGraph(lambda: tf.constant(self._loss_scale))
        self._constant.get()

    @property
    def lowest_loss_scale(self) -> float:
        """The loss scale itself, since it never changes."""
        return self._loss_scale

    def get_loss_scale(self) -> tf.Tensor:
        """Return the loss scale, a float32 scalar."""
        return self._constant.get()

    def update_loss_scale(self, finite_grads: tf.Tensor) -> tf.Operation:
        """Do nothing, because the scale is constant."""
        del finite_grads
        return tf.no_op()
