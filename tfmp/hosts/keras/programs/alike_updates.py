"""Updates variables by an optimizer of Keras as compiled programs, of which variables that are alike share one."""

import contextlib
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple, TypeAlias

import tensorflow as tf

from tfmp.core.gradients import arithmetic
from tfmp.hosts.keras.internals import not_counting
from tfmp.hosts.keras.programs.alike import StateOfVariables
from tfmp.hosts.keras.programs.kept_programs import run_compiled
from tfmp.hosts.keras.programs.shared_programs import SharedPrograms
from tfmp.types import Gradient, Gradients

# The optimizers of Keras 2 and Keras 3 have no common base class, and Keras' variables neither.
_Optimizer: TypeAlias = Any
_Variable: TypeAlias = Any


class Updates(NamedTuple):
    """Variables, and what they are updated with."""

    variables: Sequence[_Variable]
    #: One for each variable.
    grads: Gradients

    def at(self, places: Sequence[int]) -> "Updates":
        """Return the updates that stand at some places."""
        return Updates(*([each[place] for place in places] for each in self))

    def alike(self, state: StateOfVariables) -> list[tuple[Hashable, list[int]]]:
        """Return the places of those that one program is to do, in lists, and the kind of each list."""
        return state.alike(self.variables, list(map(_form, self.grads, range(len(self.grads)))))


def _form(grad: Gradient, place: int) -> Hashable:
    """Return what is equal for gradients, at different places, with which one program can be called."""
    # Sparse gradients may have different numbers of rows. A dense one may be broadcast to its variable.
    return place if grad is None or arithmetic.is_sparse(grad) else (grad.dtype, str(grad.shape))


#: Does updates by an optimizer, with further tensors.
Apply: TypeAlias = Callable[[_Optimizer, Updates, Sequence[tf.Tensor]], None]


def has_alike(optimizer: _Optimizer, updates: Updates) -> bool:
    """Return whether `update_alike` would call a program more than once. Each variable must have a gradient."""
    lists = updates.alike(StateOfVariables(optimizer))
    return len({kind for kind, _ in lists}) < len(lists)


def update_alike(apply: Apply, optimizer: _Optimizer, updates: Updates, tensors: Sequence[tf.Tensor]) -> None:
    """Update variables by a function, which is called within a compiled program for some of them at a time.

    Call this in a `tf.function`, if `can_share_programs` is true.

    Args:
        apply: The function. Its optimizer is a view of the one given here that does not count the step, and its
            tensors are the ones given here.
        optimizer: The optimizer, which is built.
        updates: The variables, and a gradient for each of them.
        tensors: Tensors that the updates of all variables use.

    Examples:
        >>> import keras
        >>> variables, sgd = [tf.Variable([1.0]), tf.Variable([2.0])], keras.optimizers.SGD(0.5)
        >>> sgd.build(variables)
        >>> def apply(view, updates, tensors):
        ...     grads = [grad * tensors[0] for grad in updates.grads]
        ...     view.apply_gradients(zip(grads, updates.variables))
        >>> @tf.function
        ... def step(grad):
        ...     update_alike(apply, sgd, Updates(variables, [grad] * 2), [tf.constant(0.5)])
        >>> step(tf.constant([1.0]))
        >>> [w.numpy().tolist() for w in variables], int(sgd.iterations)
        ([[0.75], [1.75]], 1)
    """
    state = StateOfVariables(optimizer)
    programs = SharedPrograms(state.of_all)
    with not_counting(optimizer) as view:
        for kind, places in updates.alike(state):
            some = updates.at(places)
            numbers = _numbers_of(optimizer, some.variables)

            def update(
                grads: Gradients,
                given: Sequence[tf.Tensor],
                some: Updates = some,
                numbers: Sequence[int] = numbers,
            ) -> None:
                with _with_numbers(optimizer, numbers, given[len(tensors) :]):
                    apply(view, some._replace(grads=grads), given[: len(tensors)])

            given = [*tensors, *map(tf.constant, numbers)]
            if any(map(arithmetic.is_sparse, some.grads)):
                run_compiled(update, some.grads, given)
            else:
                own_variables = [each for variable in some.variables for each in state.of(variable)]
                programs.run(kind, own_variables, update, some.grads, given)
    optimizer.iterations.assign_add(1)


def _numbers_of(optimizer: _Optimizer, variables: Sequence[_Variable]) -> list[int]:
    """Return the numbers that only the updates of these variables use: those from which random numbers follow."""
    if not hasattr(optimizer, "numbers_of"):
        return []
    return [number for variable in variables for number in optimizer.numbers_of(variable)]


def _with_numbers(
    optimizer: _Optimizer, numbers: Sequence[int], tensors: Sequence[tf.Tensor]
) -> contextlib.AbstractContextManager[None]:
    """Let an optimizer use tensors in the place of such numbers."""
    if not numbers:
        return contextlib.nullcontext()
    replaced: contextlib.AbstractContextManager[None] = optimizer.with_numbers(dict(zip(numbers, tensors, strict=True)))
    return replaced
