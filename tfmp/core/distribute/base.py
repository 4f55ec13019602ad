"""What it takes for many replicas to act as one: share gradients, agree on a flag, act on it, act once."""

from collections.abc import Callable, Sequence
from typing import Protocol

import tensorflow as tf

from tfmp.types import ApplyGradients, Gradient, Gradients


class Distribution(Protocol):
    """How the replicas of one step act together. Every method is called on each replica."""

    @property
    def addends(self) -> int:
        """How many replicas' gradients an optimizer sums when it applies them, after they were checked."""

    def mean(self, grads: Gradients, names: Sequence[str], dtype: tf.DType | None) -> list[Gradient]:
        """Return the mean of the gradients over the replicas, for an optimizer that nobody makes do so.

        Args:
            grads: The replica's gradients of a scaled loss.
            names: The names of their variables, for errors.
            dtype: The type that they travel in; by default their own.

        Returns:
            The means, the same on each replica; the gradients themselves where the optimizer sums them.
        """

    def all_true(self, flag: tf.Tensor, grads: Gradients, names: Sequence[str]) -> tf.Tensor:
        """Return whether the flag is true on every replica, the same answer on each.

        Args:
            flag: A boolean scalar.
            grads: The replica's gradients; all replicas must have the same.
            names: The names of their variables, for errors.
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

    def call_either(
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
