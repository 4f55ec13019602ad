"""The tensors of a nested structure that gradients flow through."""

from collections.abc import Iterator, Sequence
from typing import Any, TypeGuard

import tensorflow as tf


class Differentiable:
    """The floating-point and complex tensors of a structure, and a way to put others in their place.

    Args:
        structure: Any nest of `tf.nest`, also with `tf.SparseTensor` and other composite tensors.

    Examples:
        >>> found = Differentiable({"x": tf.constant(1.0), "n": tf.constant(3), "name": "a"})
        >>> [float(tensor) for tensor in found.tensors]
        [1.0]
        >>> packed = found.packed([tf.constant(2.0)])
        >>> float(packed["x"]), int(packed["n"]), packed["name"]
        (2.0, 3, 'a')
    """

    def __init__(self, structure: object) -> None:
        self._structure = structure
        self._leaves = [(leaf, _components(leaf)) for leaf in tf.nest.flatten(structure)]
        self.tensors = [each for _, components in self._leaves for each in components if is_differentiable(each)]

    def packed(self, tensors: Sequence[tf.Tensor]) -> Any:  # noqa: ANN401 - of the structure's type
        """Return the structure with other tensors in place of its own.

        Args:
            tensors: As many as there are in `tensors`, in their order.
        """
        others = iter(tensors)
        leaves = [_replaced(leaf, components, others) for leaf, components in self._leaves]
        return tf.nest.pack_sequence_as(self._structure, leaves)


def is_differentiable(value: object) -> TypeGuard[tf.Tensor]:
    """Return whether a value is a tensor that may have a gradient.

    Examples:
        >>> is_differentiable(tf.constant(1.0)), is_differentiable(tf.constant(1)), is_differentiable(1.0)
        (True, False, False)
    """
    return isinstance(value, tf.Tensor) and (value.dtype.base_dtype.is_floating or value.dtype.base_dtype.is_complex)


def _components(leaf: object) -> list[object]:
    # A variable is a composite of its handle, which must stay in one piece.
    if isinstance(leaf, tf.Tensor | tf.Variable):
        return [leaf]
    components: list[object] = tf.nest.flatten(leaf, expand_composites=True)
    return components


def _replaced(leaf: object, components: list[object], others: Iterator[tf.Tensor]) -> object:
    if not any(is_differentiable(each) for each in components):
        return leaf
    replaced = [next(others) if is_differentiable(each) else each for each in components]
    return tf.nest.pack_sequence_as(leaf, replaced, expand_composites=True)
