"""A variable in half precision, as the float32 variable that an optimizer computes with."""

import operator
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfmp.optimizer_state.rounded_results import Computation, rounded_result

#: Returns the integers from which the random numbers of a rounding follow, given the number of the view; None rounds to
#: the nearest value.
Seed = Callable[[tf.Tensor | int], Sequence[tf.Tensor | int] | None]


class Float32View:
    """Reads a half-precision variable as float32, and rounds what is assigned to it.

    It has what the update of an optimizer uses of its variables: arithmetic, the ops of TensorFlow and Keras, and the
    methods that assign. Each assignment stores a rounded value, which is what the next read returns.

    Examples:
        >>> m = Float32View(tf.Variable([1.0, 2.0], dtype=tf.bfloat16), seed=lambda number: None)
        >>> m.assign_add([2.0**-12, 0.5])
        >>> (0.5 * m).numpy(), m.variable.dtype.name
        (array([0.5 , 1.25], dtype=float32), 'bfloat16')
    """

    dtype = tf.float32

    def __init__(self, variable: Any, seed: Seed, number: int = 0) -> None:  # noqa: ANN401 - of TensorFlow or Keras
        self.variable = variable if isinstance(variable, tf.Variable) else variable.value
        self.shape = self.variable.shape
        self.name = self.variable.name
        #: That of the view among those of an optimizer.
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
        self._assign(_itself, value)

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
        self.assign(tf.tensor_scatter_nd_update(self.value, rows.indices[:, None], _float32_rows(rows)))

    def scatter_add(self, rows: tf.IndexedSlices) -> None:
        """Add to some rows; those with the same index are added together."""
        self.assign(tf.tensor_scatter_nd_add(self.value, rows.indices[:, None], _float32_rows(rows)))

    def scatter_sub(self, rows: tf.IndexedSlices) -> None:
        """Subtract from some rows; those with the same index are added together."""
        self.assign(tf.tensor_scatter_nd_sub(self.value, rows.indices[:, None], _float32_rows(rows)))

    def _assign(self, compute: Computation, *values: Any) -> None:  # noqa: ANN401 - what TensorFlow converts
        self.variable.assign(
            rounded_result(compute, list(map(_tensor, values)), self.variable.dtype, self._seed(self.number))
        )

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


def _itself(value: tf.Tensor) -> tf.Tensor:
    return value


def _tensor(value: Any) -> tf.Tensor:  # noqa: ANN401 - what TensorFlow converts
    # A variable is read as it is, and becomes float32 in the program that rounds.
    return tf.convert_to_tensor(value if isinstance(value, tf.Variable) else tf.cast(value, tf.float32))


def _float32_rows(rows: tf.IndexedSlices) -> tf.Tensor:
    return tf.cast(rows.values, tf.float32)
