"""A process that trains alone."""

from collections.abc import Callable, Sequence

import tensorflow as tf

from tfmp.core.conditionals import call_either
from tfmp.types import ApplyGradients, Gradient, Gradients


class SingleProcess:
    """One replica, which always agrees with itself."""

    addends = 1

    def __repr__(self) -> str:
        return "SingleProcess()"

    def mean(self, grads: Gradients, names: Sequence[str], dtype: tf.DType | None) -> list[Gradient]:
        """Return the gradients."""
        del names, dtype
        return list(grads)

    def all_true(self, flag: tf.Tensor, grads: Gradients, names: Sequence[str]) -> tf.Tensor:
        """Return the flag."""
        del grads, names
        return flag

    def maximum(self, values: tf.Tensor, name: str) -> tf.Tensor:
        """Return the values."""
        del name
        return values

    def total(self, values: tf.Tensor, name: str) -> tf.Tensor:
        """Return the values."""
        del name
        return values

    def call_either(
        self, flag: tf.Tensor, grads: Gradients, if_true: ApplyGradients, if_false: ApplyGradients
    ) -> tf.Operation:
        """Call one of the functions."""
        return call_either(flag, grads, if_true, if_false)

    def once(self, function: Callable[[], tf.Operation]) -> tf.Operation:
        """Call the function."""
        return function()
