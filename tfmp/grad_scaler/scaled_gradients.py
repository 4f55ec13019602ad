"""The protocol of optimizers that take scaled gradients and unscale them themselves, and the adapter for them."""

from typing import Protocol, runtime_checkable

import tensorflow as tf

from tfmp.core.adapter import OptimizerAdapter
from tfmp.types import Done, Gradients, GradsAndVars


@runtime_checkable
class ScaledGradientsOptimizer(Protocol):
    """A protocol for optimizers that unscale gradients and skip steps themselves, for example in one fused kernel.

    `GradScaler.step` calls `apply_scaled_gradients` of such an optimizer at every step and leaves unscaling and
    skipping to it. Any object with this method qualifies; it need not inherit from this class. The scaler also unscales
    the gradients to check them; this is a copy that the optimizer does not see.

    Examples:
        >>> class Fused:
        ...     def apply_scaled_gradients(self, grads_and_vars, loss_scale, finite):
        ...         for grad, variable in grads_and_vars:
        ...             variable.assign_sub(tf.where(finite, grad / loss_scale, 0.0))
        >>> isinstance(Fused(), ScaledGradientsOptimizer)
        True

    Source: the contract of torch.amp for custom optimizers (`_step_supports_amp_scaling`).

    Provisional: a minor version may change it.
    """

    def apply_scaled_gradients(
        self, grads_and_vars: GradsAndVars, loss_scale: tf.Tensor, finite: tf.Tensor
    ) -> tf.Operation:
        """Divide gradients by the loss scale and apply them if they are finite; otherwise change nothing.

        `GradScaler` calls this method on every replica, at every step.

        Args:
            grads_and_vars: Pairs of a gradient and its variable; no gradient is None.
            loss_scale: The number by which to divide the gradients, a float32 scalar; 1 if `GradScaler.unscale` has
                unscaled them already, or if scaling is not enabled.
            finite: A boolean scalar, True if the gradients are finite on every replica, and the step is not skipped as
                a spike. If it is False, no variable may change.

        Returns:
            The op that does this; None in eager mode.
        """


class ScaledGradientsAdapter(OptimizerAdapter):
    """The adapter for a `ScaledGradientsOptimizer`.

    Such an optimizer is called at every step, so it is called outside of the conditional that applies or skips a step.
    """

    def apply(self, grads: Gradients) -> Done:
        """Do nothing: `apply_scaled` calls the optimizer, outside of the conditional."""
        del grads
        return tf.no_op()

    def apply_scaled(self, grads: Gradients, loss_scale: tf.Tensor, finite: tf.Tensor) -> tf.Operation:
        """Call the optimizer, which applies the gradients that were passed to the step, or skips them."""
        return self.optimizer.apply_scaled_gradients(self._pairs(grads), loss_scale, finite)
