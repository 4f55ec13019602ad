"""Check the numbers that users pass."""

import math
import numbers

import numpy as np

#: The smallest positive float32 that is normal: processors may take what is less for 0.
LOWEST_LOSS_SCALE = 2.0**-126


def is_number(value: object) -> bool:
    """Tell whether a setting is a number. A bool is none, though Python counts it among the integers.

    Args:
        value: What the user gave; NumPy's scalars are numbers too.
    """
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def real(name: str, value: float) -> float:
    """Return a setting as a float, which may be infinite or NaN.

    Args:
        name: The setting's name, for the error.
        value: What the user gave.

    Raises:
        TypeError: It is no number.
    """
    if not is_number(value):
        raise TypeError(f"{name} must be a number, got {value!r} of type {type(value).__name__}.")
    return float(value)


def number(name: str, value: float) -> float:
    """Return a setting as a finite float.

    Args:
        name: The setting's name, for the error.
        value: What the user gave.

    Raises:
        TypeError: It is no number.
        ValueError: It is infinite or NaN.

    Example:
        >>> number("decr_ratio", "0.5")
        Traceback (most recent call last):
            ...
        TypeError: decr_ratio must be a number, got '0.5' of type str.
    """
    if not math.isfinite(real(name, value)):
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


def at_least_0(name: str, value: float) -> float:
    """Return a setting as a finite float of at least 0.

    Args:
        name: The setting's name, for the error.
        value: What the user gave.

    Raises:
        TypeError: It is no number.
        ValueError: It is not finite, or below 0.
    """
    if number(name, value) < 0:
        raise ValueError(f"{name} must be at least 0, got {value!r}.")
    return float(value)


def below_1(name: str, value: float) -> float:
    """Return a setting as a float of at least 0 and less than 1.

    Args:
        name: The setting's name, for the error.
        value: What the user gave.

    Raises:
        TypeError: It is no number.
        ValueError: It is out of range.
    """
    if not 0 <= number(name, value) < 1:
        raise ValueError(f"{name} must be at least 0 and less than 1, got {value!r}.")
    return float(value)


def flag(name: str, value: bool) -> bool:
    """Return a setting that is True or False.

    Args:
        name: The setting's name, for the error.
        value: What the user gave.

    Raises:
        TypeError: It is neither.
    """
    if not isinstance(value, bool | np.bool_):
        raise TypeError(f"{name} must be True or False, got {value!r} of type {type(value).__name__}.")
    return bool(value)


def count(name: str, value: float, least: int = 1) -> int:
    """Return a setting as a whole number, up to the largest int32.

    Args:
        name: The setting's name, for the error.
        value: What the user gave; 1000.0 is a whole number too.
        least: The smallest number that is taken.

    Raises:
        TypeError: It is no number.
        ValueError: It is not whole, or out of range.
    """
    if not (number(name, value).is_integer() and least <= value < 2**31):
        raise ValueError(f"{name} must be a whole number from {least} to 2**31 - 1, got {value!r}.")
    return int(value)


def loss_scale(name: str, value: float, least: float = 1.0) -> np.float32:
    """Return a setting as a loss scale, in the type that it is kept in: 1e39 is infinite there.

    Args:
        name: The setting's name, for the error.
        value: What the user gave.
        least: The lowest scale that is taken.

    Raises:
        TypeError: It is no number.
        ValueError: It is not finite as a float32, or below `least`.
    """
    with np.errstate(over="ignore"):
        scale = np.float32(number(name, value))
    if not (np.isfinite(scale) and scale >= least):
        raise ValueError(f"{name} must be a float32 number of at least {least:g}, got {value!r}.")
    return scale


def loss_scale_bounds(
    init_loss_scale: float, min_loss_scale: float, max_loss_scale: float
) -> tuple[np.float32, np.float32, np.float32]:
    """Return a manager's first, lowest and highest scale.

    Args:
        init_loss_scale: The first scale.
        min_loss_scale: The lowest; at least 2**-126, since the reciprocal of what is less can be infinite.
        max_loss_scale: The highest.

    Raises:
        TypeError: One is no number.
        ValueError: One is out of range, or they are not in order.

    Example:
        >>> loss_scale_bounds(0.5, 1, 1024)
        Traceback (most recent call last):
            ...
        ValueError: init_loss_scale must be a float32 number of at least 1, got 0.5.
    """
    lowest = loss_scale("min_loss_scale", min_loss_scale, least=LOWEST_LOSS_SCALE)
    highest = loss_scale("max_loss_scale", max_loss_scale, least=LOWEST_LOSS_SCALE)
    if not lowest <= highest:
        raise ValueError(
            f"min_loss_scale must not be greater than max_loss_scale, got {min_loss_scale!r} and {max_loss_scale!r}."
        )
    first = loss_scale("init_loss_scale", init_loss_scale, least=float(lowest))
    if not first <= highest:
        raise ValueError(
            f"init_loss_scale must not be greater than max_loss_scale, got {init_loss_scale!r} and {max_loss_scale!r}."
        )
    return first, lowest, highest
