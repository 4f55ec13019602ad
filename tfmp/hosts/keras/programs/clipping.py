"""Clips gradients by their global norm in the place of an optimizer of Keras, where the norm is known already."""

from typing import Any, TypeAlias

import tensorflow as tf

from tfmp.types import Gradients

# The optimizers of Keras 2 and Keras 3 have no common base class.
_Optimizer: TypeAlias = Any


def clips_by_global_norm(optimizer: _Optimizer) -> bool:
    """Return whether the optimizer clips the gradients of every call by their global norm."""
    # If both settings are there, Keras uses clipnorm only. An optimizer that accumulates gradients clips their sums, at
    # the end of each window.
    clips = _is_positive(optimizer.global_clipnorm) and not _is_positive(optimizer.clipnorm)
    return clips and not getattr(optimizer, "gradient_accumulation_steps", None)


def _is_positive(norm: float | None) -> bool:
    return norm is not None and norm > 0


def true_norm(norm: tf.Tensor, loss_scale: tf.Tensor) -> tf.Tensor:
    """Return the global norm after unscaling of gradients whose norm before is known, in float64."""
    return tf.cast(norm / tf.cast(loss_scale, tf.float64), tf.float32)


def clipped_by(norm: tf.Tensor, grads: Gradients, optimizer: _Optimizer) -> Gradients:
    """Return gradients as the optimizer clips them by their global norm.

    Args:
        norm: The norm.
        grads: The gradients, unscaled.
        optimizer: The optimizer.
    """
    factor = tf.minimum(optimizer.global_clipnorm / norm, 1.0)
    # The multiplication makes sparse gradients dense, as Keras' own clipping does.
    return [None if grad is None else grad * tf.cast(factor, grad.dtype) for grad in grads]
