"""The interface through which replicas act as one: average gradients, agree on a result, and change shared state."""

from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

import tensorflow as tf

from tfmp.types import ApplyGradients, Done, Gradient, Gradients

Returned = TypeVar("Returned")


class Distribution(Protocol):
    """How the replicas of one step act together. Every method is called on each replica."""

    @property
    def num_summed(self) -> int:
        """The number of replicas whose gradients an optimizer sums when it applies them, after the check."""

    @property
    def can_sum_first(self) -> bool:
        """True if the gradients may be summed over the replicas before the replicas agree on a result."""

    def mean(self, grads: Gradients, names: Sequence[str], dtype: tf.DType | None) -> list[Gradient]:
        """Return the mean of the gradients over the replicas, unless the optimizer sums them itself.

        Args:
            grads: The replica's gradients of a scaled loss.
            names: The names of their variables, for errors.
            dtype: The dtype in which the gradients are sent; by default their own.

        Returns:
            The means, the same on each replica; or the gradients unchanged, if the optimizer sums them itself.
        """

    def agree(
        self, usable: tf.Tensor, max_abs: tf.Tensor | None, grads: Gradients, names: Sequence[str]
    ) -> tuple[tf.Tensor, tf.Tensor | None]:
        """Combine the replicas' results of the check, by one collective.

        Args:
            usable: A boolean scalar: may this replica's gradients be applied?
            max_abs: The largest magnitude of this replica's gradients, a float32 scalar; None if it is not needed.
            grads: This replica's gradients. All replicas must have a gradient for the same variables.
            names: The names of their variables, for errors.

        Returns:
            Two values that are the same on each replica. The first is True if the gradients of every replica may be
            applied. The second is the largest magnitude on any replica, or None if it is not needed; it may be infinite
            or NaN if some gradients are not finite.
        """

    def maximum(self, values: tf.Tensor, name: str) -> tf.Tensor:
        """Return, for each value, the largest over the replicas; the result is the same on each replica.

        Args:
            values: The replica's values, of any shape; none of them may be NaN.
            name: A name that no other tensor of the step has, because Horovod distinguishes tensors by their names.
        """

    def total(self, values: tf.Tensor, name: str) -> tf.Tensor:
        """Return, for each value, the sum over the replicas; the result is the same on each replica.

        Args:
            values: The replica's values, of any shape.
            name: A name that no other tensor of the step has, because Horovod distinguishes tensors by their names.
        """

    def conditional_update(
        self, flag: tf.Tensor, grads: Gradients, if_true: ApplyGradients, if_false: ApplyGradients
    ) -> Done:
        """Call one of two functions on every replica; all replicas call the same one.

        Args:
            flag: A boolean scalar on which all replicas agree.
            grads: The replica's gradients. Other tensors that the functions use must be added to this list if they
                differ between replicas.
            if_true: Called with these tensors if the flag is True. It may sum over replicas or call `once`.
            if_false: Called with these tensors if the flag is False. It may do the same.
        """

    def once(self, function: Callable[[], Returned]) -> Returned:
        """Call a function once for all replicas, such as one that changes variables that they share.

        Args:
            function: The function. It must not use tensors that differ between replicas.

        Returns:
            What the function returns, the same on each replica.
        """
