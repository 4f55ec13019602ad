"""Check the ranges of what a script gives the BERT kit."""

import tensorflow as tf

from tfmp.core import settings


def at_least_0(name: str, value: float) -> float:
    """Return a setting as a finite float of at least 0.

    Args:
        name: The setting's name, for the error.
        value: What the user gave.

    Raises:
        TypeError: It is no number.
        ValueError: It is not finite, or below 0.

    Example:
        >>> at_least_0("init_lr", -0.5)
        Traceback (most recent call last):
            ...
        ValueError: init_lr must be at least 0, got -0.5.
    """
    if settings.number(name, value) < 0:
        raise ValueError(f"{name} must be at least 0, got {value!r}.")
    return float(value)


def below_1(name: str, value: float) -> float:
    """Return a setting as a float from 0 on, and below 1.

    Args:
        name: The setting's name, for the error.
        value: What the user gave.

    Raises:
        TypeError: It is no number.
        ValueError: It is out of range.
    """
    if not 0 <= settings.number(name, value) < 1:
        raise ValueError(f"{name} must be at least 0 and below 1, got {value!r}.")
    return float(value)


def rate(name: str, value: float | tf.Tensor | tf.Variable) -> float | tf.Tensor | tf.Variable:
    """Return a learning rate: a number of at least 0, or a tensor, whose value is not known yet.

    Args:
        name: The setting's name, for the error.
        value: What the user gave.

    Raises:
        TypeError: It is neither a number nor a floating-point tensor or variable.
        ValueError: It is a number out of range, or no scalar.

    Example:
        >>> rate("learning_rate", tf.constant([0.5, 0.25]))
        Traceback (most recent call last):
            ...
        ValueError: learning_rate must be a scalar, got the shape (2,).
    """
    if not tf.is_tensor(value):
        return at_least_0(name, value)
    tensor: tf.Tensor = value
    if not tensor.dtype.is_floating:
        raise TypeError(f"{name} must be of a floating-point type, got {tensor.dtype.base_dtype.name}.")
    if not tensor.shape.is_compatible_with([]):
        raise ValueError(f"{name} must be a scalar, got the shape {tensor.shape}.")
    return tensor
