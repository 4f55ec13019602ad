"""A variable in half precision, as the float32 variable that an optimizer computes with."""

import operator
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfmp.optimizer_state.rounding import Computation, Seed, rounded_result


def _of_value(operation: str) -> Callable[..., tf.Tensor]:
    """Return a method that does with its view's value what the method of this name of a tensor does."""
    return lambda view, *others: getattr(view.value, operation)(*others)


class Float32View:
    """Reads a half-precision variable as float32, and rounds what is assigned to it.

    It has what the update of an optimizer uses of its variables: arithmetic, the ops of TensorFlow and Keras, and the
    methods that assign. `seed` returns the seed of a rounding, given the number of the view in its optimizer.

    Examples:
        >>> m = Float32View(tf.Variable([1.0, 2.0], dtype=tf.bfloat16), seed=lambda number: None)
        >>> m.assign_add([2.0**-12, 0.5])
        >>> (0.5 * m).numpy(), m.variable.dtype.name
        (array([0.5 , 1.25], dtype=float32), 'bfloat16')
    """

    dtype = tf.float32

    def __init__(self, variable: Any, seed: Callable[[tf.Tensor | int], Seed], number: int = 0) -> None:  # noqa: ANN401 - of TensorFlow or Keras
        self.variable = variable if isinstance(variable, tf.Variable) else variable.value
        self.shape = self.variable.shape
        self.name = self.variable.name
        self.number: tf.Tensor | int = number
        self._seed = seed

    @property
    def value(self) -> tf.Tensor:
        """The value in float32, as a tensor."""
        return tf.cast(self.variable, tf.float32)

    def numpy(self) -> Any:  # noqa: ANN401 - an array or a scalar of NumPy
        """Return the value in float32, as an array."""
        return self.value.numpy()

    def assign(self, value: tf.Tensor) -> None:
        """Round a value, and store it."""
        self._assign(tf.identity, value)

    def assign_add(self, delta: tf.Tensor) -> None:
        """Add to the value, and store the rounded sum."""
        self._assign(operator.add, self.variable, delta)

    def assign_sub(self, delta: tf.Tensor) -> None:
        """Subtract from the value, and store the rounded difference."""
        self._assign(operator.sub, self.variable, delta)

    # The optimizers of Keras pass sparse values to the next three. Rounding changes no row that they do not name, since
    # the variable's type has its values.

    def scatter_update(self, rows: tf.IndexedSlices) -> None:
        """Assign to some rows."""
        self._scatter(tf.tensor_scatter_nd_update, rows)

    def scatter_add(self, rows: tf.IndexedSlices) -> None:
        """Add to some rows; those with the same index are added together."""
        self._scatter(tf.tensor_scatter_nd_add, rows)

    def scatter_sub(self, rows: tf.IndexedSlices) -> None:
        """Subtract from some rows; those with the same index are added together."""
        self._scatter(tf.tensor_scatter_nd_sub, rows)

    def _scatter(self, changed: Callable[..., tf.Tensor], rows: tf.IndexedSlices) -> None:
        self.assign(changed(self.value, rows.indices[:, None], tf.cast(rows.values, tf.float32)))

    def _assign(self, compute: Computation, *values: Any) -> None:  # noqa: ANN401 - what TensorFlow converts
        # A variable is read as it is, and becomes float32 in the program that rounds.
        tensors = [
            tf.convert_to_tensor(value) if isinstance(value, tf.Variable) else tf.cast(value, tf.float32)
            for value in values
        ]
        self.variable.assign(rounded_result(compute, tensors, self.variable.dtype, self._seed(self.number)))

    def __tf_tensor__(self, dtype: tf.DType | None = None, name: str | None = None) -> tf.Tensor:
        """Convert to a tensor, as TensorFlow's functions do with what they are given."""
        return tf.cast(self.value, dtype or tf.float32, name)

    __getitem__ = _of_value("__getitem__")
    __neg__ = _of_value("__neg__")
    __abs__ = _of_value("__abs__")
    __add__ = _of_value("__add__")
    __radd__ = _of_value("__radd__")
    __sub__ = _of_value("__sub__")
    __rsub__ = _of_value("__rsub__")
    __mul__ = _of_value("__mul__")
    __rmul__ = _of_value("__rmul__")
    __truediv__ = _of_value("__truediv__")
    __rtruediv__ = _of_value("__rtruediv__")
    __pow__ = _of_value("__pow__")
    __rpow__ = _of_value("__rpow__")
    __lt__ = _of_value("__lt__")
    __le__ = _of_value("__le__")
    __gt__ = _of_value("__gt__")
    __ge__ = _of_value("__ge__")
