"""Runs functions of tensors in eager code as graphs, so that Python does not run each of their operations."""

import functools
from collections.abc import Callable, Hashable
from typing import Any, TypeVar

import tensorflow as tf

from tfmp.core.tensorflow_internals import unrecorded

Returned = TypeVar("Returned")

#: How many graphs are kept: enough for the models of one program.
_MOST = 64


class EagerFunctions:
    """Runs functions of tensors that are called again and again: in eager code each as a graph that is traced once.

    While a graph is built, and on the replicas of a strategy, a function is called as it is. No gradient can be
    computed through a graph. The graphs used last are kept. Copies of this object are empty.

    Examples:
        >>> functions, traced = EagerFunctions(), []
        >>> def double(value):
        ...     traced.append(value)
        ...     return value * 2
        >>> [int(functions.call("double", double, tf.constant(value))) for value in (1, 2)], len(traced)
        ([2, 4], 1)
    """

    def __init__(self) -> None:
        self._graphs: dict[Hashable, Any] = {}

    def __reduce__(self) -> tuple[type["EagerFunctions"], tuple[()]]:
        return EagerFunctions, ()

    def call(self, key: Hashable, function: Callable[..., Returned], *tensors: tf.Tensor) -> Returned:
        """Call a function of tensors.

        Args:
            key: Equal for functions that do the same with tensors of the same shapes and types.
            function: The function. What it captures, such as variables, must not depend on anything but the key.
            tensors: Its arguments.
        """
        if not tf.executing_eagerly() or tf.distribute.has_strategy():
            return function(*tensors)
        full_key = key, *((tensor.dtype, tuple(tensor.shape)) for tensor in tensors)
        graph = self._graphs.pop(full_key, None)
        if graph is None:
            # Not the function itself: TensorFlow warns of functions that are traced often, and takes those that share
            # their code for one. The key has what TensorFlow would look for, which takes longer than small graphs.
            traced = tf.function(functools.partial(_call, function), autograph=False)
            graph = traced.get_concrete_function(*tensors)
        self._graphs[full_key] = graph
        while len(self._graphs) > _MOST:
            del self._graphs[next(iter(self._graphs))]
        with unrecorded():
            returned: Returned = graph(*tensors)
        return returned


def _call(function: Callable[..., Returned], *tensors: tf.Tensor) -> Returned | None:
    returned = function(*tensors)
    # A graph runs its ops also if nothing waits for them. Eager code has None in their place.
    return None if isinstance(returned, tf.Operation) else returned
