"""The adapter for optimizers of Keras, whose updates can be compiled."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from tfmp.core.adapters.base import OptimizerAdapter
from tfmp.core.gradients.origins import Change
from tfmp.core.updates import OptimizerUpdate, Part, apply_together
from tfmp.types import Gradient, Gradients


class KerasAdapter(OptimizerAdapter):
    """The adapter for an optimizer of Keras, which unscales gradients in the program that applies them, if it can.

    Args:
        optimizer: The optimizer.
        variables: The variables that it trains, in the order of the gradients.
        kwargs: Keyword arguments for the `apply_gradients` of an optimizer of Keras 2.
        update: Unscales gradients and applies them by the optimizer, in one program where that saves time; None if the
            gradients are to be unscaled before they come here.
        leaves_out_none: True if variables without a gradient are not passed to the optimizer, which warns of them.
        method: The method of an optimizer of Keras 3 that is called, which a subclass may override: "apply_gradients"
            or "apply".
    """

    def __init__(
        self,
        optimizer: Any,  # noqa: ANN401 - of any Keras
        variables: Iterable[Any],
        kwargs: Mapping[str, Any] | None = None,
        *,
        update: OptimizerUpdate | None = None,
        leaves_out_none: bool = False,
        method: str = "apply_gradients",
    ) -> None:
        super().__init__(optimizer, variables, kwargs)
        self._update = update
        self._leaves_out_none = leaves_out_none
        self._method = method

    def unscales(self, grads: Gradients) -> bool:
        """Return True if `apply` can unscale these gradients itself.

        Under a `tf.distribute` strategy this is False: the check needs unscaled gradients there, to find out whether
        their sum over the replicas could overflow. It is also False if a variable has float8 scales: their next values,
        which come as "gradients", must not be divided by the loss scale.
        """
        return self._update is not None and not tf.distribute.has_strategy() and self.can_unscale_late(grads)

    def can_unscale_late(self, grads: Gradients) -> bool:
        """Return True if it makes no difference whether these gradients are unscaled before or after the check.

        Args:
            grads: Gradients of a scaled loss, one for each variable.
        """
        return not self.overwritten and all(map(_can_be_unscaled_late, grads, self.dtypes))

    def measure(self, grads: Gradients, loss_scale: tf.Tensor | None) -> list[tf.Tensor]:
        """Compute what the update needs; nothing for gradients that the optimizer applies by itself."""
        scale = self._divisor(grads, loss_scale)
        if scale is None or self._update is None:
            return []
        return self._update.measure(grads, self.variables, scale)

    def apply(
        self,
        grads: Gradients,
        loss_scale: tf.Tensor | None = None,
        measures: Sequence[tf.Tensor] = (),
        changes: Sequence[Change | None] = (),
    ) -> tf.Operation:
        """Apply the gradients of one replica: by the update, or by the optimizer itself."""
        scale = self._divisor(grads, loss_scale)
        if scale is None:
            return self._apply_unscaled(grads)
        apply_together([self.part(grads, measures, changes)], scale)
        return tf.no_op()

    def part(self, grads: Gradients, measures: Sequence[tf.Tensor], changes: Sequence[Change | None]) -> Part:
        """Return the part of this optimizer in a step; only for gradients that it `unscales`.

        Args:
            grads: The gradients, one for each variable.
            measures: What `measure` returned for them.
            changes: For each gradient a function that changes the unscaled values; empty if there is none.
        """
        assert self._update is not None
        rows = list(zip(grads, self.variables, changes or [None] * len(grads), strict=True))
        if self._leaves_out_none:
            rows = [row for row in rows if row[0] is not None]
        grads, variables, changes = zip(*rows, strict=True)
        return Part(self._update, grads, variables, measures, changes, self._kwargs, self._method)

    def _divisor(self, grads: Gradients, loss_scale: tf.Tensor | None) -> tf.Tensor | None:
        """Return the number by which the update divides the gradients; None if the optimizer applies them by itself.

        Gradients that are unscaled already are divided by 1 if the update is compiled, which costs nothing there.
        """
        if loss_scale is not None or self._update is None:
            return loss_scale
        return tf.ones([]) if self.unscales(grads) and self._update.compiles(self.variables) else None

    def _apply_unscaled(self, grads: Gradients) -> tf.Operation:
        return super().apply(grads)


def _can_be_unscaled_late(grad: Gradient, dtype: tf.DType | None) -> bool:
    """Return True if a finite scaled gradient stays finite when it is unscaled and cast to the dtype of `dtypes`."""
    return dtype == tf.float64 or (dtype in {tf.float32, None} and (grad is None or grad.dtype != tf.float64))
