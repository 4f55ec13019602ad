"""Several optimizers that step together or not at all, as one adapter."""

import itertools
from collections.abc import Sequence

import tensorflow as tf

from tfmp.core.adapters.base import OptimizerAdapter
from tfmp.types import Gradients


class AdaptersTogether(OptimizerAdapter):
    """The optimizers of several adapters, whose gradients come in one list.

    Args:
        adapters: The adapters, in the order of their gradients.
    """

    def __init__(self, adapters: Sequence[OptimizerAdapter]) -> None:
        super().__init__(None, [variable for adapter in adapters for variable in adapter.variables])
        self.dtypes = [dtype for adapter in adapters for dtype in adapter.dtypes]
        self._adapters = adapters

    def apply(
        self, grads: Gradients, loss_scale: tf.Tensor | None = None, measures: Sequence[tf.Tensor] = ()
    ) -> tf.Operation:
        """Apply the gradients of each optimizer."""
        del loss_scale, measures
        rest = iter(grads)
        parts = [list(itertools.islice(rest, len(adapter.variables))) for adapter in self._adapters]
        return tf.group(*(adapter.apply(part) for adapter, part in zip(self._adapters, parts, strict=True)))
