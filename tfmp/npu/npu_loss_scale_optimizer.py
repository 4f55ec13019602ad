"""The loss-scale optimizer of the NPU bridge, in a module of the same name as the bridge's."""

from typing import Any

import tensorflow as tf

from tfmp.core.managers import LossScaleManager
from tfmp.core.overflow.detectors import OverflowDetector
from tfmp.core.tensorflow_internals import TRACKING_PREFIX
from tfmp.hosts.tf1.optimizer import LossScaleOptimizerV1
from tfmp.npu.npu_loss_scale_manager import FixedLossScaleManager
from tfmp.types import Gradients


class NPULossScaleOptimizer(LossScaleOptimizerV1):
    """Scales the loss for a `tf.compat.v1.train.Optimizer`, with the signature of the NPU bridge.

    This is `tfmp.LossScaleOptimizer` with most of its settings at their defaults, and with two additions. An attribute
    that this class does not have is read from the wrapped optimizer. And
    `tfmp.npu.FixedLossScaleManager(scale, enable_overflow_check=False)` turns the overflow check off.

    Args:
        opt: The optimizer to wrap. In place of the bridge's `NPUDistributedOptimizer(opt)`, pass Horovod's
            `hvd.DistributedOptimizer(opt)`, or `opt` itself.
        loss_scale_manager: The manager that decides the loss scale, from `tfmp.npu` or from tfmp.
        is_distributed: Whether Horovod's processes train together. If True, all of them agree on whether
            to skip a step, and the gradients of a plain `opt` are averaged over the processes. (The bridge left the
            average to `NPUDistributedOptimizer`.) If True but nothing distributes the training, building a step raises
            an error.
        sparse_as_dense: Whether to convert sparse gradients to dense ones, as the bridge did.

    Raises:
        TypeError: `opt` is not a `tf.compat.v1.train.Optimizer`, or `loss_scale_manager` is not a manager.
        ValueError: `opt` is wrapped already, or is an optimizer of Horovod that does not average the gradients of each
            step.

    Examples:
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
        if not isinstance(loss_scale_manager, LossScaleManager):
            raise TypeError(
                f"loss_scale_manager must be a tfmp.LossScaleManager, got {loss_scale_manager!r} of type "
                f"{type(loss_scale_manager).__name__}: for a constant scale pass tfmp.FixedLossScaleManager(scale)."
            )
        checks = (
            not isinstance(loss_scale_manager, FixedLossScaleManager) or loss_scale_manager.get_enable_overflow_check()
        )
        detector = None if checks else _NoDetector()
        super().__init__(
            opt, loss_scale_manager, is_distributed, sparse_as_dense=sparse_as_dense, overflow_detector=detector
        )

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - any attribute of the wrapped optimizer
        # Python and TensorFlow read names such as `__deepcopy__` and `_self_setattr_tracking` to learn about this
        # object, not about the wrapped one. While this object is copied or unpickled, it wraps no optimizer yet.
        if name.startswith(("__", TRACKING_PREFIX)) or "_opt" not in vars(self):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}.")
        if hasattr(type(self), name):
            # A property of this class raised an error, which says why.
            return object.__getattribute__(self, name)
        return getattr(self._opt, name)


class _NoDetector(OverflowDetector):
    """Reports all gradients as finite, on one replica and after the sum over replicas."""

    ignores_scale = True
    ignores_sums = True

    def all_finite(self, grads: Gradients, loss_scale: tf.Tensor) -> tf.Tensor:
        """Return True for any gradients."""
        del grads, loss_scale
        return tf.constant(True)
