"""The replicas of a `tf.distribute` strategy."""

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import tensorflow as tf

from tfmp.core.control_flow import conditional_update
from tfmp.core.distribute.collectives import alike_on_all, in_slot, sum_together
from tfmp.core.gradients import arithmetic
from tfmp.types import ApplyGradients, Gradient, Gradients

_Strategy: TypeAlias = tf.distribute.Strategy | tf.compat.v1.distribute.Strategy


class Mirrored:
    """The replicas of a `tf.distribute` strategy that keeps a copy of every variable on each of them.

    The conditional must stand in the cross-replica context: optimizers meet there to sum gradients, and a branch
    that only some replicas' threads built would wait for the others for ever.
    """

    def __repr__(self) -> str:
        return "Mirrored()"

    @property
    def num_summed(self) -> int:
        """The number of replicas, of all workers."""
        return _replica_context().num_replicas_in_sync

    def mean(self, grads: Gradients, names: Sequence[str], dtype: tf.DType | None) -> list[Gradient]:
        """Return the gradients: optimizers sum them over the replicas when they apply them."""
        del names
        if dtype is not None:
            raise NotImplementedError(
                f"aggregation_dtype={dtype.name!r} is for Horovod: under a tf.distribute strategy the wrapped "
                "optimizer sums the gradients, in their own type."
            )
        return list(grads)

    def agree(
        self, usable: tf.Tensor, max_abs: tf.Tensor | None, grads: Gradients, names: Sequence[str]
    ) -> tuple[tf.Tensor, tf.Tensor | None]:
        """Find what holds for all replicas; those of one process cannot differ in which gradients they have."""
        del grads, names
        unusable, *largest = sum_together(self._total, self._result_parts(usable, max_abs))
        return tf.equal(unusable, 0), tf.reduce_max(largest[0], axis=0) if largest else None

    def _result_parts(self, usable: tf.Tensor, max_abs: tf.Tensor | None) -> list[tf.Tensor]:
        unusable = tf.cast(tf.logical_not(usable), tf.float32)
        return [unusable] if max_abs is None else [unusable, self._in_own_slot(max_abs)]

    def maximum(self, values: tf.Tensor, name: str) -> tf.Tensor:
        """Return the largest of the replicas' values."""
        del name
        return tf.reduce_max(self._total(self._in_own_slot(values)), axis=0)

    def _in_own_slot(self, values: tf.Tensor) -> tf.Tensor:
        context = _replica_context()
        return in_slot(values, context.replica_id_in_sync_group, context.num_replicas_in_sync)

    def total(self, values: tf.Tensor, name: str) -> tf.Tensor:
        """Return the sum of the replicas' values."""
        del name
        return self._total(values)

    def _total(self, values: tf.Tensor) -> tf.Tensor:
        # Else all_reduce (TensorFlow 2.15 to 2.21, in graphs) looks for the variables that a gradient would depend on.
        return _replica_context().all_reduce(tf.distribute.ReduceOp.SUM, tf.stop_gradient(values))

    def conditional_update(
        self, flag: tf.Tensor, grads: Gradients, if_true: ApplyGradients, if_false: ApplyGradients
    ) -> tf.Operation:
        """Call one of the functions on each replica; the conditional stands in the cross-replica context."""

        def on_all(strategy: _Strategy, flags: tf.Tensor, grads: Gradients) -> tf.Operation:
            def run(function: ApplyGradients) -> tf.Operation:
                return tf.group(strategy.experimental_local_results(strategy.run(function, args=(grads,))))

            # A graph orders nothing by itself: what each replica did before its flag comes before what is called.
            flags = strategy.experimental_local_results(flags)
            with tf.control_dependencies(flags):
                first = tf.identity(flags[0])
            return conditional_update(first, [], lambda _: run(if_true), lambda _: run(if_false))

        return _replica_context().merge_call(on_all, args=(flag, list(grads)))

    def once(self, function: Callable[[], tf.Operation]) -> tf.Operation:
        """Call the function in the cross-replica context."""
        return _replica_context().merge_call(lambda strategy: function())


class MirroredWorkers(Mirrored):
    """Such replicas in several processes, each of which builds a step of its own.

    TensorFlow sums the first gradient of one with the first of the others, whichever variables they belong to.
    """

    def __repr__(self) -> str:
        return "MirroredWorkers()"

    def agree(
        self, usable: tf.Tensor, max_abs: tf.Tensor | None, grads: Gradients, names: Sequence[str]
    ) -> tuple[tf.Tensor, tf.Tensor | None]:
        """Find what holds for all replicas; stop if one has a gradient that another lacks."""
        forms = tf.cast(arithmetic.forms(grads), tf.float32)
        counts, unusable, *largest = sum_together(self._total, [forms, *self._result_parts(usable, max_abs)])
        replicas = tf.distribute.get_strategy().num_replicas_in_sync
        with tf.control_dependencies([alike_on_all(counts, replicas, names)]):
            return tf.equal(unusable, 0), tf.reduce_max(largest[0], axis=0) if largest else None


def _replica_context() -> Any:  # noqa: ANN401 - TensorFlow ships no types
    return tf.distribute.get_replica_context()
