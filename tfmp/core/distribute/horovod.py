"""The processes that Horovod connects."""

from collections.abc import Sequence
from types import ModuleType

import tensorflow as tf

from tfmp.core.distribute.collectives import alike_on_all, in_slot, sum_together
from tfmp.core.distribute.single_process import SingleProcess
from tfmp.core.gradients import arithmetic
from tfmp.types import Gradient, Gradients


class Horovod(SingleProcess):
    """The processes that Horovod connects, each of which acts on variables of its own.

    Args:
        horovod: The module `horovod.tensorflow`, initialized.
    """

    def __init__(self, horovod: ModuleType) -> None:
        self._horovod = horovod

    def __repr__(self) -> str:
        return "Horovod()"

    def mean(self, grads: Gradients, names: Sequence[str], dtype: tf.DType | None) -> list[Gradient]:
        """Return the mean over the processes."""
        with tf.control_dependencies([self._assert_same_forms(grads, names)]):
            return [self._mean(grad, f"gradient_{index}", dtype) for index, grad in enumerate(grads)]

    def _mean(self, grad: Gradient, name: str, dtype: tf.DType | None) -> Gradient:
        def part(values: tf.Tensor) -> tf.Tensor:
            # Divided before the cast and the sum: neither overflows unless the mean comes near to it.
            return tf.cast(
                values / _of_each_step(tf.constant(self._horovod.size(), values.dtype)), dtype or values.dtype
            )

        def summed(values: tf.Tensor) -> tf.Tensor:
            return tf.cast(self._horovod.allreduce(part(values), op=self._horovod.Sum, name=name), values.dtype)

        def rows(values: tf.Tensor) -> tf.Tensor:
            return tf.cast(self._horovod.allgather(part(values), name=f"{name}_values"), values.dtype)

        def indices(values: tf.Tensor) -> tf.Tensor:
            return self._horovod.allgather(_of_each_step(values), name=f"{name}_indices")

        return arithmetic.map_parts(summed, rows, indices, grad)

    def _assert_same_forms(self, grads: Gradients, names: Sequence[str]) -> tf.Operation:
        """Stop every process where one has a gradient that another lacks, which would wait for it for ever.

        Nothing of a step is needed to know, so in a graph this is done by the time that there are gradients.
        """
        counts = self.total(tf.cast(arithmetic.forms(grads), tf.float32), "forms_of_gradients")
        return alike_on_all(counts, self._horovod.size(), names)

    def agree(
        self, usable: tf.Tensor, max_abs: tf.Tensor | None, grads: Gradients, names: Sequence[str]
    ) -> tuple[tf.Tensor, tf.Tensor | None]:
        """Find what holds for all processes; `mean` has compared which gradients they have."""
        del grads, names
        unusable = tf.cast(tf.logical_not(usable), tf.float32)
        parts = [unusable] if max_abs is None else [unusable, self._in_own_slot(max_abs)]
        sums = sum_together(lambda values: self.total(values, "step_result"), parts)
        return tf.equal(sums[0], 0), None if max_abs is None else tf.reduce_max(sums[1], axis=0)

    def maximum(self, values: tf.Tensor, name: str) -> tf.Tensor:
        """Return the largest of the processes' values."""
        return tf.reduce_max(self.total(self._in_own_slot(values), name), axis=0)

    def _in_own_slot(self, values: tf.Tensor) -> tf.Tensor:
        return in_slot(values, self._horovod.rank(), self._horovod.size())

    def total(self, values: tf.Tensor, name: str) -> tf.Tensor:
        """Return the sum of the processes' values."""
        return self._horovod.allreduce(_of_each_step(values), op=self._horovod.Sum, name=name)


def _of_each_step(value: tf.Tensor) -> tf.Tensor:
    """Return a number, or a few, as no constant, even where they are always the same.

    Horovod's ops (0.28.1) do not say that they are stateful. That of a constant runs while TensorFlow optimizes a
    graph, anew for each set of fetches: a process that fetches a summary would wait for ever for those that do not.
    """
    # Not times 1: TensorFlow knows what 0 times anything is.
    return value + tf.cast(tf.timestamp() < 0, value.dtype)
