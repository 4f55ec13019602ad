"""How the core works with Keras' legacy optimizers, those of `keras.optimizers.legacy`."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from tfmp.core.adapter import OptimizerAdapter
from tfmp.types import Done, Gradients


class LegacyAdapter(OptimizerAdapter):
    """The adapter for a legacy optimizer, which sums the gradients over the replicas when it applies them.

    A user's class may change gradients before it sums them, for example clip them, so the optimizer itself must sum.

    Args:
        optimizer: The optimizer.
        variables: The variables that it trains, in the order of the gradients.
        kwargs: Keyword arguments for the optimizer's `apply_gradients`.
        is_summed: True if the gradients are summed over the replicas already.
        average: Averages gradients over Horovod's workers; None if they are averaged already.
        counts_skipped_steps: True if a skipped step also increments `iterations`, as in Keras' own wrapper.
    """

    def __init__(
        self,
        optimizer: Any,  # noqa: ANN401 - of either package
        variables: Iterable[Any],
        kwargs: Mapping[str, Any] | None = None,
        *,
        is_summed: bool = False,
        average: Callable[[Gradients], Gradients] | None = None,
        counts_skipped_steps: bool = False,
    ) -> None:
        # Not every class of a user's own has this argument, whose default is True.
        summed = {"experimental_aggregate_gradients": False} if is_summed else {}
        super().__init__(optimizer, variables, {**(kwargs or {}), **summed})
        self.sums_first = is_summed
        self._average = average
        self._counts_skipped_steps = counts_skipped_steps

    def prepare(self, variables: Sequence[Any]) -> None:
        """Make `iterations`, the hyperparameters and the slots."""
        # A private method, but the one that `apply_gradients` calls for it, and the wrappers of Addons extend. It is
        # called in the same name scope as there, because a `Saver` finds variables by their names.
        with tf.name_scope(self.optimizer._name), tf.init_scope():
            self.optimizer._create_all_weights(variables)

    def reduce(self, grads: Gradients) -> Gradients:
        """Average the gradients over Horovod's workers, unless that is done already."""
        return grads if self._average is None else self._average(grads)

    def on_step(self, applied: tf.Tensor) -> Done:
        """Increment `iterations` after a skipped step, if they are to count skipped steps."""
        if not self._counts_skipped_steps:
            return None
        iterations = self.optimizer.iterations
        return tf.group(iterations.assign_add(tf.cast(tf.logical_not(applied), iterations.dtype)))
