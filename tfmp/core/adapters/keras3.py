"""The adapter for optimizers of Keras 3."""

import tensorflow as tf

from tfmp.core.adapters.keras import KerasAdapter
from tfmp.core.updates import apply_on_replicas
from tfmp.types import Gradients


class Keras3Adapter(KerasAdapter):
    """The adapter for an optimizer of Keras 3."""

    def _apply_unscaled(self, grads: Gradients) -> tf.Operation:
        if self._update is not None and self._update.compiles_on_replicas(grads, self.variables):
            apply_on_replicas(self.optimizer, grads, self.variables)
        else:
            self.optimizer.apply(list(grads), self.variables)
        return tf.no_op()
