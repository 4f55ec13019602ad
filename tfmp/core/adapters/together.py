"""One adapter for several optimizers that step together or not at all."""

import itertools
from collections.abc import Sequence

import tensorflow as tf

from tfmp.core.adapters.base import OptimizerAdapter
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

    def apply(
        self, grads: Gradients, loss_scale: tf.Tensor | None = None, measures: Sequence[tf.Tensor] = ()
    ) -> tf.Operation:
        """Apply to each optimizer its own part of the gradients."""
        del loss_scale, measures
        rest = iter(grads)
        parts = [list(itertools.islice(rest, len(adapter.variables))) for adapter in self._adapters]
        return tf.group(*(adapter.apply(part) for adapter, part in zip(self._adapters, parts, strict=True)))
