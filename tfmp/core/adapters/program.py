"""The programs by which some optimizers unscale gradients themselves, when they apply them."""

from typing import Protocol

import tensorflow as tf

from tfmp.types import Done, Gradients


class Program(Protocol):
    """Unscales the gradients of one replica, clips and applies them."""

    @property
    def clips(self) -> bool:
        """True if it clips by the global norm of the gradients, which `run` then needs."""

    def run(self, grads: Gradients, loss_scale: tf.Tensor, norm: tf.Tensor | None) -> Done:
        """Divide gradients by the loss scale, clip and apply them.

        `norm` is their global norm before they are divided, in float64. Without it the optimizer itself clips.
        """
