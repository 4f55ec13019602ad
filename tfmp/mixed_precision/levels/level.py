"""The levels O0 to O3, by their names."""

import difflib
from collections.abc import Iterable
from typing import NamedTuple

_NUMBERS = {"O0": 0, "O1": 1, "O2": 2, "O3": 3}
_SUFFIXES = {"": "float16", "-float16": "float16", "-bfloat16": "bfloat16"}


class Level(NamedTuple):
    """A precision level."""

    #: 0 for float32; 1 for half precision where that is safe; 2 for half precision in all layers, with weights and
    #: batch normalization in float32; 3 for half precision in all layers, with weights in half precision.
    number: int
    #: The half-precision type, "float16" or "bfloat16".
    half: str

    @property
    def policy(self) -> str:
        """The name of Keras' policy for layers that need no exception at this level."""
        return {0: "float32", 3: self.half}.get(self.number, f"mixed_{self.half}")

    def __str__(self) -> str:
        """Return the name of the level."""
        return f"O{self.number}" + ("-bfloat16" if self.half == "bfloat16" else "")


def level_of(name: object) -> Level:
    """Return a level by its name: O0 to O3 for float16, with "-bfloat16" behind it for bfloat16.

    Examples:
        >>> level_of("O2-bfloat16").policy
        'mixed_bfloat16'
    """
    if not isinstance(name, str):
        raise TypeError(f"a precision level is a string such as 'O2', got {name!r} of type {type(name).__name__}.")
    known = {
        f"{level}{suffix}": Level(_NUMBERS[level], _SUFFIXES[suffix]) for level in _NUMBERS for suffix in _SUFFIXES
    }
    if name not in known:
        raise ValueError(
            f"there is no precision level {name!r}: did you mean {_nearest(name, known)!r}? The levels are "
            f"{', '.join(_NUMBERS)}, in float16; with '-bfloat16' behind them, they are in bfloat16."
        )
    return known[name]


def _nearest(name: str, known: Iterable[str]) -> str:
    # The names of Keras' policies, and a small or a zero for the big letter.
    policies = {"mixed_float16": "O2", "mixed_bfloat16": "O2-bfloat16"}
    meant = policies.get(name, f"O{name[1:]}" if name[:1] in ("o", "0") else name)
    return difflib.get_close_matches(meant, known, n=1, cutoff=0.0)[0]
