"""The type aliases that the modules of tfmp share."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias

import tensorflow as tf

#: The gradient of a loss for one variable; None if the loss does not depend on the variable.
Gradient: TypeAlias = tf.Tensor | tf.IndexedSlices | None

#: One gradient for each variable, in the order of the variables.
Gradients: TypeAlias = Sequence[Gradient]

#: Pairs of a gradient and its variable, the argument of `apply_gradients` in every host framework.
GradsAndVars: TypeAlias = Iterable[tuple[Gradient, Any]]

#: Makes one variable that is not trained, from its name and initial value. A Keras optimizer is only asked for scalars.
AddVariable: TypeAlias = Callable[[str, Any], tf.Variable]

#: Makes one variable of zeros that is not trained, from its name, shape and dtype. Each replica has values of its own.
AddBuffer: TypeAlias = Callable[[str, Sequence[int], tf.DType], tf.Variable]

#: A loss; or, in eager mode, a function without arguments that computes it.
Loss: TypeAlias = tf.Tensor | Callable[[], tf.Tensor]

#: The op that does something in a graph; None in eager mode, where it has been done already.
Done: TypeAlias = tf.Operation | None

#: What one replica has and others may not have: gradients and other tensors, in any structure.
Held: TypeAlias = Any

#: Takes what one replica holds, and changes variables.
ChangeVariables: TypeAlias = Callable[[Held], Done]
