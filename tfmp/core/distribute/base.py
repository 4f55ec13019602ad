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

    def mean(self, grads: Gradients, names: Sequence[str], dtype: tf.DType | None) -> list[Gradient]:
        """Return the mean of the gradients over the replicas, the same on each replica.

        If the optimizer sums gradients itself, return them unchanged. `names` are those of the variables, for errors.
        The gradients are sent in `dtype`; None means their own.
        """

    def agree(self, answers: Sequence[tf.Tensor], grads: Gradients, names: Sequence[str]) -> list[tf.Tensor]:
        """Return the largest of each answer over the replicas, the same on each replica, by one collective.

        An answer is a boolean scalar, which becomes True if it is on any replica, or a float32 scalar, which may be
        infinite or NaN. All replicas must have a gradient for the same variables; `names` are those of the variables,
        for errors.
        """

    def sums(self, grads: Gradients, names: Sequence[str]) -> list[Gradient]:
        """Return the sums of the gradients over the replicas, if an optimizer sums them when it applies them.

        Otherwise the gradients are the same on all replicas already, and are returned unchanged. `names` are as in
        `agree`.
        """

    def maximum(self, values: tf.Tensor, name: str) -> tf.Tensor:
        """Return, for each value, the largest over the replicas; the result is the same on each replica.

        No value may be NaN. No other tensor of the step may have this name, because Horovod distinguishes tensors by
        their names.
        """

    def total(self, values: tf.Tensor, name: str) -> tf.Tensor:
        """Return, for each value, the sum over the replicas; the result is the same on each replica.

        No other tensor of the step may have this name, because Horovod distinguishes tensors by their names.
        """

    def conditional_update(
        self, flag: tf.Tensor, grads: Gradients, if_true: ApplyGradients, if_false: ApplyGradients
    ) -> Done:
        """Call one of two functions on every replica; the replicas agree on `flag`, so all call the same one.

        The function gets the replica's gradients. Other tensors that it uses must be added to them if they differ
        between replicas. It may sum over replicas or call `once`.
        """

    def once(self, function: Callable[[], Returned]) -> Returned:
        """Call a function once for all replicas, such as one that changes shared variables; all get its result.

        The function must not use tensors that differ between replicas.
        """
