"""Optimizers of Keras 2, as the core sees them, whichever package Keras 2 comes in."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from tfmp.core.adapters.base import OptimizerAdapter
from tfmp.types import Gradients


class Keras2Adapter(OptimizerAdapter):
    """An optimizer of Keras 2 or tf_keras, whose gradients are summed over the replicas before they are checked.

    Args:
        optimizer: The optimizer.
        variables: The variables, in the order of the gradients.
        kwargs: Keyword arguments for the optimizer's `apply_gradients`.
        sums_first: Whether `reduce` sums the gradients over the replicas. Otherwise they are summed already.
        counts_skipped_steps: Whether skipped steps move `iterations` too, as with Keras' own wrapper.
    """

    def __init__(
        self,
        optimizer: Any,  # noqa: ANN401 - of either package
        variables: Iterable[Any],
        kwargs: Mapping[str, Any] | None = None,
        *,
        sums_first: bool = True,
        counts_skipped_steps: bool = False,
    ) -> None:
        super().__init__(optimizer, variables, kwargs)
        self.sums_first = True
        self._sums = sums_first
        self._counts_skipped_steps = counts_skipped_steps

    def reduce(self, grads: Gradients) -> Gradients:
        """Sum gradients over the replicas."""
        if not self._sums:
            return grads
        return [grad for grad, _ in self.optimizer.aggregate_gradients(self._pairs(grads))]

    def apply(
        self, grads: Gradients, loss_scale: tf.Tensor | None = None, measures: Sequence[tf.Tensor] = ()
    ) -> tf.Operation:
        """Apply gradients that are summed already."""
        del loss_scale, measures
        self.optimizer.apply_gradients(self._pairs(grads), skip_gradients_aggregation=True, **self._kwargs)
        return tf.no_op()

    def on_step(self, applied: tf.Tensor) -> tf.Operation | None:
        """Count a skipped step, if the optimizer's `iterations` are to include those."""
        if not self._counts_skipped_steps:
            return None
        iterations = self.optimizer.iterations
        return tf.group(iterations.assign_add(tf.cast(tf.logical_not(applied), iterations.dtype)))
