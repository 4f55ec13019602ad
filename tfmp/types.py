"""The unions that tfmp's modules share, named once."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias

import tensorflow as tf

#: What a host's autodiff returns for one variable; None where the loss does not depend on it.
Gradient: TypeAlias = tf.Tensor | tf.IndexedSlices | None

#: One gradient for each variable, in the variables' order.
Gradients: TypeAlias = Sequence[Gradient]

#: Pairs of a gradient and its variable, as optimizers of all hosts take them.
GradsAndVars: TypeAlias = Iterable[tuple[Gradient, Any]]

#: Makes one non-trainable variable from its name and initial value; scalars are all that Keras is asked to hold.
AddVariable: TypeAlias = Callable[[str, Any], tf.Variable]

#: Makes one non-trainable variable of zeros from its name, shape and type; each replica has its own values in it.
AddBuffer: TypeAlias = Callable[[str, Sequence[int], tf.DType], tf.Variable]

#: A loss, or what computes it (eager execution).
Loss: TypeAlias = tf.Tensor | Callable[[], tf.Tensor]

#: Applies the gradients of one replica to its variables: the wrapped optimizer.
ApplyGradients: TypeAlias = Callable[[Gradients], tf.Operation]
