"""Histograms over powers of two, counted on the device, and what a half-precision type would keep of their values."""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from tfmp.core import settings
from tfmp.ranges.exponents import LOWEST_EXPONENT, NUM_BINS, NUM_COUNTS, OTHER_COUNTS, exponent_counts
from tfmp.types import Gradient


class HalfType(NamedTuple):
    """What a half-precision type can hold, in exponents of powers of two."""

    name: str
    #: The largest finite number, and its exponent.
    largest: float
    highest: int
    #: Of the smallest normal number: numbers below it keep fewer bits, which is called subnormal.
    lowest_normal: int
    #: Of the smallest number that is not 0.
    lowest: int


FLOAT16 = HalfType("float16", largest=65504.0, highest=15, lowest_normal=-14, lowest=-24)
BFLOAT16 = HalfType("bfloat16", largest=(2 - 2.0**-7) * 2.0**127, highest=127, lowest_normal=-126, lowest=-133)


class RangeShares(NamedTuple):
    """Which parts of some values a half-precision type keeps. The parts add up to 1, unless there are no values.

    Attributes:
        zero: The part that is 0 already.
        lost: The part that becomes 0.
        subnormal: The part that falls below the type's smallest normal number, so that it keeps fewer bits.
        normal: The part that keeps all bits of the type.
        overflow: The part that becomes infinite. Values between the largest number of the type and the next power of
            two (65504 and 65536 for float16) are counted as normal.
        nonfinite: The part that is infinite or NaN already.
    """

    zero: float
    lost: float
    subnormal: float
    normal: float
    overflow: float
    nonfinite: float


class RangeHistogram:
    """How many values have which binary exponent, and how many are zero, infinite or NaN.

    Args:
        counts: A row of what `tfmp.ranges.exponent_counts` returns.

    Raises:
        ValueError: `counts` has another shape.

    Examples:
        >>> import tfmp
        >>> histogram = tfmp.ranges.RangeHistogram.of(tf.constant([0.0, 1.5, -3.0, 2.0**-30]))
        >>> histogram.exponents
        (-30, 1)
        >>> histogram.shares("float16")
        RangeShares(zero=0.25, lost=0.25, subnormal=0.0, normal=0.5, overflow=0.0, nonfinite=0.0)
        >>> histogram.shares("float16", scale=2**12).lost
        0.0
    """

    def __init__(self, counts: npt.ArrayLike | None = None) -> None:
        values = np.zeros([NUM_COUNTS], np.int64) if counts is None else np.array(counts, np.int64)
        if values.shape != (NUM_COUNTS,):
            raise ValueError(
                f"counts must be a row of tfmp.ranges.exponent_counts, of shape [{NUM_COUNTS}], got shape "
                f"{values.shape}."
            )
        self._counts = values

    @classmethod
    def of(cls, *tensors: Gradient) -> "RangeHistogram":
        """Count the values of tensors, all in one histogram; in eager code.

        Args:
            *tensors: Tensors of a floating-point type, `tf.IndexedSlices`, or None.

        Raises:
            TypeError: A tensor does not have a floating-point type.
        """
        return cls(tf.reduce_sum(exponent_counts(tensors), axis=0).numpy() if tensors else None)

    def __add__(self, other: "RangeHistogram") -> "RangeHistogram":
        """Return the histogram of the values of both."""
        return RangeHistogram(self._counts + other._counts)

    def __eq__(self, other: object) -> bool:
        """Return whether the other one counts the same."""
        return isinstance(other, RangeHistogram) and bool((self._counts == other._counts).all())

    __hash__ = None  # type: ignore[assignment] # as for every object that is compared by its values

    def __repr__(self) -> str:
        exponents = self.exponents
        found = "no value but 0" if exponents is None else f"2^{exponents[0]}..2^{exponents[1]}"
        return f"<RangeHistogram of {self.total} values, {found}>"

    @property
    def counts(self) -> npt.NDArray[np.int64]:
        """The numbers of values with the exponents -150 to 127, that is, from `2**e` to below `2**(e + 1)`."""
        return self._counts[:NUM_BINS]

    @property
    def row(self) -> npt.NDArray[np.int64]:
        """All counts, as in a row of `tfmp.ranges.exponent_counts`."""
        return self._counts

    @property
    def total(self) -> int:
        """The number of values."""
        return int(self._counts.sum())

    @property
    def zeros(self) -> int:
        """The number of zeros."""
        return self._other("zero")

    @property
    def nonfinite(self) -> int:
        """The number of infinities and NaN."""
        return self._other("infinite") + self._other("nan")

    @property
    def exponents(self) -> tuple[int, int] | None:
        """The lowest and the highest exponent that occurs; None if no finite value other than 0 does.

        Values of float64 beyond the bins count as -151 and 128.
        """
        beside = [self._other("below"), *self.counts, self._other("above")]
        found = np.flatnonzero(beside) + LOWEST_EXPONENT - 1
        return (int(found[0]), int(found[-1])) if found.size else None

    def times(self, factor: float) -> "RangeHistogram":
        """Return the histogram of the values multiplied by a factor, such as a loss scale or its reciprocal.

        Args:
            factor: The factor. If it is no power of two, the nearest one is taken.

        Raises:
            TypeError: `factor` is not a number.
            ValueError: `factor` is not greater than 0.

        Examples:
            >>> RangeHistogram.of(tf.constant([0.0, 3.0])).times(2.0**-10)
            <RangeHistogram of 2 values, 2^-9..2^-9>
        """
        shift = round(math.log2(settings.positive("factor", factor)))
        others = {name: self._other(name) for name in OTHER_COUNTS}
        shifted = np.zeros([NUM_BINS], np.int64)
        for index in np.flatnonzero(self.counts):
            if 0 <= index + shift < NUM_BINS:
                shifted[index + shift] = self.counts[index]
            else:
                others["below" if shift < 0 else "above"] += int(self.counts[index])
        return RangeHistogram([*shifted, *others.values()])

    def shares(self, dtype: str = "float16", scale: float = 1.0) -> RangeShares:
        """Return which parts of the values a half-precision type would keep.

        A type rounds to the nearest number. So a value becomes 0 if it is less than half of the type's smallest number;
        what is only a little less than that smallest number becomes that number.

        Args:
            dtype: "float16" or "bfloat16".
            scale: A factor of all values, such as a loss scale. If it is no power of two, the nearest one is taken.

        Raises:
            TypeError: `scale` is not a number.
            ValueError: `dtype` is another type, or `scale` is not greater than 0.
        """
        half = {each.name: each for each in (FLOAT16, BFLOAT16)}.get(dtype)
        if half is None:
            raise ValueError(f'dtype must be "float16" or "bfloat16", got {dtype!r}.')
        shift = round(math.log2(settings.positive("scale", scale)))
        exponents = np.arange(LOWEST_EXPONENT, LOWEST_EXPONENT + NUM_BINS) + shift
        counts, total = self.counts, max(self.total, 1)
        lost = self._other("below") + counts[exponents < half.lowest - 1].sum()
        subnormal = counts[(exponents >= half.lowest - 1) & (exponents < half.lowest_normal)].sum()
        overflow = self._other("above") + counts[exponents > half.highest].sum()
        normal = counts[(exponents >= half.lowest_normal) & (exponents <= half.highest)].sum()
        return RangeShares(
            *(float(part) / total for part in (self.zeros, lost, subnormal, normal, overflow, self.nonfinite))
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the counts that are not 0, as JSON can hold them: by exponent, then by what else they count."""
        found = {str(index + LOWEST_EXPONENT): int(self.counts[index]) for index in np.flatnonzero(self.counts)}
        return {**found, **{name: self._other(name) for name in OTHER_COUNTS if self._other(name)}}

    @classmethod
    def from_dict(cls, counts: Mapping[str, int]) -> "RangeHistogram":
        """Return the histogram that `to_dict` described.

        Args:
            counts: What `to_dict` returned.
        """
        row = np.zeros([NUM_COUNTS], np.int64)
        for name, count in counts.items():
            is_other = name in OTHER_COUNTS
            row[NUM_BINS + OTHER_COUNTS.index(name) if is_other else int(name) - LOWEST_EXPONENT] = count
        return cls(row)

    def _other(self, name: str) -> int:
        return int(self._counts[NUM_BINS + OTHER_COUNTS.index(name)])
