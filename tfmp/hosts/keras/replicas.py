"""Applies gradients on the replicas of a strategy, the update of each replica as one program that XLA compiles."""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import tensorflow as tf

from tfmp.core.gradients import arithmetic
from tfmp.hosts.keras.internals import clipped, updates_as_other_optimizers_do, updating_one_replica
from tfmp.hosts.keras.kept_programs import run_compiled
from tfmp.hosts.keras.views import of_tensorflow, view_of
from tfmp.types import Done, Gradients


def can_update_one_replica(optimizer: Any) -> bool:  # noqa: ANN401
    """Return whether an optimizer of Keras 3 can be made to update one replica, as `apply_sums` does.

    One that overrides Keras' private methods, such as Nadam, cannot.
    """
    return updates_as_other_optimizers_do(optimizer)


def apply_on_replicas(optimizer: Any, grads: Gradients, variables: Sequence[Any]) -> None:  # noqa: ANN401
    """Sum the gradients over the replicas and apply the sums, as a Keras 3 optimizer does; call it on each replica."""
    # Keras clips the gradients of each replica before it sums them.
    apply_sums(optimizer, sum_over_replicas(clipped(optimizer, grads), variables), variables)


class ProgramOfReplicas:
    """The program by which each replica unscales sums of gradients and applies them; its optimizer does not clip."""

    def __init__(self, optimizer: Any, variables: Sequence[Any]) -> None:  # noqa: ANN401
        self._optimizer = optimizer
        self._variables = variables

    def sum(self, grads: Gradients) -> Gradients:
        """Return the sums of the gradients over the replicas; called on each replica."""
        # A sum of scaled gradients could overflow in half precision.
        wide = [arithmetic.map_values(arithmetic.widen, grad) for grad in grads]
        return sum_over_replicas(wide, self._variables)

    def apply(self, sums: Gradients, loss_scale: tf.Tensor) -> Done:
        """Divide the sums by the loss scale and apply them; called on each replica."""
        apply_sums(self._optimizer, sums, self._variables, loss_scale)
        return tf.no_op()


def sum_over_replicas(grads: Gradients, variables: Sequence[Any]) -> Gradients:
    """Return the sums of gradients over the replicas, on the devices of the variables; call it on each replica."""

    def on_all(strategy: tf.distribute.Strategy, grads: Gradients) -> Gradients:
        pairs = list(zip(grads, map(of_tensorflow, variables), strict=True))
        sums: Gradients = strategy.extended.batch_reduce_to(tf.distribute.ReduceOp.SUM, pairs)
        return sums

    sums: Gradients = tf.distribute.get_replica_context().merge_call(on_all, args=(list(grads),))
    return sums


def apply_sums(
    optimizer: Any,  # noqa: ANN401 - Keras is not imported here
    sums: Gradients,
    variables: Sequence[Any],
    loss_scale: tf.Tensor | None = None,
) -> None:
    """Apply the sums of `sum_over_replicas` on each replica by a program of its own; call it on each replica.

    The optimizer is one of Keras 3 that does not clip. Without a loss scale, the sums are unscaled already.
    """

    def update(first: tf.Variable, sums: Gradients) -> None:
        del first

        def apply(grads: Gradients, tensors: Sequence[tf.Tensor]) -> None:
            with _of_one_replica(optimizer) as view:
                view.apply(arithmetic.unscale(grads, tensors[0]) if tensors else list(grads), variables)

        run_compiled(apply, sums, [] if loss_scale is None else [loss_scale])

    def on_all(strategy: tf.distribute.Strategy, sums: Gradients) -> None:
        # This calls `update` for each replica, on its device. Within it, each variable is that of the replica.
        strategy.extended.update(of_tensorflow(variables[0]), update, args=(sums,), group=False)

    tf.distribute.get_replica_context().merge_call(on_all, args=(list(sums),))


@contextlib.contextmanager
def _of_one_replica(optimizer: Any) -> Iterator[Any]:  # noqa: ANN401
    """Yield a view of the optimizer that shares its variables, neither clips nor sums, and updates one replica."""
    with view_of(optimizer, clipnorm=None, clipvalue=None, global_clipnorm=None) as view, updating_one_replica(view):
        yield view
