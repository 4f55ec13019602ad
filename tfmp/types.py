"""Type aliases that tfmp's modules share."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias

import tensorflow as tf

#: The gradient of a loss with respect to one variable; None if the loss does not depend on the variable.
Gradient: TypeAlias = tf.Tensor | tf.IndexedSlices | None

#: One gradient for each variable, in the order of the variables.
Gradients: TypeAlias = Sequence[Gradient]

#: Pairs of a gradient and its variable, as the optimizers of TensorFlow 1 and of every Keras accept them.
GradsAndVars: TypeAlias = Iterable[tuple[Gradient, Any]]

#: Creates a non-trainable variable from its name and initial value. A variable that Keras creates this way is a scalar.
AddVariable: TypeAlias = Callable[[str, Any], tf.Variable]

#: Creates a non-trainable variable of zeros from its name, shape and type. Each replica stores its own values in it.
AddBuffer: TypeAlias = Callable[[str, Sequence[int], tf.DType], tf.Variable]

#: A loss, or (in eager execution) a function without arguments that computes it.
Loss: TypeAlias = tf.Tensor | Callable[[], tf.Tensor]

#: Applies the gradients of one replica to its variables, by means of the wrapped optimizer.
ApplyGradients: TypeAlias = Callable[[Gradients], tf.Operation]
