"""Sums what is measured in several batches."""

from collections.abc import Collection

import numpy as np

from tfmp.ranges.check.passes import Measured, Pass
from tfmp.ranges.histogram import RangeHistogram

#: What is measured by name in each pass.
KINDS = ("inputs", "outputs", "output_gradients", "weights", "weight_gradients")


class Totals:
    """What was measured in all batches, by kind and then by name."""

    def __init__(self) -> None:
        self.of: dict[str, dict[str, Measured]] = {kind: {} for kind in KINDS}

    def add(self, seen: Pass) -> None:
        """Add a batch."""
        for kind, totals in self.of.items():
            for name, measured in getattr(seen, kind).items():
                if name not in totals:
                    totals[name] = measured
                elif kind != "weights":  # which are the same in all batches
                    totals[name] = _together(totals[name], measured)

    def histogram(self, kind: str, name: str) -> RangeHistogram:
        """Return what was counted of a layer; nothing if it has no such tensors."""
        found = self.of[kind].get(name)
        return RangeHistogram() if found is None else found.histogram

    def all_gradients(self, without: Collection[str] = ()) -> RangeHistogram:
        """Return the histogram of the gradients of activations and weights, leaving out those of some layers.

        If no gradient other than 0 would be left, all are counted.
        """
        kinds = (self.of["output_gradients"], self.of["weight_gradients"])
        left = [each.histogram for kind in kinds for name, each in kind.items() if name not in without]
        found = sum(left, start=RangeHistogram())
        return found if found.exponents or not without else self.all_gradients()

    def names(self) -> list[str]:
        """Return the names of layers, probes and variables, in the order in which they were reached."""
        return list(dict.fromkeys(name for kind in ("outputs", "weights") for name in self.of[kind]))


def _together(one: Measured, other: Measured) -> Measured:
    # np.maximum, unlike max, is NaN if either is.
    return Measured(one.histogram + other.histogram, float(np.maximum(one.largest, other.largest)))
