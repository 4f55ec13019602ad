"""How the replicas of one step act as one: average gradients, agree on what was found, and change shared state."""

from collections.abc import Callable, Sequence
from typing import TypeVar

import tensorflow as tf

from tfmp.core.gradients import arithmetic
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

    def total(self, values: tf.Tensor, name: str) -> tf.Tensor:
        """Return, for each value, the sum over the replicas."""
        del name
        return values

    def maximum(self, values: tf.Tensor, name: str) -> tf.Tensor:
        """Return, for each value, the largest over the replicas; no value may be NaN."""
        del name
        return values

    def agree(self, answers: Sequence[tf.Tensor], grads: Gradients, names: Sequence[str]) -> list[tf.Tensor]:
        """Return the largest of each answer over the replicas, by one exchange.

        An answer is a boolean scalar, which becomes True if it is on any replica, or a float32 scalar, which may be
        infinite or NaN. All replicas must have a gradient for the same variables.
        """
        del grads, names
        return list(answers)

    def mean(self, grads: Gradients, names: Sequence[str], dtype: tf.DType | None) -> list[Gradient]:
        """Return the mean of the gradients, sent in `dtype` or in their own; unchanged if the optimizer sums them."""
        del names, dtype
        return list(grads)

    def sums(self, grads: Gradients, names: Sequence[str]) -> list[Gradient]:
        """Return the sums of the gradients over the replicas; unchanged if they are the same on all already."""
        del names
        return list(grads)

    def conditional_update(
        self, flag: tf.Tensor, held: Held, if_true: ChangeVariables, if_false: ChangeVariables
    ) -> Done:
        """Call one of two functions on every replica; the replicas agree on `flag`, so all call the same one.

        The function gets what its replica holds. It must use no other tensors that differ between replicas. It may sum
        over replicas or call `once`.
        """
        return conditional_update(flag, held, if_true, if_false)

    def once(self, function: Callable[[], Returned]) -> Returned:
        """Call a function once for all replicas; all get its result. It uses no tensors that differ between them."""
        return function()


class SingleProcess(Distribution):
    """A process that trains alone."""


class SeveralReplicas(Distribution):
    """Replicas whose only exchange is `total`, because every kind of distribution can sum."""

    def place(self) -> tuple[int | tf.Tensor, int]:
        """Return the number of this replica, from 0, and how many replicas there are."""
        raise NotImplementedError

    def maximum(self, values: tf.Tensor, name: str) -> tf.Tensor:
        """Return the largest by the sum of tables with a row for each replica, of which each one fills its own."""
        replica, replicas = self.place()
        # The values are selected and not multiplied by 0 or 1: infinity times 0 is NaN.
        is_own = tf.reshape(tf.equal(tf.range(replicas), replica), [replicas] + [1] * values.shape.rank)
        return tf.reduce_max(self.total(tf.where(is_own, values, tf.zeros([], values.dtype)), name), axis=0)

    def agree(self, answers: Sequence[tf.Tensor], grads: Gradients, names: Sequence[str]) -> list[tf.Tensor]:
        """Return the largest of each answer over the replicas."""
        vector = tf.stack([tf.cast(answer, tf.float32) for answer in answers])
        largest = tf.unstack(self._largest_answers(vector, grads, names))
        return [tf.cast(each, answer.dtype) for each, answer in zip(largest, answers, strict=True)]

    def _largest_answers(self, answers: tf.Tensor, grads: Gradients, names: Sequence[str]) -> tf.Tensor:
        del grads, names
        return self.maximum(answers, "step_result")


def forms_and_opposites(grads: Gradients) -> tf.Tensor:
    """Return 1 for each form that a gradient has, and for each that it has not, which `alike_on_all` compares."""
    forms = arithmetic.forms(grads)
    return tf.cast(tf.stack([forms, tf.logical_not(forms)]), tf.float32)


def alike_on_all(largest: tf.Tensor, names: Sequence[str]) -> Done:
    """Raise an error with the variables whose gradients differ in form; `largest` is of `forms_and_opposites`."""
    # Where two replicas differ, one has the form, and the other its opposite.
    alike = tf.reduce_all(tf.equal(largest[0] * largest[1], 0), axis=1)
    differing = tf.boolean_mask(list(names), tf.logical_not(alike))
    return tf.debugging.Assert(
        tf.reduce_all(alike), ["the workers differ in whether the gradients of these are None, or sparse:", differing]
    )
