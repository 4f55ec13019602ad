"""What it takes for many replicas to act as one: share gradients, agree on a flag, act on it, act once."""

from collections.abc import Callable, Sequence
from typing import Protocol

import tensorflow as tf

from tfmp.types import ApplyGradients, Gradient, Gradients


class Distribution(Protocol):
    """How the replicas of one step act together. Every method is called on each replica."""

    @property
    def num_summed(self) -> int:
        """How many replicas' gradients an optimizer sums when it applies them, after the check."""

    def mean(self, grads: Gradients, names: Sequence[str], dtype: tf.DType | None) -> list[Gradient]:
        """Return the mean of the gradients over the replicas, for an optimizer that nobody makes do so.

        Args:
            grads: The replica's gradients of a scaled loss.
            names: The names of their variables, for errors.
            dtype: The type that they travel in; by default their own.

        Returns:
            The means, the same on each replica; the gradients themselves where the optimizer sums them.
        """

    def agree(
        self, usable: tf.Tensor, max_abs: tf.Tensor | None, grads: Gradients, names: Sequence[str]
    ) -> tuple[tf.Tensor, tf.Tensor | None]:
        """Find what holds for all replicas, by one collective.

        Args:
            usable: Whether this replica's gradients may be applied, a boolean scalar.
            max_abs: The largest magnitude of this replica's gradients, a float32 scalar; None if nothing asks for it.
            grads: This replica's gradients. All replicas must have a gradient for the same variables.
            names: The names of their variables, for errors.

        Returns:
            Whether the gradients of every replica may be applied, and the largest magnitude of them all; the same on
            each replica. If some gradients are not finite the magnitude may be infinite or NaN.
        """

    def maximum(self, values: tf.Tensor, name: str) -> tf.Tensor:
        """Return the largest of the replicas' values, the same on each; NaN is not to be among them.

        Args:
            values: The replica's values, of any shape: one comes out for each of them.
            name: What they are, a different name for each use in a step: Horovod tells tensors apart by that.
        """

    def total(self, values: tf.Tensor, name: str) -> tf.Tensor:
        """Return the sum of the replicas' values, the same on each.

        Args:
            values: The replica's values, of any shape: one comes out for each of them.
            name: What they are, as for `maximum`.
        """

    def conditional_update(
        self, flag: tf.Tensor, grads: Gradients, if_true: ApplyGradients, if_false: ApplyGradients
    ) -> tf.Operation:
        """Call one of two functions on every replica, the same on each.

        Args:
            flag: A boolean scalar on which all replicas agree.
            grads: The replica's gradients, which are what may differ between replicas.
            if_true: Called with them where the flag is true; may reduce across replicas, or call `once`.
            if_false: Called with them where it is false; the same holds.

        Returns:
            The op that does so; None in eager mode.
        """

    def once(self, function: Callable[[], tf.Operation]) -> tf.Operation:
        """Call a function that changes what all replicas share, once for all of them.

        Args:
            function: Changes variables; must not need anything that differs between replicas.

        Returns:
            The op that does so; None in eager mode.
        """
