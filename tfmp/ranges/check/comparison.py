"""Compares the gradients of runs in float16 with those in float32, layer by layer."""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np


class GradientAgreement(NamedTuple):
    """How far a layer's gradients in float16 are from those in float32."""

    #: Of the angle between both: 1 if they have the same direction, NaN if one is 0.
    cosine: float
    #: The norm of the difference, divided by the norm in float32.
    relative_error: float


class GradientComparison:
    """Sums, over batches, what the agreement of each layer is computed from."""

    def __init__(self) -> None:
        self._sums: dict[str, np.ndarray] = {}

    def add(
        self, in_float32: Mapping[str, Sequence[np.ndarray]], in_float16: Mapping[str, Sequence[np.ndarray]]
    ) -> None:
        """Add the gradients of one batch, unscaled, by layer: an array for each of its variables."""
        missing = [name for name, grads in in_float32.items() if _shapes(grads) != _shapes(in_float16.get(name, []))]
        if missing:
            raise ValueError(
                f"the loss in float16 does not depend on {', '.join(missing)} as that in float32 does: both must use "
                "the same variables."
            )
        for name, grads in in_float32.items():
            sums = sum(map(_sums, grads, in_float16[name]), start=np.zeros(4))
            self._sums[name] = self._sums.get(name, np.zeros(4)) + sums

    def far_off(self, tolerance: float) -> list[str]:
        """Return the names of the layers whose gradients differ by more than this part of their norm."""
        agreements = {name: self.agreement(name) for name in self._sums}
        return [name for name, each in agreements.items() if each is not None and not each.relative_error <= tolerance]

    def agreement(self, name: str) -> GradientAgreement | None:
        """Return how far the gradients of a layer are from each other; None if there are none to compare."""
        if name not in self._sums or self._sums[name][0] == 0:
            return None
        of_float32, of_float16, dot, difference = map(float, self._sums[name])
        norms = math.sqrt(of_float32) * math.sqrt(of_float16)
        return GradientAgreement(dot / norms if norms else math.nan, math.sqrt(difference / of_float32))


def _shapes(grads: Sequence[np.ndarray]) -> list[tuple[int, ...]]:
    return [grad.shape for grad in grads]


def _sums(in_float32: np.ndarray, in_float16: np.ndarray) -> np.ndarray:
    if not np.isfinite(in_float16).all():
        return np.array([np.sum(in_float32 * in_float32), math.nan, math.nan, math.inf])
    difference = in_float32 - in_float16
    pairs = ((in_float32, in_float32), (in_float16, in_float16), (in_float32, in_float16), (difference, difference))
    return np.array([np.sum(one * other) for one, other in pairs])
