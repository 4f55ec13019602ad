"""The scales of Keras' float8 layers that follow the loss scale."""

from collections.abc import Iterable
from typing import Any

import tensorflow as tf

from tfmp.core.adapters import is_overwritten, names_of

#: The weights of Keras' float8 layers that tell how large the gradients of their outputs are. Keras has no other way to
#: tell them from those for inputs and kernels, which the loss scale does not change.
_OF_GRADIENTS = ("outputs_grad_scale", "outputs_grad_amax_history")


def refuse_divided_next_values(variables: Iterable[Any]) -> None:
    """Raise `ValueError` if a variable is a scale of float8; for gradients that the user has unscaled."""
    names = names_of(filter(is_overwritten, variables))
    if names:
        raise ValueError(
            f"the gradients of {', '.join(names)} are the next values of these scales of float8, and "
            "get_unscaled_gradients divided them by the loss scale: call scale_loss, and pass its gradients on as they "
            "are. The inner optimizer can clip them."
        )


def scales_of_gradients(variables: Iterable[Any]) -> list[Any]:
    """Return the weights of float8 layers that hold the size of scaled gradients."""
    return [variable for variable in variables if is_overwritten(variable) and variable.name in _OF_GRADIENTS]


def follow(scales: Iterable[Any], before: tf.Tensor, after: tf.Tensor) -> None:
    """Change weights that hold the size of scaled gradients as the loss scale has changed in a step.

    Keras learns the size from the gradients of two steps before. After the loss scale has doubled, gradients would be
    cut off in two steps.
    """
    ratio = tf.cast(after, tf.float32) / tf.cast(before, tf.float32)
    for scale in scales:
        scale.assign(scale * ratio)
