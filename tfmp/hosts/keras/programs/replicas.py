"""Applies gradients on the replicas of a strategy, the update of each replica as one program that XLA compiles."""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import tensorflow as tf

from tfmp.core.gradients import arithmetic
from tfmp.core.gradients.norms import halves_of_square_sums
from tfmp.hosts.keras.internals import clipped, updates_as_other_optimizers_do, updating_one_replica
from tfmp.hosts.keras.programs.alike import can_share_programs
from tfmp.hosts.keras.programs.alike_updates import Apply, Updates, has_alike, update_alike
from tfmp.hosts.keras.programs.clipping import clipped_by, clips_by_global_norm, true_norm
from tfmp.hosts.keras.programs.kept_programs import run_compiled
from tfmp.hosts.keras.views import of_tensorflow, view_of
from tfmp.hosts.keras.which import is_optimizer_of_keras3
from tfmp.types import Done, Gradients

# The optimizers of Keras 2 and Keras 3 have no common base class, and Keras' variables neither.
_Optimizer: TypeAlias = Any
_Variable: TypeAlias = Any

_NO_CLIPPING = {"clipnorm": None, "clipvalue": None, "global_clipnorm": None}


def can_update_one_replica(optimizer: _Optimizer) -> bool:
    """Return whether an optimizer can be made to update one replica, as the functions here do; called on a replica.

    One that overrides Keras' private methods, such as Nadam, cannot. Neither can one of Keras 2 that was made outside
    of the strategy's scope: all replicas count steps in one variable.
    """
    local_results = tf.distribute.get_strategy().experimental_local_results
    replicas = len(tf.distribute.get_strategy().extended.worker_devices)
    is_on_each = all(len(local_results(of_tensorflow(variable))) == replicas for variable in optimizer.variables)
    return is_on_each and updates_as_other_optimizers_do(optimizer)


def clips_before_the_sum(optimizer: _Optimizer) -> bool:
    """Return whether an optimizer clips the gradients of each replica before it sums them.

    Optimizers of Keras 3 do if they clip. Those of Keras 2 clip the sums.
    """
    return is_optimizer_of_keras3(optimizer) and any(
        (optimizer.clipnorm, optimizer.clipvalue, optimizer.global_clipnorm)
    )


def apply_on_replicas(
    optimizer: _Optimizer,
    grads: Gradients,
    variables: Sequence[_Variable],
    options: Mapping[str, Any],
    *,
    are_summed: bool = False,
) -> None:
    """Sum the gradients over the replicas and apply the sums, as the optimizer does; call it on each replica.

    Args:
        optimizer: The optimizer.
        grads: The gradients of the replica, in true magnitude.
        variables: The variables.
        options: Keyword arguments for the `apply_gradients` of an optimizer of Keras 2.
        are_summed: True if the gradients are summed already.
    """
    if clips_before_the_sum(optimizer):
        sums = sum_over_replicas(clipped(optimizer, grads), variables)
    else:
        sums = clipped(optimizer, grads if are_summed else sum_over_replicas(grads, variables))

    def apply(optimizer: _Optimizer, updates: Updates, tensors: Sequence[tf.Tensor]) -> None:
        del tensors
        _apply_on_one(optimizer, updates.grads, updates.variables, options, **_NO_CLIPPING)

    _run_on_each(lambda sums: _run_compiled(apply, optimizer, variables, sums, []), variables[0], sums)


class ProgramOfReplicas:
    """The program by which each replica unscales sums of gradients, clips and applies them.

    Args:
        optimizer: The optimizer, which does not clip before the sum.
        variables: The variables, in the order of the gradients.
        options: Keyword arguments for the `apply_gradients` of an optimizer of Keras 2.
    """

    def __init__(self, optimizer: _Optimizer, variables: Sequence[_Variable], options: Mapping[str, Any]) -> None:
        self._optimizer = optimizer
        self._variables = variables
        self._options = options

    def sum(self, grads: Gradients) -> Gradients:
        """Return the sums of the gradients over the replicas; called on each replica."""
        # A sum of scaled gradients could overflow in half precision.
        wide = [arithmetic.map_values(arithmetic.widen, grad) for grad in grads]
        return sum_over_replicas(wide, self._variables)

    def measure(self, sums: Gradients) -> list[tf.Tensor]:
        """Return what the program needs for clipping by the global norm; nothing if it does not clip so."""
        return [halves_of_square_sums(sums)] if clips_by_global_norm(self._optimizer) else []

    def apply(self, sums: Gradients, loss_scale: tf.Tensor, measures: Sequence[tf.Tensor]) -> Done:
        """Divide the sums by the loss scale, clip and apply them; called on each replica."""

        def apply(optimizer: _Optimizer, updates: Updates, tensors: Sequence[tf.Tensor]) -> None:
            loss_scale, *norms = tensors
            sums: Gradients = arithmetic.unscale(updates.grads, loss_scale)
            for norm in norms:
                sums = clipped_by(norm, sums, optimizer)
            _apply_on_one(optimizer, sums, updates.variables, self._options, **(_NO_CLIPPING if norms else {}))

        def update(held: Gradients) -> None:
            sums, measures = held[: len(self._variables)], held[len(self._variables) :]
            norms = [true_norm(sums, halves, loss_scale) for halves in measures]
            _run_compiled(apply, self._optimizer, self._variables, sums, [loss_scale, *norms])

        _run_on_each(update, self._variables[0], [*sums, *measures])
        return tf.no_op()


def sum_over_replicas(grads: Gradients, variables: Sequence[_Variable]) -> Gradients:
    """Return the sums of gradients over the replicas, on the devices of the variables; call it on each replica."""

    def on_all(strategy: tf.distribute.Strategy, grads: Gradients) -> Gradients:
        pairs = list(zip(grads, map(of_tensorflow, variables), strict=True))
        sums: Gradients = strategy.extended.batch_reduce_to(tf.distribute.ReduceOp.SUM, pairs)
        return sums

    sums: Gradients = tf.distribute.get_replica_context().merge_call(on_all, args=(list(grads),))
    return sums


def _run_on_each(update: Callable[[Gradients], None], first: _Variable, held: Gradients) -> None:
    """Call the first replica's function for each replica with what that holds; within it, variables are the replica's.

    Call this on each replica, with the first variable.
    """

    def on_all(strategy: tf.distribute.Strategy, held: Gradients) -> None:
        strategy.extended.update(of_tensorflow(first), lambda _, held: update(held), args=(held,), group=False)

    tf.distribute.get_replica_context().merge_call(on_all, args=(list(held),))


def _run_compiled(
    apply: Apply,
    optimizer: _Optimizer,
    variables: Sequence[_Variable],
    sums: Gradients,
    tensors: Sequence[tf.Tensor],
) -> None:
    """Run the update of the replica that runs: by programs that alike variables share, or as one program."""
    updates = Updates(variables, sums, changes=[None] * len(variables))
    if can_share_programs(optimizer, variables) and has_alike(optimizer, updates):
        update_alike(apply, optimizer, updates, tensors)
    else:
        run_compiled(lambda sums, tensors: apply(optimizer, updates._replace(grads=sums), tensors), sums, tensors)


def _apply_on_one(
    optimizer: _Optimizer,
    sums: Gradients,
    variables: Sequence[_Variable],
    options: Mapping[str, Any],
    **attributes: object,
) -> None:
    """Apply sums on the replica that runs, by a view of the optimizer that has these attributes."""
    with _of_one_replica(optimizer, **attributes) as view:
        if is_optimizer_of_keras3(view):
            view.apply(list(sums), variables)
        else:
            view.apply_gradients(list(zip(sums, variables, strict=True)), skip_gradients_aggregation=True, **options)


@contextlib.contextmanager
def _of_one_replica(optimizer: _Optimizer, **attributes: object) -> Iterator[_Optimizer]:
    """Yield a view of the optimizer that shares its variables, does not sum, and updates one replica."""
    if not is_optimizer_of_keras3(optimizer):
        # The program around it is compiled anyway.
        attributes["jit_compile"] = False
    with view_of(optimizer, **attributes) as view, updating_one_replica(view):
        yield view
