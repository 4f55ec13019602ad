"""The programs by which some optimizers unscale gradients themselves, when they apply them."""

from collections.abc import Sequence
from typing import Protocol

import tensorflow as tf

from tfmp.types import Done, Gradients


class Program(Protocol):
    """Unscales the gradients of one replica, clips and applies them."""

    def measure(self, grads: Gradients, loss_scale: tf.Tensor) -> list[tf.Tensor]:
        """Compute numbers that `apply` needs, such as a norm, if that is cheaper next to the check of the gradients."""

    def apply(self, grads: Gradients, loss_scale: tf.Tensor, measures: Sequence[tf.Tensor]) -> Done:
        """Divide the gradients by the loss scale, clip and apply them; `measures` is what `measure` returned."""
