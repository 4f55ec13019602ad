"""The adapter for optimizers of Keras 3."""

import tensorflow as tf

from tfmp.core.adapters.keras import KerasAdapter
from tfmp.types import Gradients


class Keras3Adapter(KerasAdapter):
    """The adapter for an optimizer of Keras 3."""

    def _apply_unscaled(self, grads: Gradients) -> tf.Operation:
        self.optimizer.apply(list(grads), self.variables)
        return tf.no_op()
