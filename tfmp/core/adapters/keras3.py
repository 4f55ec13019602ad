"""The adapter for optimizers of Keras 3."""

import tensorflow as tf

from tfmp.core.adapters.keras import KerasAdapter
from tfmp.core.updates import ProgramOfReplicas, apply_on_replicas
from tfmp.types import Done, Gradients


class Keras3Adapter(KerasAdapter):
    """The adapter for an optimizer of Keras 3, whose update is a program on each replica of a strategy, if possible.

    The arguments are those of `KerasAdapter`.
    """

    def program_on_sums(self, grads: Gradients) -> ProgramOfReplicas | None:
        """Return the program by which each replica unscales and applies the sums of these gradients."""
        if self._update is None or not self.can_unscale_late(grads):
            return None
        # Keras clips the gradients of each replica, before it sums them.
        optimizer = self.optimizer
        clips = any((optimizer.clipnorm, optimizer.clipvalue, optimizer.global_clipnorm))
        if clips or not self._update.compiles_on_replicas(grads, self.variables):
            return None
        return ProgramOfReplicas(optimizer, self.variables)

    def _apply_by_itself(self, grads: Gradients) -> Done:
        if self._update is not None and self._update.compiles_on_replicas(grads, self.variables):
            apply_on_replicas(self.optimizer, grads, self.variables)
        elif self._leaves_out_none:
            return super()._apply_by_itself(grads)
        elif self._method == "apply":
            self.optimizer.apply(list(grads), self.variables)
        else:
            self.optimizer.apply_gradients(self._pairs(grads))
        return tf.no_op()
