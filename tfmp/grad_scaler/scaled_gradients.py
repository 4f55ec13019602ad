"""Optimizers that take scaled gradients, and unscale and skip by themselves."""

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import tensorflow as tf

from tfmp.core.adapters import OptimizerAdapter
from tfmp.types import Gradients, GradsAndVars


@runtime_checkable
class ScaledGradientsOptimizer(Protocol):
    """An optimizer that unscales and skips by itself; `GradScaler.step` then leaves both to it.

    For an optimizer that does so in one fused kernel. Whatever has the method is taken for one. Unless a graph prunes
    it, the gradients are still unscaled beside it, to be checked.

    Example:
        >>> class Fused:
        ...     def apply_scaled_gradients(self, grads_and_vars, loss_scale, finite):
        ...         for grad, variable in grads_and_vars:
        ...             variable.assign_sub(tf.where(finite, grad / loss_scale, 0.0))
        >>> isinstance(Fused(), ScaledGradientsOptimizer)
        True

    Source: the contract of torch.amp for custom optimizers (`_step_supports_amp_scaling`).
    """

    def apply_scaled_gradients(
        self, grads_and_vars: GradsAndVars, loss_scale: tf.Tensor, finite: tf.Tensor
    ) -> tf.Operation:
        """Apply gradients of a scaled loss, if they are finite.

        Called on every replica, at every step.

        Args:
            grads_and_vars: Pairs of a gradient and its variable; none of the gradients is None.
            loss_scale: What to divide the gradients by, a float32 scalar; 1 if they were unscaled before.
            finite: Whether they are finite on every replica, a boolean scalar. Where it is False, nothing may change.

        Returns:
            The op that does it; None in eager mode.
        """


class ScaledGradientsAdapter(OptimizerAdapter):
    """A `ScaledGradientsOptimizer`, which is called at every step and so does nothing in the conditional.

    Args:
        optimizer: The optimizer.
        variables: The variables, in the order of the gradients.
    """

    def apply(
        self, grads: Gradients, loss_scale: tf.Tensor | None = None, measures: Sequence[tf.Tensor] = ()
    ) -> tf.Operation:
        """Do nothing: the optimizer is called outside of the conditional."""
        del grads, loss_scale, measures
        return tf.no_op()

    def apply_scaled(self, grads: Gradients, loss_scale: tf.Tensor, finite: tf.Tensor) -> tf.Operation:
        """Let the optimizer apply gradients, or skip them.

        Args:
            grads: The gradients, as they were given to the step.
            loss_scale: What to divide them by.
            finite: A boolean scalar: are they finite on every replica?

        Returns:
            The op that does it; None in eager mode.
        """
        return self.optimizer.apply_scaled_gradients(self._without_none(grads), loss_scale, finite)
