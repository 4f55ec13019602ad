"""The levels O0 to O3, by their names."""

import difflib
from typing import NamedTuple

_NUMBERS = {"O0": 0, "O1": 1, "O2": 2, "O3": 3}
_SUFFIXES = {"": "float16", "-float16": "float16", "-bfloat16": "bfloat16"}


class Level(NamedTuple):
    """A precision level.

    Attributes:
        number: 0 for float32; 1 for half precision where that is safe; 2 for half precision in all layers, with weights
            and batch normalization in float32; 3 for half precision in all layers, with weights in half precision.
        half: The half-precision type, "float16" or "bfloat16".
    """

    number: int
    half: str

    @property
    def policy(self) -> str:
        """The name of Keras' policy for layers that need no exception at this level."""
        return {0: "float32", 3: self.half}.get(self.number, f"mixed_{self.half}")

    def __str__(self) -> str:
        """Return the name of the level."""
        return f"O{self.number}" + ("-bfloat16" if self.half == "bfloat16" else "")


def level_of(name: object) -> Level:
    """Return a level by its name.

    Args:
        name: "O0", "O1", "O2" or "O3", for float16; with "-bfloat16" for bfloat16.

    Raises:
        TypeError: `name` is no string.
        ValueError: There is no such level.

    Example:
        >>> level_of("O2-bfloat16").policy
        'mixed_bfloat16'
    """
    if not isinstance(name, str):
        raise TypeError(f"a precision level is a string such as 'O2', got {name!r} of type {type(name).__name__}.")
    known = {
        f"{level}{suffix}": Level(_NUMBERS[level], _SUFFIXES[suffix]) for level in _NUMBERS for suffix in _SUFFIXES
    }
    if name not in known:
        near = difflib.get_close_matches(name, known, n=1) or ["O2"]
        raise ValueError(
            f"there is no precision level {name!r}: did you mean {near[0]!r}? The levels are {', '.join(_NUMBERS)}, in "
            "float16; with '-bfloat16' behind them, they are in bfloat16."
        )
    return known[name]
