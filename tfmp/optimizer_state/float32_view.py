"""A variable in half precision, as the float32 variable that an optimizer computes with."""

from collections.abc import Callable
from typing import Any

import tensorflow as tf

#: Rounds float32 values to the type of a variable.
Rounding = Callable[[tf.Tensor], tf.Tensor]


class Float32View:
    """Reads a half-precision variable as float32, and rounds what is assigned to it.

    It has what the update of an optimizer uses of its variables: arithmetic, the ops of TensorFlow and Keras, and the
    methods that assign. Each assignment stores a rounded value, which is what the next read returns.

    Examples:
        >>> m = Float32View(tf.Variable([1.0, 2.0], dtype=tf.bfloat16), lambda values: tf.cast(values, tf.bfloat16))
        >>> m.assign_add([2.0**-12, 0.5])
        >>> (0.5 * m).numpy(), m.variable.dtype.name
        (array([0.5 , 1.25], dtype=float32), 'bfloat16')
    """

    dtype = tf.float32

    def __init__(self, variable: Any, rounding: Rounding, number: int = 0) -> None:  # noqa: ANN401 - of TensorFlow or Keras
        self.variable = variable if isinstance(variable, tf.Variable) else variable.value
        self.shape = self.variable.shape
        self.name = self.variable.name
        #: That of the view among those of an optimizer.
        self.number = number
        self._rounding = rounding

    @property
    def value(self) -> tf.Tensor:
        """The value in float32, as a tensor."""
        return tf.cast(self.variable, tf.float32)

    def numpy(self) -> Any:  # noqa: ANN401 - an array or a scalar of NumPy
        """Return the value in float32, as an array."""
        return self.value.numpy()

    def assign(self, value: tf.Tensor) -> None:
        """Round a value, and store it."""
        self.variable.assign(self._rounding(tf.cast(value, tf.float32)))

    def assign_add(self, delta: tf.Tensor) -> None:
        """Add to the value, and store the rounded sum."""
        self.assign(self.value + tf.cast(delta, tf.float32))

    def assign_sub(self, delta: tf.Tensor) -> None:
        """Subtract from the value, and store the rounded difference."""
        self.assign(self.value - tf.cast(delta, tf.float32))

    # The optimizers of Keras pass sparse values to the next three. Rounding changes no row that they do not name, since
    # the variable's type has its values.

    def scatter_update(self, rows: tf.IndexedSlices) -> None:
        """Assign to some rows."""
        self.assign(tf.tensor_scatter_nd_update(self.value, rows.indices[:, None], _float32_rows(rows)))

    def scatter_add(self, rows: tf.IndexedSlices) -> None:
        """Add to some rows; those with the same index are added together."""
        self.assign(tf.tensor_scatter_nd_add(self.value, rows.indices[:, None], _float32_rows(rows)))

    def scatter_sub(self, rows: tf.IndexedSlices) -> None:
        """Subtract from some rows; those with the same index are added together."""
        self.assign(tf.tensor_scatter_nd_sub(self.value, rows.indices[:, None], _float32_rows(rows)))

    def __tf_tensor__(self, dtype: tf.DType | None = None, name: str | None = None) -> tf.Tensor:
        """Convert to a tensor, as TensorFlow's functions do with what they are given."""
        return tf.cast(self.value, dtype or tf.float32, name)

    def __getitem__(self, index: Any) -> tf.Tensor:  # noqa: ANN401 - whatever a tensor takes
        return self.value[index]

    def __neg__(self) -> tf.Tensor:
        return -self.value

    def __add__(self, other: Any) -> tf.Tensor:  # noqa: ANN401 - a number, tensor or variable
        return self.value + other

    def __radd__(self, other: Any) -> tf.Tensor:  # noqa: ANN401 - a number, tensor or variable
        return other + self.value

    def __sub__(self, other: Any) -> tf.Tensor:  # noqa: ANN401 - a number, tensor or variable
        return self.value - other

    def __rsub__(self, other: Any) -> tf.Tensor:  # noqa: ANN401 - a number, tensor or variable
        return other - self.value

    def __mul__(self, other: Any) -> tf.Tensor:  # noqa: ANN401 - a number, tensor or variable
        return self.value * other

    def __rmul__(self, other: Any) -> tf.Tensor:  # noqa: ANN401 - a number, tensor or variable
        return other * self.value

    def __truediv__(self, other: Any) -> tf.Tensor:  # noqa: ANN401 - a number, tensor or variable
        return self.value / other

    def __rtruediv__(self, other: Any) -> tf.Tensor:  # noqa: ANN401 - a number, tensor or variable
        return other / self.value

    def __abs__(self) -> tf.Tensor:
        return abs(self.value)

    def __lt__(self, other: Any) -> tf.Tensor:  # noqa: ANN401 - a number, tensor or variable
        return self.value < other

    def __le__(self, other: Any) -> tf.Tensor:  # noqa: ANN401 - a number, tensor or variable
        return self.value <= other

    def __gt__(self, other: Any) -> tf.Tensor:  # noqa: ANN401 - a number, tensor or variable
        return self.value > other

    def __ge__(self, other: Any) -> tf.Tensor:  # noqa: ANN401 - a number, tensor or variable
        return self.value >= other

    def __rpow__(self, base: Any) -> tf.Tensor:  # noqa: ANN401 - a number, tensor or variable
        return base**self.value

    def __pow__(self, exponent: Any) -> tf.Tensor:  # noqa: ANN401 - a number, tensor or variable
        return self.value**exponent


def _float32_rows(rows: tf.IndexedSlices) -> tf.Tensor:
    return tf.cast(rows.values, tf.float32)
