"""Check the numbers that users pass."""

import math
import numbers

import numpy as np


def number(name: str, value: float) -> float:
    """Return a setting as a finite float.

    Args:
        name: The setting's name, for the error.
        value: What the user gave; NumPy's scalars are numbers too.

    Raises:
        TypeError: It is no number. A bool is none, though Python counts it among the integers.
        ValueError: It is infinite or NaN.

    Example:
        >>> number("decr_ratio", "0.5")
        Traceback (most recent call last):
            ...
        TypeError: decr_ratio must be a number, got '0.5' of type str.
    """
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name} must be a number, got {value!r} of type {type(value).__name__}.")
    if not math.isfinite(value):
        raise ValueError(f"{name} must be finite, got {value!r}.")
    return float(value)


def positive(name: str, value: float) -> float:
    """Return a setting as a finite float above 0.

    Args:
        name: The setting's name, for the error.
        value: What the user gave.

    Raises:
        TypeError: It is no number.
        ValueError: It is not finite, or not above 0.
    """
    if not number(name, value) > 0:
        raise ValueError(f"{name} must be greater than 0, got {value!r}.")
    return float(value)


def count(name: str, value: int) -> int:
    """Return a setting as a whole number from 1 to the largest int32.

    Args:
        name: The setting's name, for the error.
        value: What the user gave; 1000.0 is a whole number too.

    Raises:
        TypeError: It is no number.
        ValueError: It is not whole, or out of range.
    """
    if not (number(name, value).is_integer() and 1 <= value < 2**31):
        raise ValueError(f"{name} must be a whole number from 1 to 2**31 - 1, got {value!r}.")
    return int(value)


def loss_scale(name: str, value: float) -> np.float32:
    """Return a setting as a loss scale, in the type that it is kept in: 1e39 is infinite there.

    Args:
        name: The setting's name, for the error.
        value: What the user gave.

    Raises:
        TypeError: It is no number.
        ValueError: It is not finite as a float32, or below 1.
    """
    with np.errstate(over="ignore"):
        scale = np.float32(number(name, value))
    if not (np.isfinite(scale) and scale >= 1):
        raise ValueError(f"{name} must be a float32 number of at least 1, got {value!r}.")
    return scale
