"""The adapter for optimizers of Keras 3."""

from collections.abc import Iterable, Sequence
from typing import Any

import tensorflow as tf

from tfmp.core.adapters.base import OptimizerAdapter
from tfmp.core.updates import OptimizerUpdate
from tfmp.types import Gradient, Gradients


class Keras3Adapter(OptimizerAdapter):
    """The adapter for an optimizer of Keras 3, which unscales gradients in the program that applies them, if it can.

    Args:
        optimizer: The optimizer.
        variables: The variables that it trains, in the order of the gradients.
        update: Unscales gradients and applies them by the optimizer, in one program.
    """

    def __init__(self, optimizer: Any, variables: Iterable[Any], update: OptimizerUpdate) -> None:  # noqa: ANN401
        super().__init__(optimizer, variables)
        self._update = update

    def unscales(self, grads: Gradients) -> bool:
        """Return True if `apply` can unscale these gradients itself.

        Under a `tf.distribute` strategy this is False: the check needs unscaled gradients there, to find out whether
        their sum over the replicas could overflow. It is also False if a variable has float8 scales: their next values,
        which come as "gradients", must not be divided by the loss scale.
        """
        if self.overwritten or tf.distribute.has_strategy():
            return False
        return all(map(_can_be_unscaled_late, grads, self.dtypes))

    def measure(self, grads: Gradients, loss_scale: tf.Tensor | None) -> list[tf.Tensor]:
        """Compute what the update needs; nothing for gradients that are unscaled already."""
        return [] if loss_scale is None else self._update.measure(grads, self.variables, loss_scale)

    def apply(
        self, grads: Gradients, loss_scale: tf.Tensor | None = None, measures: Sequence[tf.Tensor] = ()
    ) -> tf.Operation:
        """Apply the gradients of one replica: by the update if they are scaled, otherwise by the optimizer itself."""
        if loss_scale is None:
            self.optimizer.apply(list(grads), self.variables)
        else:
            self._update.apply(grads, self.variables, loss_scale, measures)
        return tf.no_op()


def _can_be_unscaled_late(grad: Gradient, dtype: tf.DType | None) -> bool:
    """Return True if a finite scaled gradient stays finite when it is unscaled and cast to the dtype of `dtypes`."""
    return dtype == tf.float64 or (dtype in {tf.float32, None} and (grad is None or grad.dtype != tf.float64))
