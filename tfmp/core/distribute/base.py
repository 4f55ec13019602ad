"""How the replicas of one step act as one: average gradients, agree on what was found, and change shared state."""

from collections.abc import Callable, Sequence
from typing import TypeVar

import tensorflow as tf

from tfmp.core.tracing import conditional_update
from tfmp.types import ChangeVariables, Done, Gradient, Gradients, Held

Returned = TypeVar("Returned")


class Distribution:
    """How the replicas of one step act together. Every method is called on each replica.

    The methods here are those of a replica that is alone. What they return is the same on each replica. Where an error
    names variables, `names` are theirs; a `name` is that of an exchange, and no other exchange of the step may have it,
    because Horovod distinguishes tensors by their names.
    """

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"

    @property
    def num_summed(self) -> int:
        """The number of replicas whose gradients an optimizer sums when it applies them, after the check."""
        return 1

    def mean(self, grads: Gradients, names: Sequence[str], dtype: tf.DType | None) -> list[Gradient]:
        """Return the mean of the gradients over the replicas; unchanged if the optimizer sums gradients itself.

        The gradients are sent in `dtype`; None means their own.
        """
        del names, dtype
        return list(grads)

    def agree(self, answers: Sequence[tf.Tensor], grads: Gradients, names: Sequence[str]) -> list[tf.Tensor]:
        """Return the largest of each answer over the replicas, by one exchange.

        An answer is a boolean scalar, which becomes True if it is on any replica, or a float32 scalar, which may be
        infinite or NaN. All replicas must have a gradient for the same variables.
        """
        del grads, names
        return list(answers)

    def sums(self, grads: Gradients, names: Sequence[str]) -> list[Gradient]:
        """Return the sums of the gradients over the replicas, if an optimizer sums them when it applies them.

        Otherwise the gradients are the same on all replicas already, and are returned unchanged.
        """
        del names
        return list(grads)

    def maximum(self, values: tf.Tensor, name: str) -> tf.Tensor:
        """Return, for each value, the largest over the replicas; no value may be NaN."""
        del name
        return values

    def total(self, values: tf.Tensor, name: str) -> tf.Tensor:
        """Return, for each value, the sum over the replicas."""
        del name
        return values

    def conditional_update(
        self, flag: tf.Tensor, held: Held, if_true: ChangeVariables, if_false: ChangeVariables
    ) -> Done:
        """Call one of two functions on every replica; the replicas agree on `flag`, so all call the same one.

        The function gets what its replica holds. It must use no other tensors that differ between replicas. It may sum
        over replicas or call `once`.
        """
        return conditional_update(flag, held, if_true, if_false)

    def once(self, function: Callable[[], Returned]) -> Returned:
        """Call a function once for all replicas, such as one that changes shared variables; all get its result.

        The function must not use tensors that differ between replicas.
        """
        return function()


class SingleProcess(Distribution):
    """A process that trains alone."""
