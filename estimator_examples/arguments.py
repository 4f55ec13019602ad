"""Types of command-line arguments; each has its own error message for a wrong value."""

import argparse
import math

_FLOAT32_MAX = 3.4028235e38


def positive_int(text: str) -> int:
    """Convert an argument to a whole number of 1 or more."""
    value = _parsed(int, text, "a whole number")
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be 1 or more, got {text}.")
    return value


def count(text: str) -> int:
    """Convert an argument to a whole number of 0 or more."""
    value = _parsed(int, text, "a whole number")
    if value < 0:
        raise argparse.ArgumentTypeError(f"must be 0 or more, got {text}.")
    return value


def positive(text: str) -> float:
    """Convert an argument to a finite number above 0."""
    value = _parsed(float, text, "a number")
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"must be a finite number above 0, got {text}.")
    return value


def fraction(text: str) -> float:
    """Convert an argument to a number of at least 0 and less than 1."""
    value = _parsed(float, text, "a number")
    if not 0 <= value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 0 and less than 1, got {text}.")
    return value


def loss_scale(text: str) -> float:
    """Convert an argument such as `65536` or `2**16` to a loss scale."""
    value = _power(text) if "**" in text else _parsed(float, text, "a number")
    if not 1 <= value <= _FLOAT32_MAX:
        raise argparse.ArgumentTypeError(f"must be 1 or more, and finite in float32, got {text}.")
    return value


def loss_scale_or_zero(text: str) -> float:
    """Convert an argument to a fixed loss scale; 0 chooses a dynamic loss scale."""
    try:
        return 0.0 if text in ("0", "0.0") else loss_scale(text)
    except argparse.ArgumentTypeError as error:
        raise argparse.ArgumentTypeError(f"{error} 0 chooses a dynamic loss scale.") from None


def _power(text: str) -> float:
    base, _, exponent = text.partition("**")
    try:
        return float(base) ** int(exponent)
    except OverflowError:
        return math.inf
    except (ValueError, ZeroDivisionError):
        raise argparse.ArgumentTypeError(f"must be a number, got {text!r}.") from None


def _parsed(kind: type[int] | type[float], text: str, wanted: str) -> int | float:
    try:
        return kind(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be {wanted}, got {text!r}.") from None
