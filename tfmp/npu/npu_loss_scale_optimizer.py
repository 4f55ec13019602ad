"""The NPU bridge's loss-scale optimizer, by the name of its module."""

from typing import Any

import tensorflow as tf

from tfmp.core.managers import LossScaleManager, validated_manager
from tfmp.core.overflow.detectors import OverflowDetector
from tfmp.npu.npu_loss_scale_manager import FixedLossScaleManager
from tfmp.optimizers.v1 import LossScaleOptimizerV1
from tfmp.types import Gradients


class NPULossScaleOptimizer(LossScaleOptimizerV1):
    """The `tfmp.LossScaleOptimizer` around a `tf.compat.v1.train.Optimizer`, as scripts for the NPU bridge call it.

    It does what that does, with most settings at their defaults, and two things more: what it has no attribute for is
    read from the wrapped optimizer, and `FixedLossScaleManager(scale, enable_overflow_check=False)` of `tfmp.npu` turns
    the check for overflow off.

    Args:
        opt: The optimizer to wrap; where the bridge's `NPUDistributedOptimizer(opt)` stood, Horovod's
            `hvd.DistributedOptimizer(opt)`, or `opt` itself.
        loss_scale_manager: Decides the scale, a manager of `tfmp.npu` or of tfmp.
        is_distributed: Whether more than one process takes part. With True all of Horovod's agree whether to skip a
            step, and the gradients of a plain `opt` are averaged, which the bridge left to `NPUDistributedOptimizer`.
            Where nothing distributes, True refuses to build a step.
        sparse_as_dense: Make sparse gradients dense, as the bridge did.

    Raises:
        TypeError: `opt` is no such optimizer, or `loss_scale_manager` no manager.
        ValueError: `opt` is wrapped already, or one of Horovod's that does not average the gradients of each step.

    Example:
        >>> manager = FixedLossScaleManager(1024)
        >>> opt = NPULossScaleOptimizer(tf.compat.v1.train.GradientDescentOptimizer(0.5), manager)
        >>> w = tf.Variable([1.0, 2.0])
        >>> _ = opt.minimize(lambda: tf.reduce_sum(w), var_list=[w])
        >>> w.numpy(), opt._learning_rate
        (array([0.5, 1.5], dtype=float32), 0.5)
    """

    _public_name = "npu.NPULossScaleOptimizer"

    def __init__(
        self,
        opt: tf.compat.v1.train.Optimizer,
        loss_scale_manager: LossScaleManager,
        is_distributed: bool = False,
        *,
        sparse_as_dense: bool = False,
    ) -> None:
        validated_manager(loss_scale_manager)
        checks = (
            not isinstance(loss_scale_manager, FixedLossScaleManager) or loss_scale_manager.get_enable_overflow_check()
        )
        detector = None if checks else _NoDetector()
        super().__init__(
            opt, loss_scale_manager, is_distributed, sparse_as_dense=sparse_as_dense, overflow_detector=detector
        )

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - of the wrapped optimizer
        # Python and TensorFlow ask for `__...` and `_self_...` to learn of this very object; and while it is copied or
        # unpickled there is no wrapped one yet.
        if name.startswith(("__", "_self_")) or "_opt" not in vars(self):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}.")
        return getattr(self._opt, name)


class _NoDetector(OverflowDetector):
    """Takes nothing for overflow, on one replica or in the sum of several."""

    ignores_scale = True
    ignores_sums = True

    def all_finite(self, grads: Gradients, loss_scale: tf.Tensor) -> tf.Tensor:
        """Return True."""
        del grads, loss_scale
        return tf.constant(True)
