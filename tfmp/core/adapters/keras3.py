"""The adapter for optimizers of Keras 3."""

import tensorflow as tf

from tfmp.core.adapters.keras import KerasAdapter
from tfmp.core.gradients import arithmetic
from tfmp.core.updates import apply_on_replicas, apply_sums, sum_over_replicas
from tfmp.types import Gradients


class Keras3Adapter(KerasAdapter):
    """The adapter for an optimizer of Keras 3, whose update is a program on each replica of a strategy, if possible.

    The arguments are those of `KerasAdapter`.
    """

    def can_sum_first(self, grads: Gradients) -> bool:
        """Return True if a program on each replica can unscale and apply the sums of these gradients."""
        if self._update is None or not self.can_unscale_late(grads):
            return False
        # Keras clips the gradients of each replica, before it sums them.
        optimizer = self.optimizer
        clips = any((optimizer.clipnorm, optimizer.clipvalue, optimizer.global_clipnorm))
        return not clips and self._update.compiles_on_replicas(grads, self.variables)

    def sum(self, grads: Gradients) -> Gradients:
        """Return the sums of the gradients over the replicas."""
        # A sum of scaled gradients could overflow in half precision.
        return sum_over_replicas([arithmetic.map_values(arithmetic.widen, grad) for grad in grads], self.variables)

    def apply_sums(self, sums: Gradients, loss_scale: tf.Tensor | None) -> tf.Operation:
        """Apply the sums."""
        apply_sums(self.optimizer, sums, self.variables, loss_scale)
        return tf.no_op()

    def _apply_unscaled(self, grads: Gradients) -> tf.Operation:
        if self._update is not None and self._update.compiles_on_replicas(grads, self.variables):
            apply_on_replicas(self.optimizer, grads, self.variables)
        elif self._leaves_out_none:
            return super()._apply_unscaled(grads)
        elif self._method == "apply":
            self.optimizer.apply(list(grads), self.variables)
        else:
            self.optimizer.apply_gradients(self._pairs(grads))
        return tf.no_op()
