"""The tensors of a nested structure that gradients flow through."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeGuard

import tensorflow as tf

from tfmp.core.tracing import without_autograph


def is_differentiable(value: object) -> TypeGuard[tf.Tensor]:
    """Return whether a value is a tensor that may have a gradient.

    Examples:
        >>> is_differentiable(tf.constant(1.0)), is_differentiable(tf.constant(1)), is_differentiable(1.0)
        (True, False, False)
    """
    return isinstance(value, tf.Tensor) and (value.dtype.base_dtype.is_floating or value.dtype.base_dtype.is_complex)


class Tensors:
    """The tensors of a structure, and a way to put others in their place.

    The structure may be any nest of `tf.nest`, also with `tf.SparseTensor` and other composite tensors. All tensors are
    meant, or those for which `wanted` returns true.

    Examples:
        >>> found = Tensors({"x": tf.constant(1.0), "n": tf.constant(3), "name": "a"})
        >>> [float(tensor) for tensor in found.tensors]
        [3.0, 1.0]
        >>> found.packed([tf.constant(4), tf.constant(2.0)])["name"]
        'a'
    """

    def __init__(self, structure: object, wanted: Callable[[object], bool] | None = None) -> None:
        self.structure = structure
        self._wanted = wanted or _is_tensor
        self._leaves = [(leaf, _components(leaf)) for leaf in tf.nest.flatten(structure)]
        components = [each for _, components in self._leaves for each in components]
        self.tensors: list[Any] = list(filter(self._wanted, components))

    @without_autograph
    def packed(self, tensors: Sequence[tf.Tensor]) -> Any:  # noqa: ANN401 - of the structure's type
        """Return the structure with other tensors in place of its own, in the order of `tensors`."""
        others = iter(tensors)
        leaves = [self._replaced(leaf, components, others) for leaf, components in self._leaves]
        return tf.nest.pack_sequence_as(self.structure, leaves)

    def _replaced(self, leaf: object, components: list[object], others: Iterator[tf.Tensor]) -> object:
        if not any(map(self._wanted, components)):
            return leaf
        replaced = [next(others) if self._wanted(each) else each for each in components]
        return tf.nest.pack_sequence_as(leaf, replaced, expand_composites=True)


class Differentiable(Tensors):
    """The floating-point and complex tensors of a structure, and a way to put others in their place."""

    def __init__(self, structure: object) -> None:
        super().__init__(structure, is_differentiable)


def _components(leaf: object) -> list[object]:
    # A variable is a composite of its handle, which must stay in one piece.
    if isinstance(leaf, tf.Tensor | tf.Variable):
        return [leaf]
    components: list[object] = tf.nest.flatten(leaf, expand_composites=True)
    return components


def _is_tensor(value: object) -> bool:
    return isinstance(value, tf.Tensor)
