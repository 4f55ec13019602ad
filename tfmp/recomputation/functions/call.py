"""One call of a recomputed function, as a function of its floating-point tensors."""

import weakref
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfmp.recomputation.structure import Differentiable


class Call:
    """A function with its arguments, whose floating-point tensors, `inputs`, can be replaced.

    Everything else (integers, bools, strings, None, variables) is handed over unchanged each time.

    Examples:
        >>> call = Call(lambda x, power: {"y": x**power}, (tf.constant(3.0), 2), {})
        >>> float(call.results(call.inputs).packed([tf.constant(9.0)])["y"])
        9.0
        >>> [float(tensor) for tensor in call.tensors([tf.constant(4.0)])]
        [16.0]
    """

    def __init__(self, function: Callable[..., object], args: Sequence[object], kwargs: Mapping[str, object]) -> None:
        self.name = getattr(function, "__qualname__", repr(function))
        self._function = function
        self._structure = (args, kwargs)
        self._arguments = Differentiable(self._structure)
        self.inputs = self._arguments.tensors

    def results(self, inputs: Sequence[tf.Tensor]) -> Differentiable:
        """Call the function with these floating-point tensors among its arguments, and return its results."""
        args, kwargs = self._arguments.packed(inputs)
        return Differentiable(self._function(*args, **kwargs))

    def tensors(self, inputs: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Call the function as `results` does, and return the floating-point tensors of its results."""
        return self.results(inputs).tensors

    def kind(self) -> Hashable:
        """Return what other calls of the same kind have in common: types, ranks and Python values of the arguments.

        It is None if an argument cannot be compared.
        """
        skeleton = repr(tf.nest.map_structure(lambda _: 0, self._structure))
        kind = (skeleton, *(_kind_of(leaf) for leaf in tf.nest.flatten(self._structure)))
        try:
            hash(kind)
        except TypeError:
            return None
        return kind


def _kind_of(leaf: Any) -> Hashable:  # noqa: ANN401 - an argument may be anything
    if isinstance(leaf, tf.Tensor | tf.Variable | np.ndarray):
        return type(leaf), leaf.dtype, len(leaf.shape)
    if leaf is None or isinstance(leaf, bool | int | float | complex | str | bytes | tf.DType):
        return type(leaf), leaf
    try:
        # What is remembered of an object must not keep it alive.
        return weakref.ref(leaf)
    except TypeError:
        return type(leaf), leaf
