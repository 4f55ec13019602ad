"""Logs that a loss which is computed in bfloat16 needs no scaling."""

import logging
from typing import Any

import tensorflow as tf

from tfmp.core.graph_search import calls_functions, with_ancestors
from tfmp.core.managers import FixedLossScaleManager, LossScaleManager

_logger = logging.getLogger("tfmp")

#: Parts of the types of the ops in which models spend their time: matrix products and convolutions.
_PRODUCTS = ("MatMul", "Einsum", "Conv")


class Bfloat16Notice:
    """Logs once that no scaling is needed, if a scaled loss is computed in bfloat16 and the scale is not fixed at 1.

    bfloat16 has the range of float32, so gradients do not become 0 or infinite in it. In a graph, there is a notice if
    matrix products or convolutions that the loss depends on are in bfloat16, and no op is in float16. There is none if
    the loss depends on functions that the graph calls, such as the body of a loop, whose ops are not seen. In eager
    code, only the type of the loss itself is known.
    """

    def __init__(self, manager: LossScaleManager) -> None:
        self._told = isinstance(manager, FixedLossScaleManager) and manager.get_config()["loss_scale"] == 1

    def look_at(self, loss: Any) -> None:  # noqa: ANN401 - whatever converts to a tensor
        """Log the notice if it holds for an unscaled loss and was not logged before."""
        if not self._told and _is_computed_in_bfloat16(loss):
            self._told = True
            _logger.warning(
                "the loss is computed in bfloat16, which has the range of float32: it needs no loss scaling. The "
                "training is right as it is. To do without scaling and checks, use the optimizer inside the "
                "LossScaleOptimizer as it is, or pass enabled=False to tfmp.GradScaler."
            )


def _is_computed_in_bfloat16(loss: Any) -> bool:  # noqa: ANN401 - whatever converts to a tensor
    if not tf.is_symbolic_tensor(loss):
        # An eager tensor does not record the ops that it was computed by.
        return bool(getattr(loss, "dtype", None) == tf.bfloat16)
    ops = with_ancestors([loss.op]) or []
    if any(map(calls_functions, ops)) or any(tf.float16 in _types_of(op) for op in ops):
        return False
    return any(tf.bfloat16 in _types_of(op) for op in ops if any(part in op.type for part in _PRODUCTS))


def _types_of(op: tf.Operation) -> list[tf.DType]:
    return [output.dtype for output in op.outputs]
