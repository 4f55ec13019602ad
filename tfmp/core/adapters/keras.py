"""The adapter for optimizers of Keras, whose updates can be compiled."""

from collections.abc import Iterable, Mapping
from typing import Any

import tensorflow as tf

from tfmp.core.adapters.base import OptimizerAdapter
from tfmp.core.updates import KerasProgram, OptimizerUpdate
from tfmp.types import Done, Gradient, Gradients


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

    def program(self, grads: Gradients) -> KerasProgram | None:
        """Return the program that unscales these gradients and applies them.

        There is none under a `tf.distribute` strategy: the check needs unscaled gradients there, to find out whether
        their sum over the replicas could overflow.
        """
        if self._update is None or tf.distribute.has_strategy() or not self.can_unscale_late(grads):
            return None
        return KerasProgram(
            self._update,
            self.variables,
            options=self._kwargs,
            method=self._method,
            leaves_out_none=self._leaves_out_none,
        )

    def can_unscale_late(self, grads: Gradients) -> bool:
        """Return True if it makes no difference whether these gradients are unscaled before or after the check.

        It does if a variable has float8 scales: their next values, which come as "gradients", must not be divided by
        the loss scale.

        Args:
            grads: Gradients of a scaled loss, one for each variable.
        """
        return not self.overwritten and all(map(_can_be_unscaled_late, grads, self.dtypes))

    def apply(self, grads: Gradients) -> Done:
        """Apply the gradients of one replica: by a compiled program, or by the optimizer itself."""
        program = self.program(grads)
        if program is None or not program.is_compiled:
            return self._apply_by_itself(grads)
        one = tf.ones([])
        return program.apply(grads, one, program.measure(grads, one), ())

    def _apply_by_itself(self, grads: Gradients) -> Done:
        return super().apply(grads)


def _can_be_unscaled_late(grad: Gradient, dtype: tf.DType | None) -> bool:
    """Return True if a finite scaled gradient stays finite when it is unscaled and cast to the dtype of `dtypes`."""
    return dtype == tf.float64 or (dtype in {tf.float32, None} and (grad is None or grad.dtype != tf.float64))
