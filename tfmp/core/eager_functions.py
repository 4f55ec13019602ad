"""Runs functions of tensors in eager code as graphs, so that Python does not run each of their operations."""

import functools
from collections.abc import Callable, Hashable
from typing import Any, TypeVar

import tensorflow as tf

from tfmp.core.tensorflow_internals import unrecorded

Returned = TypeVar("Returned")

#: How many functions are known: enough for the models of one program.
_MOST = 64

#: How often a function runs op by op. A trace takes about 20 ms, with the first run of its graph, and then saves 0.2 to
#: 0.3 ms in each call. So this many calls cost about as much as the trace, and a short program never pays for it.
_CALLS_BEFORE_TRACE = 64


class _Known:
    """A function that was called before."""

    def __init__(self) -> None:
        #: How often it was called.
        self.calls = 0
        #: The graph, once the function is traced.
        self.graph: Any = None


class EagerFunctions:
    """Runs functions of tensors that are called again and again: in eager code each as a graph that is traced once.

    The first calls run a function op by op, until so many calls show that a trace pays. While a graph is built, and on
    the replicas of a strategy, a function is called as it is. No gradient can be computed through a call. What was
    called last is kept. Copies of this object are empty.

    Examples:
        >>> functions, ran_in_python = EagerFunctions(), []
        >>> def double(value):
        ...     ran_in_python.append(value)
        ...     return value * 2
        >>> sum(int(functions.call("double", double, tf.constant(1))) for _ in range(100)), len(ran_in_python)
        (200, 65)
    """

    def __init__(self) -> None:
        self._known: dict[Hashable, _Known] = {}

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
        known = self._known.pop(full_key, None) or _Known()
        self._known[full_key] = known
        while len(self._known) > _MOST:
            del self._known[next(iter(self._known))]
        known.calls += 1
        if known.calls > _CALLS_BEFORE_TRACE and known.graph is None:
            # Not the function itself: TensorFlow warns of functions that are traced often, and takes those that share
            # their code for one. The key has what TensorFlow would look for, which takes longer than small graphs.
            traced = tf.function(functools.partial(_call, function), autograph=False)
            known.graph = traced.get_concrete_function(*tensors)
        with unrecorded():
            returned: Returned = (known.graph or function)(*tensors)
        return returned


def _call(function: Callable[..., Returned], *tensors: tf.Tensor) -> Returned | None:
    returned = function(*tensors)
    # A graph runs its ops also if nothing waits for them. Eager code has None in their place.
    return None if isinstance(returned, tf.Operation) else returned
