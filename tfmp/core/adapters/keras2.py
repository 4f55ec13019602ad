"""The adapter for optimizers of Keras 2, which is a part of TensorFlow or the package tf_keras."""

import contextlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import tensorflow as tf

from tfmp.core.adapters.keras import KerasAdapter
from tfmp.core.updates import KerasProgram, OptimizerUpdate, is_foreign, view_of
from tfmp.types import Done, Gradients


class Keras2Adapter(KerasAdapter):
    """The adapter for an optimizer of Keras 2; the gradients are summed over the replicas before they are checked.

    Args:
        optimizer: The optimizer.
        variables: The variables that it trains, in the order of the gradients.
        kwargs: Keyword arguments for the optimizer's `apply_gradients`.
        update: Unscales gradients and applies them; None if the gradients are to be unscaled before they come here.
        sums_first: True if `reduce` shall sum the gradients over the replicas; False if the caller has summed them
            already. The attribute of this name is True in both cases.
        average: Averages gradients over Horovod's workers; None if they are averaged already.
        counts_skipped_steps: True if a skipped step also increments `iterations`, as in Keras' own
            `LossScaleOptimizer`.
    """

    def __init__(
        self,
        optimizer: Any,  # noqa: ANN401 - of either package
        variables: Iterable[Any],
        kwargs: Mapping[str, Any] | None = None,
        *,
        update: OptimizerUpdate | None = None,
        sums_first: bool = True,
        average: Callable[[Gradients], Gradients] | None = None,
        counts_skipped_steps: bool = False,
    ) -> None:
        super().__init__(optimizer, variables, kwargs, update=update)
        self.sums_first = True
        self._sums = sums_first
        self._average = average
        self._counts_skipped_steps = counts_skipped_steps

    def program(self, grads: Gradients) -> KerasProgram | None:
        """Return the program that unscales these gradients and applies them, if none of it is a user's."""
        # A user's own `aggregate_gradients` may do more than sum.
        return None if is_foreign(self.optimizer.aggregate_gradients) else super().program(grads)

    def reduce(self, grads: Gradients) -> Gradients:
        """Sum the gradients over the replicas, and average them over Horovod's workers, unless that is done already."""
        if self._sums:
            grads = [grad for grad, _ in self.optimizer.aggregate_gradients(self._pairs(grads))]
        return grads if self._average is None else self._average(grads)

    def _apply_by_itself(self, grads: Gradients) -> Done:
        # They are already summed over the replicas.
        with self._summing_nothing() as optimizer:
            optimizer.apply_gradients(self._pairs(grads), skip_gradients_aggregation=True, **self._kwargs)
        return tf.no_op()

    def _summing_nothing(self) -> contextlib.AbstractContextManager[Any]:
        """Return a context in which a user's `apply_gradients` may drop the argument that says what is summed."""
        if tf.distribute.has_strategy() and is_foreign(self.optimizer.apply_gradients):
            return view_of(self.optimizer, aggregate_gradients=list)
        return contextlib.nullcontext(self.optimizer)

    def on_step(self, applied: tf.Tensor) -> Done:
        """Increment the optimizer's `iterations` after a skipped step, if they are to count skipped steps."""
        if not self._counts_skipped_steps:
            return None
        iterations = self.optimizer.iterations
        return tf.group(iterations.assign_add(tf.cast(tf.logical_not(applied), iterations.dtype)))
