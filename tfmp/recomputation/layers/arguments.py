"""What a wrapper takes for a layer, whichever Keras it is of: its arguments, and tensors with masks."""

import inspect
from typing import Any

import tensorflow as tf

from tfmp.any_keras.internals import mask_of, set_mask


def with_training(signature: inspect.Signature) -> inspect.Signature:
    """Return a signature that takes `training`, which the second call must be given.

    In the first call, a layer whose `call` does not take it hands it down to its own layers all the same, by a context
    that does not exist any more when the second call is made.

    Examples:
        >>> with_training(inspect.signature(lambda x, **options: x))
        <Signature (x, *, training=None, **options)>
    """
    parameters = list(signature.parameters.values())
    if "training" in signature.parameters:
        return signature
    training = inspect.Parameter("training", inspect.Parameter.KEYWORD_ONLY, default=None)
    at_end = bool(parameters) and parameters[-1].kind is inspect.Parameter.VAR_KEYWORD
    return signature.replace(
        parameters=[*parameters[:-1], training, parameters[-1]] if at_end else [*parameters, training]
    )


def masked(tensor: tf.Tensor, like: Any) -> tf.Tensor:  # noqa: ANN401 - a tensor or a variable of any kind
    """Return the tensor with the mask of another one: a copy of a tensor loses the mask that Keras gave it."""
    mask = mask_of(like)
    if mask is not None:
        set_mask(tensor, mask)
    return tensor
