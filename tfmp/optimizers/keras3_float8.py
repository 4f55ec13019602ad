"""The scales of Keras' float8 layers that follow the loss scale."""

from collections.abc import Iterable
from typing import Any

import tensorflow as tf

from tfmp.core.adapters import is_overwritten

#: The weights of Keras' float8 layers that tell how large the gradients of their outputs are. Keras has no other way to
#: tell them from those for inputs and kernels, which the loss scale does not change.
_OF_GRADIENTS = ("outputs_grad_scale", "outputs_grad_amax_history")


def scales_of_gradients(variables: Iterable[Any]) -> list[Any]:
    """Return the weights of float8 layers that hold the size of scaled gradients."""
    return [variable for variable in variables if is_overwritten(variable) and variable.name in _OF_GRADIENTS]


def follow(scales: Iterable[Any], before: tf.Tensor, after: tf.Tensor) -> None:
    """Change weights that hold the size of scaled gradients as the loss scale has changed.

    Keras learns the size from the gradients of two steps before. After the loss scale has doubled, gradients would be
    cut off in two steps.

    Args:
        scales: The weights.
        before: The loss scale that the gradients of the last step had.
        after: The loss scale that the gradients of the next step will have.
    """
    ratio = tf.cast(after, tf.float32) / tf.cast(before, tf.float32)
    for scale in scales:
        scale.assign(scale * ratio)
