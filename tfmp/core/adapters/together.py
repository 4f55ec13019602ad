"""One adapter for several optimizers that step together or not at all."""

import itertools
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfmp.core.adapters.base import OptimizerAdapter
from tfmp.core.gradients.origins import Change
from tfmp.core.updates import apply_together
from tfmp.types import Gradients


class AdaptersTogether(OptimizerAdapter):
    """Treats the optimizers of several adapters as one optimizer, whose gradients are those of all in one list.

    Args:
        adapters: One adapter for each optimizer, in the order in which their gradients stand in that list.
    """

    def __init__(self, adapters: Sequence[OptimizerAdapter]) -> None:
        super().__init__(None, [variable for adapter in adapters for variable in adapter.variables])
        self.dtypes = [dtype for adapter in adapters for dtype in adapter.dtypes]
        self._adapters = adapters
        self._num_measures: list[int] = []

    def unscales(self, grads: Gradients) -> bool:
        """Return True if all adapters can unscale their parts of the gradients."""
        return all(adapter.unscales(part) for adapter, part in self._with_own(grads))

    def measure(self, grads: Gradients, loss_scale: tf.Tensor | None) -> list[tf.Tensor]:
        """Return what all adapters measure of their parts of the gradients."""
        each = [adapter.measure(part, loss_scale) for adapter, part in self._with_own(grads)]
        self._num_measures = list(map(len, each))
        return list(itertools.chain(*each))

    def apply(
        self,
        grads: Gradients,
        loss_scale: tf.Tensor | None = None,
        measures: Sequence[tf.Tensor] = (),
        changes: Sequence[Change | None] = (),
    ) -> tf.Operation:
        """Apply to each optimizer its own part of the gradients; in one program, if they are still scaled."""
        own_measures = _split(measures, self._num_measures or [0] * len(self._adapters))
        if loss_scale is None:
            parts = zip(self._with_own(grads), own_measures, strict=True)
            return tf.group(*(adapter.apply(part, None, measured) for (adapter, part), measured in parts))
        own_changes = _split(changes, [len(adapter.variables) if changes else 0 for adapter in self._adapters])
        rows = zip(self._with_own(grads), own_measures, own_changes, strict=True)
        apply_together([adapter.part(part, measured, own) for (adapter, part), measured, own in rows], loss_scale)
        return tf.no_op()

    def _with_own(self, grads: Gradients) -> list[tuple[Any, Gradients]]:
        """Return each adapter with its part of the gradients."""
        parts = _split(grads, [len(adapter.variables) for adapter in self._adapters])
        return list(zip(self._adapters, parts, strict=True))


def _split(values: Sequence[Any], lengths: Sequence[int]) -> list[list[Any]]:
    rest = iter(values)
    return [list(itertools.islice(rest, length)) for length in lengths]
