"""Optimizers of Keras 3, as the core sees them."""

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import tensorflow as tf

from tfmp.core.adapters.base import OptimizerAdapter
from tfmp.types import Gradient, Gradients


class Update(Protocol):
    """Unscales gradients and applies them in one program."""

    def measure(self, grads: Gradients, variables: Sequence[Any], loss_scale: tf.Tensor) -> list[tf.Tensor]:
        """Return what `apply` needs to know of the gradients, as `OptimizerAdapter.measure` does."""

    def apply(
        self, grads: Gradients, variables: Sequence[Any], loss_scale: tf.Tensor, measures: Sequence[tf.Tensor]
    ) -> None:
        """Divide the gradients by the loss scale and apply them."""


class Keras3Adapter(OptimizerAdapter):
    """An optimizer of Keras 3, which unscales gradients where it applies them if it can.

    Args:
        optimizer: The optimizer.
        variables: The variables, in the order of the gradients.
        update: Unscales and applies gradients in one program.
    """

    def __init__(self, optimizer: Any, variables: Iterable[Any], update: Update) -> None:  # noqa: ANN401
        super().__init__(optimizer, variables)
        self._update = update

    def unscales(self, grads: Gradients) -> bool:
        """Tell whether `apply` can unscale these gradients itself.

        Not on the replicas of a strategy, which must know whether true gradients overflow in their sum.
        """
        if self.overwritten or tf.distribute.has_strategy():
            return False
        return all(map(_can_be_unscaled_late, grads, self.variables))

    def measure(self, grads: Gradients, loss_scale: tf.Tensor | None) -> list[tf.Tensor]:
        """Return what the update needs to know of scaled gradients."""
        return [] if loss_scale is None else self._update.measure(grads, self.variables, loss_scale)

    def apply(
        self, grads: Gradients, loss_scale: tf.Tensor | None = None, measures: Sequence[tf.Tensor] = ()
    ) -> tf.Operation:
        """Apply the gradients of one replica; scaled ones by the update."""
        if loss_scale is None:
            self.optimizer.apply(list(grads), self.variables)
        else:
            self._update.apply(grads, self.variables, loss_scale, measures)
        return tf.no_op()


def _can_be_unscaled_late(grad: Gradient, variable: Any) -> bool:  # noqa: ANN401 - of Keras or TensorFlow
    """Tell whether a finite scaled gradient stays finite when it is unscaled and cast to the variable's type."""
    dtype = tf.as_dtype(variable.dtype)
    return dtype == tf.float64 or (dtype == tf.float32 and (grad is None or grad.dtype != tf.float64))
