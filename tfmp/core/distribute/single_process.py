"""The distribution of a process that trains alone."""

from collections.abc import Callable, Sequence

import tensorflow as tf

from tfmp.core.control_flow import conditional_update
from tfmp.core.distribute.base import Returned
from tfmp.types import ApplyGradients, Done, Gradient, Gradients


class SingleProcess:
    """A single replica: every operation over all replicas returns this replica's own values."""

    num_summed = 1

    def __repr__(self) -> str:
        return "SingleProcess()"

    def mean(self, grads: Gradients, names: Sequence[str], dtype: tf.DType | None) -> list[Gradient]:
        """Return the gradients unchanged."""
        del names, dtype
        return list(grads)

    def agree(self, answers: Sequence[tf.Tensor], grads: Gradients, names: Sequence[str]) -> list[tf.Tensor]:
        """Return the answers unchanged."""
        del grads, names
        return list(answers)

    def sums(self, grads: Gradients, names: Sequence[str]) -> list[Gradient]:
        """Return the gradients unchanged."""
        del names
        return list(grads)

    def maximum(self, values: tf.Tensor, name: str) -> tf.Tensor:
        """Return the values unchanged."""
        del name
        return values

    def total(self, values: tf.Tensor, name: str) -> tf.Tensor:
        """Return the values unchanged."""
        del name
        return values

    def conditional_update(
        self, flag: tf.Tensor, grads: Gradients, if_true: ApplyGradients, if_false: ApplyGradients
    ) -> Done:
        """Call one of the functions."""
        return conditional_update(flag, grads, if_true, if_false)

    def once(self, function: Callable[[], Returned]) -> Returned:
        """Call the function."""
        return function()
