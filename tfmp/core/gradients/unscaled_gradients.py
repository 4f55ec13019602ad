"""Tells which gradients of a step the user has unscaled before it."""

from collections.abc import Iterable, Sequence
from weakref import WeakValueDictionary

import numpy as np
import tensorflow as tf

from tfmp.core import lists
from tfmp.core.graph_search import ancestors
from tfmp.core.tensorflow_internals import number_of_tensor
from tfmp.types import Gradient


class UnscaledGradients:
    """The gradients that a method such as `GradScaler.unscale` got from the user, and those that it returned.

    A step may get gradients that the user clipped from what was returned. Two facts tell them from scaled ones: a
    tensor does not change, so what the method got is scaled; and TensorFlow numbers tensors in the order in which they
    are made, so what is older than the first result was not computed from the results. Weak references suffice: a
    tensor that is gone cannot be passed to a step.
    """

    def __init__(self) -> None:
        #: The number of gradients that were unscaled, without None.
        self.count = 0
        # The number of the tensor that was made first of what was returned; None if there is none.
        self._first: int | None = None
        self._given: WeakValueDictionary[int, object] = WeakValueDictionary()
        self._returned: WeakValueDictionary[int, object] = WeakValueDictionary()

    def add(self, given: Iterable[Gradient], returned: Iterable[Gradient]) -> int | None:
        """Remember the gradients that the user passed, and what was returned for them.

        Return the number of the tensor that was made first of what was returned; None if nothing in it is a tensor.
        """
        results = [lists.values(grad) for grad in returned if grad is not None]
        self.count += len(results)
        first = min((number for number in map(number_of_tensor, results) if number is not None), default=None)
        if first is not None and (self._first is None or first < self._first):
            self._first = first
        for known, tensors in ((self._returned, results), (self._given, map(lists.values, given))):
            for values in tensors:
                # Not numbers of Python: equal ones may be one object. Variables of Keras 3 are not those of TensorFlow.
                if isinstance(values, tf.Tensor | np.ndarray) or hasattr(values, "assign"):
                    known[id(values)] = values
        return first

    def got(self, grad: Gradient) -> bool:
        """Return whether the user passed this very gradient to be unscaled.

        Raises:
            RuntimeError: The gradient is a variable or an array: its values may have been replaced since.
        """
        values = lists.values(grad)
        if values is None or self._given.get(id(values)) is not values or self.returned(grad):
            return False
        if not isinstance(values, tf.Tensor):
            raise RuntimeError(
                f"a gradient is a {type(values).__name__} that was also passed to be unscaled, and its values may have "
                "been replaced since: pass on the gradients that were returned, or copy its values first: "
                "tf.identity(gradient)."
            )
        return True

    def returned(self, grad: Gradient) -> bool:
        """Return whether this very gradient was returned."""
        values = lists.values(grad)
        return values is not None and self._returned.get(id(values)) is values

    def precede(self, grad: Gradient) -> bool:
        """Return whether a gradient was certainly made before all that were returned."""
        number = number_of_tensor(lists.values(grad))
        return number is not None and self._first is not None and number < self._first


def is_computed_from_scaled(grad: Gradient, unscaled: Sequence[UnscaledGradients]) -> bool:
    """Return whether a gradient was computed from what was passed to be unscaled, and not from what was returned.

    Only the tensors of graphs know that. For all others the answer is False.
    """
    values = lists.values(grad)
    unscaled = [each for each in unscaled if each.count]
    if values is None or not unscaled or not tf.is_symbolic_tensor(values):
        return False
    if any(each.got(values) or each.returned(values) for each in unscaled):
        return False

    def is_older(op: tf.Operation) -> bool:
        return all(each.precede(output) for each in unscaled for output in op.outputs)

    uses_given = False
    for op in ancestors([values.op], ends_at=is_older):
        inputs = () if is_older(op) else op.inputs
        if any(each.returned(tensor) for each in unscaled for tensor in inputs):
            return False
        uses_given = uses_given or any(each.got(tensor) for each in unscaled for tensor in inputs)
    return uses_given


def is_zero(grad: Gradient) -> bool:
    """Return whether a gradient is known to be zero, in a graph by the op that makes it."""
    values = lists.values(grad)
    if not isinstance(values, tf.Tensor):
        return False
    known = tf.get_static_value(values)
    if known is None:
        return tf.is_symbolic_tensor(values) and values.op.type == "ZerosLike"
    return not np.any(known)
