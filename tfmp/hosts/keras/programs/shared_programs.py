"""Compiles the updates of many variables as few programs: variables that are alike share one.

To compile the update of a variable takes XLA as long as that of the variable before, although the two differ in nothing
but the variables if these have one shape. So the update of a few variables is traced and compiled once, and the program
is called again with other variables in their place.
"""

import functools
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple, TypeAlias

import tensorflow as tf

from tfmp.core.tensorflow_internals import unrecorded
from tfmp.types import Gradients

_Update: TypeAlias = Callable[[Gradients, Sequence[tf.Tensor]], object]


class SharedPrograms:
    """Runs updates of variables by compiled programs, each of which runs all updates of its kind.

    It is used in one trace of a `tf.function`.

    Args:
        of_all: The variables that updates of any kind may use beside their own.

    Examples:
        >>> rate, (a, b) = tf.Variable(0.5), [tf.Variable([1.0]), tf.Variable([2.0])]
        >>> @tf.function
        ... def step(grad):
        ...     programs = SharedPrograms([rate])
        ...     for w in (a, b):
        ...         programs.run("w", [w], lambda grads, _: w.assign_sub(rate * grads[0]), [grad], [])
        >>> step(tf.constant([0.5]))
        >>> a.numpy(), b.numpy()
        (array([0.75], dtype=float32), array([1.75], dtype=float32))
    """

    def __init__(self, of_all: Sequence[tf.Variable]) -> None:
        self._of_all = _handles(of_all)
        self._programs: dict[Hashable, _Program] = {}

    def run(
        self,
        kind: Hashable,
        own: Sequence[tf.Variable],
        update: _Update,
        grads: Gradients,
        tensors: Sequence[tf.Tensor],
    ) -> None:
        """Run an update, a function of dense gradients and further tensors.

        Args:
            kind: Equal for updates that differ in nothing but their own variables.
            own: The variables that only this update uses, in the order in which others of its kind have theirs.
            update: The function.
            grads: Its first argument.
            tensors: Its second argument.
        """
        inputs = list(map(tf.convert_to_tensor, grads)), list(map(tf.convert_to_tensor, tensors))
        program = self._programs.get(kind)
        if program is None or not program.can_have_others(self._of_all):
            program = self._programs[kind] = _traced(update, own, *inputs)
        program.call(own, *inputs)


class _Program(NamedTuple):
    """A program, with the variables of the update from which it was traced."""

    function: Any
    #: What the update captured: handles of variables, and other tensors.
    captured: Sequence[tf.Tensor]
    own: Sequence[tf.Tensor]

    def can_have_others(self, of_all: Sequence[tf.Tensor]) -> bool:
        """Return whether the program uses no variables but its own, which others can replace, and those of all."""
        known = {*map(id, self.own), *map(id, of_all)}
        return all(id(each) in known for each in self.captured if each.dtype == tf.resource)

    def call(self, own: Sequence[tf.Variable], grads: Sequence[tf.Tensor], tensors: Sequence[tf.Tensor]) -> None:
        """Run the program with other variables in the place of its own."""
        others = dict(zip(map(id, self.own), _handles(own), strict=True))
        self.function.set_external_captures([others.get(id(each), each) for each in self.captured])
        # A tape would otherwise need a gradient of the program.
        with unrecorded():
            self.function(grads, tensors)


def _traced(
    update: _Update, own: Sequence[tf.Variable], grads: Sequence[tf.Tensor], tensors: Sequence[tf.Tensor]
) -> _Program:
    # TensorFlow would take inner functions for one that is traced too often, because they share their code.
    traced = tf.function(functools.partial(_run, update), jit_compile=True, autograph=False)
    function = traced.get_concrete_function(grads, tensors)
    return _Program(function, function.captured_inputs, _handles(own))


def _run(update: _Update, grads: Gradients, tensors: Sequence[tf.Tensor]) -> None:
    update(grads, tensors)


def _handles(variables: Sequence[tf.Variable]) -> list[tf.Tensor]:
    return [variable.handle for variable in variables]
