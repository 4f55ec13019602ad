"""Keeps, on the device, the norm of the gradients of the last step."""

from typing import NamedTuple

import numpy as np
import tensorflow as tf

from tfmp.core.storage.state_variables import NotCheckpointed, StateVariables
from tfmp.types import Done


class _State(NamedTuple):
    gradient_norm: tf.Tensor


class GradientNorm(NotCheckpointed):
    """The norm of the gradients of the last step, NaN before the first one; it is not saved.

    Examples:
        >>> norm = GradientNorm()
        >>> norm.store(tf.constant(5.0, tf.float64))
        >>> float(norm.read())
        5.0
    """

    def __init__(self) -> None:
        super().__init__()
        self._state = StateVariables(_State(np.float64(np.nan)), saved=False)

    def store(self, norm: tf.Tensor) -> Done:
        """Store the norm of a step, a float64 scalar."""
        return self._state.assign(_State(norm))

    def read(self) -> tf.Tensor:
        """Return the stored norm, a float64 scalar."""
        return self._state.get("gradient_norm")
