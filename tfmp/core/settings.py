"""Checks the settings that users pass, and returns each in the type that it is used in.

A value of another type is a `TypeError`, one out of range a `ValueError`; the message has the name and the value.
"""

import inspect
import math
import numbers
import re
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

#: The smallest normal float32. Smaller positive numbers are denormal, and some processors replace them by 0.
LOWEST_LOSS_SCALE = 2.0**-126


def is_number(value: object) -> bool:
    """Return whether a setting is a number of Python or NumPy. A bool does not count, although it is an `int`."""
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def number(name: str, value: float, *, is_finite: bool = True) -> float:
    """Return a setting as a float; infinities and NaN are refused if it `is_finite`."""
    if not is_number(value):
        raise TypeError(f"{name} must be a number, got {value!r} of type {type(value).__name__}.")
    try:
        found = float(value)
    except OverflowError:
        raise ValueError(
            f"{name} must be within the range of a float, got about 2**{int(value).bit_length()}."
        ) from None
    if is_finite and not math.isfinite(found):
        raise ValueError(f"{name} must be finite, got {value!r}.")
    return found


def positive(name: str, value: float) -> float:
    """Return a setting as a float that is finite and greater than 0."""
    if not number(name, value) > 0:
        raise ValueError(f"{name} must be greater than 0, got {value!r}.")
    return float(value)


def at_least_0(name: str, value: float) -> float:
    """Return a setting as a float that is finite and at least 0."""
    if number(name, value) < 0:
        raise ValueError(f"{name} must be at least 0, got {value!r}.")
    return float(value)


def below_1(name: str, value: float) -> float:
    """Return a setting as a float that is at least 0 and less than 1."""
    if not 0 <= number(name, value) < 1:
        raise ValueError(f"{name} must be at least 0 and less than 1, got {value!r}.")
    return float(value)


def flag(name: str, value: bool) -> bool:
    """Return a setting as a bool; NumPy's bool is accepted, 0 and 1 are not."""
    if not isinstance(value, bool | np.bool_):
        raise TypeError(f"{name} must be True or False, got {value!r} of type {type(value).__name__}.")
    return bool(value)


def count(name: str, value: float, least: int = 1) -> int:
    """Return a setting as a whole number, at least `least`, that fits into an int32; 1000.0 is accepted too."""
    if not (number(name, value).is_integer() and least <= value < 2**31):
        raise ValueError(f"{name} must be a whole number from {least} to 2**31 - 1, got {value!r}.")
    return int(value)


def loss_scale(name: str, value: float, least: float = 1.0) -> np.float32:
    """Return a setting as a loss scale of at least `least`, in float32, where 1e39 for example is infinite."""
    # NumPy would warn of a number that is too large for float32. The check below raises an error instead.
    with np.errstate(over="ignore"):
        scale = np.float32(number(name, value))
    if not (np.isfinite(scale) and scale >= least):
        cure = ": a manager with a lower min_loss_scale allows it" if LOWEST_LOSS_SCALE <= scale < least else ""
        raise ValueError(f"{name} must be a float32 number of at least {least:g}, got {value!r}{cure}.")
    return scale


def loss_scale_bounds(
    init_loss_scale: float, min_loss_scale: float, max_loss_scale: float
) -> tuple[np.float32, np.float32, np.float32]:
    """Return a manager's first, lowest and highest scale as float32 numbers, after checking their order.

    The lowest scale must be at least 2**-126: the reciprocal of a smaller number can be infinite.
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


def refuse_class(name: str, value: object) -> None:
    """Refuse a class where an object of it is meant."""
    if isinstance(value, type):
        raise TypeError(f"{name} is the class {value.__name__}: pass an object of it, {value.__name__}(...).")


_ARGUMENTS_OF_TORCH = ("device", "device_type", "cache_enabled")
_DEVICES_OF_TORCH = re.compile(r"(cpu|cuda|hpu|mps|mtia|npu|xla|xpu)(:\d+)?")


def refuse_arguments_of_torch(call: str, first: object, keywords: Mapping[str, object]) -> None:
    """Refuse the arguments that a function of torch.amp has and that of the same name in tfmp has not.

    `call` is the call without them, `first` the first argument without a name, and `keywords` are the others.
    """
    name = call.partition("(")[0]
    for argument in _ARGUMENTS_OF_TORCH:
        if argument in keywords:
            raise TypeError(
                f"{name} takes no {argument}, got {keywords[argument]!r}, which is an argument of torch: leave it out, "
                f"and write {call}."
            )
    if isinstance(first, str) and _DEVICES_OF_TORCH.fullmatch(first):
        raise TypeError(
            f"{name} takes no device, got {first!r}, because TensorFlow places ops by itself: leave it out, and write "
            f"{call}."
        )


def cannot_be_changed(name: str, value: object, owner: str) -> AttributeError:
    """Return the error for a setting of a loss-scale manager that somebody assigns to, of the manager or elsewhere."""
    return AttributeError(
        f"{name} of this {owner} cannot be changed, because functions that are traced already hold its value: make a "
        f"new manager for {name}={value!r}, and a new optimizer or scaler with it."
    )


def not_default(function: Callable[..., Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that are not the defaults of a function's or a class's parameters; else not None."""
    defaults = {name: parameter.default for name, parameter in inspect.signature(function).parameters.items()}
    return {name: value for name, value in given.items() if value != defaults.get(name)}
