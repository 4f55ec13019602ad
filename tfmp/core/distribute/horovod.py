"""The distribution of Horovod: processes that Horovod connects."""

from collections.abc import Sequence
from types import ModuleType

import tensorflow as tf

from tfmp.core.distribute.base import SeveralReplicas, alike_on_all, forms_and_opposites
from tfmp.core.gradients import arithmetic
from tfmp.types import Gradient, Gradients


class Horovod(SeveralReplicas):
    """The processes that Horovod connects.

    Each process changes its own variables, and all change them in the same way, because they agree on the flag. `agree`
    does not compare which gradients they have, since `mean` has done so.
    """

    def __init__(self, horovod: ModuleType) -> None:
        self._horovod = horovod

    def place(self) -> tuple[int | tf.Tensor, int]:
        """Return the number of this process, and how many there are."""
        return self._horovod.rank(), self._horovod.size()

    def total(self, values: tf.Tensor, name: str) -> tf.Tensor:
        """Return, for each value, the sum over the processes."""
        return self._horovod.allreduce(_not_constant(values), op=self._horovod.Sum, name=name)

    def mean(self, grads: Gradients, names: Sequence[str], dtype: tf.DType | None) -> list[Gradient]:
        """Return the mean over the processes; raise an error in each of them if one has a gradient that another lacks.

        Otherwise the first process would wait forever for the other. This check needs no values of gradients, so a
        graph can finish it before the gradients are computed.
        """
        largest = self.maximum(forms_and_opposites(grads), "forms_of_gradients")
        with tf.control_dependencies([alike_on_all(largest, names)]):
            return [self._mean(grad, f"gradient_{index}", dtype) for index, grad in enumerate(grads)]

    def _mean(self, grad: Gradient, name: str, dtype: tf.DType | None) -> Gradient:
        def part(values: tf.Tensor) -> tf.Tensor:
            # Divided before the cast and the sum, so that neither overflows unless the mean nearly does.
            size = _not_constant(tf.constant(self._horovod.size(), values.dtype))
            return tf.cast(values / size, dtype or values.dtype)

        def summed(values: tf.Tensor) -> tf.Tensor:
            return tf.cast(self._horovod.allreduce(part(values), op=self._horovod.Sum, name=name), values.dtype)

        if not isinstance(grad, tf.IndexedSlices):
            return arithmetic.map_values(summed, grad)
        # Sparse rows are gathered; those of one index are summed when they are applied.
        rows = self._horovod.allgather(part(grad.values), name=f"{name}_values")
        indices = self._horovod.allgather(_not_constant(grad.indices), name=f"{name}_indices")
        return tf.IndexedSlices(tf.cast(rows, grad.values.dtype), indices, grad.dense_shape)


def _not_constant(value: tf.Tensor) -> tf.Tensor:
    """Return a tensor of the same value that TensorFlow does not recognize as a constant.

    Horovod's ops (0.28.1) are not marked as stateful: TensorFlow runs one with a constant input while it optimizes a
    graph, for each set of fetches. A process that fetches a summary too would then wait forever for the others.
    """
    # The timestamp is never negative, so this adds 0. A product with 0 would be a constant to TensorFlow.
    return value + tf.cast(tf.timestamp() < 0, value.dtype)
