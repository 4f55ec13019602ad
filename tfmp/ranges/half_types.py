"""What the half-precision types can hold: the exponents of their smallest and largest numbers."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class HalfType:
    """The range of a half-precision type.

    Attributes:
        name: The name of the type.
        largest: The largest finite number.
        highest: The exponent of the largest numbers.
        lowest_normal: The exponent of the smallest normal number. Numbers below it keep fewer bits: they are subnormal.
        lowest: The exponent of the smallest number that is not 0.
    """

    name: str
    largest: float
    highest: int
    lowest_normal: int
    lowest: int


FLOAT16 = HalfType("float16", largest=65504.0, highest=15, lowest_normal=-14, lowest=-24)
BFLOAT16 = HalfType("bfloat16", largest=(2 - 2.0**-7) * 2.0**127, highest=127, lowest_normal=-126, lowest=-133)

_TYPES = {half.name: half for half in (FLOAT16, BFLOAT16)}


def half_type(dtype: str) -> HalfType:
    """Return the range of a half-precision type.

    Raises:
        ValueError: It is neither.

    Examples:
        >>> half_type("float16").largest
        65504.0
    """
    if dtype not in _TYPES:
        raise ValueError(f'dtype must be "float16" or "bfloat16", got {dtype!r}.')
    return _TYPES[dtype]
