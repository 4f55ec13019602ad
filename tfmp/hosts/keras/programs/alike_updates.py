"""Updates variables by an optimizer of Keras as compiled programs, of which variables that are alike share one."""

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import tensorflow as tf

from tfmp.core.gradients import arithmetic
from tfmp.hosts.keras.internals import not_counting
from tfmp.hosts.keras.programs.alike import StateOfVariables
from tfmp.hosts.keras.programs.kept_programs import run_compiled
from tfmp.hosts.keras.programs.shared_programs import SharedPrograms
from tfmp.types import Gradients

# The optimizers of Keras 2 and Keras 3 have no common base class, and Keras' variables neither.
_Optimizer: TypeAlias = Any
_Variable: TypeAlias = Any

#: Updates some variables by an optimizer, with their gradients and further tensors.
Apply: TypeAlias = Callable[[_Optimizer, Gradients, Sequence[_Variable], Sequence[tf.Tensor]], None]


def has_alike(optimizer: _Optimizer, variables: Sequence[_Variable], grads: Gradients) -> bool:
    """Return whether `update_alike` would call a program more than once. Each variable must have a gradient."""
    lists = StateOfVariables(optimizer).alike(variables, grads)
    return len({kind for kind, _ in lists}) < len(lists)


def update_alike(
    apply: Apply,
    optimizer: _Optimizer,
    variables: Sequence[_Variable],
    grads: Gradients,
    tensors: Sequence[tf.Tensor],
) -> None:
    """Update variables by a function, which is called within a compiled program for some variables at a time.

    Call this in a `tf.function`, if `can_share_programs` is true.

    Args:
        apply: The function. Its optimizer is a view of the one given here that does not count the step, and its
            tensors are the ones given here.
        optimizer: The optimizer, which is built.
        variables: The variables.
        grads: A gradient for each variable.
        tensors: Tensors that the updates of all variables use.

    Examples:
        >>> import keras
        >>> variables, sgd = [tf.Variable([1.0]), tf.Variable([2.0])], keras.optimizers.SGD(0.5)
        >>> sgd.build(variables)
        >>> def apply(view, grads, variables, tensors):
        ...     view.apply_gradients([(grad * tensors[0], w) for grad, w in zip(grads, variables)])
        >>> @tf.function
        ... def step(grad):
        ...     update_alike(apply, sgd, variables, [grad, grad], [tf.constant(0.5)])
        >>> step(tf.constant([1.0]))
        >>> [w.numpy().tolist() for w in variables], int(sgd.iterations)
        ([[0.75], [1.75]], 1)
    """
    state = StateOfVariables(optimizer)
    programs = SharedPrograms(state.of_all)
    with not_counting(optimizer) as view:
        for kind, places in state.alike(variables, grads):
            some = [variables[place] for place in places]
            numbers = _numbers_of(optimizer, some)

            def update(
                grads: Gradients,
                tensors: Sequence[tf.Tensor],
                some: Sequence[_Variable] = some,
                numbers: Sequence[int] = numbers,
            ) -> None:
                common, own = tensors[: len(tensors) - len(numbers)], tensors[len(tensors) - len(numbers) :]
                with _with_numbers(optimizer, numbers, own):
                    apply(view, grads, some, common)

            of_some = [grads[place] for place in places]
            common_and_own = [*tensors, *map(tf.constant, numbers)]
            if any(map(arithmetic.is_sparse, of_some)):
                run_compiled(update, of_some, common_and_own)
            else:
                own = [each for variable in some for each in state.of(variable)]
                programs.run(kind, own, update, of_some, common_and_own)
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
