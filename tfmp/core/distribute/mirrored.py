"""The replicas of a `tf.distribute` strategy."""

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import tensorflow as tf

from tfmp.core import numerics
from tfmp.core.conditionals import call_either
from tfmp.core.distribute.sums import alike_on_all, in_slot
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
    def addends(self) -> int:
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

    def all_true(self, flag: tf.Tensor, grads: Gradients, names: Sequence[str]) -> tf.Tensor:
        """Return whether the flag is true on every replica; those of one process cannot differ in their gradients."""
        del grads, names
        return tf.equal(self.total(tf.cast(tf.logical_not(flag), tf.float32), "steps_not_finite"), 0)

    def maximum(self, values: tf.Tensor, name: str) -> tf.Tensor:
        """Return the largest of the replicas' values."""
        context = _replica_context()
        own = in_slot(values, context.replica_id_in_sync_group, context.num_replicas_in_sync)
        return tf.reduce_max(self.total(own, name), axis=0)

    def total(self, values: tf.Tensor, name: str) -> tf.Tensor:
        """Return the sum of the replicas' values."""
        del name
        # Else all_reduce (TensorFlow 2.15 to 2.21, in graphs) looks for the variables that a gradient would depend on.
        return _replica_context().all_reduce(tf.distribute.ReduceOp.SUM, tf.stop_gradient(values))

    def call_either(
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
            return call_either(first, [], lambda _: run(if_true), lambda _: run(if_false))

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

    def all_true(self, flag: tf.Tensor, grads: Gradients, names: Sequence[str]) -> tf.Tensor:
        """Return whether the flag is true on every replica; stop where one has a gradient that another lacks."""
        ones = tf.concat([[tf.logical_not(flag)], tf.reshape(numerics.forms(grads), [-1])], axis=0)
        counts = self.total(tf.cast(ones, tf.float32), "forms_of_gradients")
        replicas = tf.distribute.get_strategy().num_replicas_in_sync
        with tf.control_dependencies([alike_on_all(tf.reshape(counts[1:], [-1, 2]), replicas, names)]):
            return tf.equal(counts[0], 0)


def _replica_context() -> Any:  # noqa: ANN401 - TensorFlow ships no types
    return tf.distribute.get_replica_context()
