"""The distributions of `tf.distribute` strategies that keep a copy of every variable on each replica."""

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import tensorflow as tf

from tfmp.core.distribute.base import Returned, SeveralReplicas, alike_on_all, forms_and_opposites
from tfmp.core.gradients import arithmetic
from tfmp.core.tracing import conditional_update
from tfmp.types import ChangeVariables, Done, Gradient, Gradients, Held

_Strategy: TypeAlias = tf.distribute.Strategy | tf.compat.v1.distribute.Strategy


class Mirrored(SeveralReplicas):
    """The replicas of a `tf.distribute` strategy that keeps a copy of every variable on each of them.

    The conditional must be built in the cross-replica context. A strategy builds each replica's part in a thread of its
    own, and the optimizer makes these threads wait for each other when it sums gradients. If a branch were built by
    some of the threads only, they would wait forever.
    """

    @property
    def num_summed(self) -> int:
        """The number of replicas on all workers together."""
        return _replica_context().num_replicas_in_sync

    def place(self) -> tuple[int | tf.Tensor, int]:
        """Return the number of this replica, and how many there are on all workers together."""
        return _replica_context().replica_id_in_sync_group, self.num_summed

    def total(self, values: tf.Tensor, name: str) -> tf.Tensor:
        """Return, for each value, the sum over the replicas."""
        del name
        # Without stop_gradient, `all_reduce` (TensorFlow 2.15 to 2.21) searches a graph for the variables on which a
        # gradient of the sum would depend.
        return _replica_context().all_reduce(tf.distribute.ReduceOp.SUM, tf.stop_gradient(values))

    def mean(self, grads: Gradients, names: Sequence[str], dtype: tf.DType | None) -> list[Gradient]:
        """Return the gradients unchanged, because optimizers sum them over the replicas when they apply them."""
        del names
        if dtype is not None:
            raise NotImplementedError(
                f"aggregation_dtype={dtype.name!r} is for Horovod: under a tf.distribute strategy the wrapped "
                "optimizer sums the gradients, in their own type."
            )
        return list(grads)

    def sums(self, grads: Gradients, names: Sequence[str]) -> list[Gradient]:
        """Return the sums of the gradients over the replicas."""
        del names
        # As in `total`: the gradients of most models depend on variables.
        present = [arithmetic.map_values(tf.stop_gradient, grad) for grad in grads if grad is not None]
        sums = iter(_replica_context().all_reduce(tf.distribute.ReduceOp.SUM, present))
        return [None if grad is None else next(sums) for grad in grads]

    def conditional_update(
        self, flag: tf.Tensor, held: Held, if_true: ChangeVariables, if_false: ChangeVariables
    ) -> Done:
        """Call one of the functions on each replica; the conditional itself is built in the cross-replica context."""

        def on_all(strategy: _Strategy, flags: tf.Tensor, held: Held) -> Done:
            def run(function: ChangeVariables) -> Done:
                return tf.group(strategy.experimental_local_results(strategy.run(function, args=(held,))))

            # In a graph, what each replica did to compute its flag must run before the function that is called.
            flags = strategy.experimental_local_results(flags)
            with tf.control_dependencies(flags):
                first = tf.identity(flags[0])
            return conditional_update(first, [], lambda _: run(if_true), lambda _: run(if_false))

        return _replica_context().merge_call(on_all, args=(flag, held))

    def once(self, function: Callable[[], Returned]) -> Returned:
        """Call the function in the cross-replica context, where the first replica's function runs for all."""
        returned: Returned = _replica_context().merge_call(lambda strategy: function())
        return returned


class MirroredWorkers(Mirrored):
    """The replicas of a strategy that runs several processes, called workers, each of which builds its own step.

    TensorFlow sums the first gradient of one worker with the first gradients of the others, even if they belong to
    different variables. So `agree` and `sums` raise an error if a replica has a gradient that another lacks. The
    replicas of one process run the same code.
    """

    def _largest_answers(self, answers: tf.Tensor, grads: Gradients, names: Sequence[str]) -> tf.Tensor:
        forms = forms_and_opposites(grads)
        largest = self.maximum(tf.concat([answers, tf.reshape(forms, [-1])], axis=0), "step_result")
        of_answers, of_forms = tf.split(largest, [answers.shape.num_elements(), forms.shape.num_elements()])
        with tf.control_dependencies([alike_on_all(tf.reshape(of_forms, forms.shape), names)]):
            return tf.identity(of_answers)

    def sums(self, grads: Gradients, names: Sequence[str]) -> list[Gradient]:
        """Return the sums of the gradients over the replicas."""
        largest = self.maximum(forms_and_opposites(grads), "forms_of_gradients")
        with tf.control_dependencies([alike_on_all(largest, names)]):
            grads = [arithmetic.map_values(tf.identity, grad) for grad in grads]
        return super().sums(grads, names)


def _replica_context() -> Any:  # noqa: ANN401 - TensorFlow ships no types
    return tf.distribute.get_replica_context()
