"""The optimizer of BERT: warm-up and decay, AdamW, clipping, loss scaling."""

import dataclasses
import re
from collections.abc import Sequence

import tensorflow as tf

import tfmp

tf1 = tf.compat.v1

NOT_DECAYED = ("LayerNorm", "layer_norm", "bias")


@dataclasses.dataclass(frozen=True)
class OptimizerSettings:
    """How to train.

    Attributes:
        learning_rate: The rate at the end of the warm-up.
        loss_scale: None for a dynamic loss scale, else the fixed one.
        clip_norm: The largest global norm of the gradients.
        is_distributed: Whether several workers train together.
        aggregation_dtype: The type that gradients travel in between them; None for their own.
    """

    learning_rate: float
    num_train_steps: int
    num_warmup_steps: int
    weight_decay: float
    clip_norm: float
    loss_scale: float | None
    init_loss_scale: float
    incr_every_n_steps: int
    is_distributed: bool = False
    aggregation_dtype: str | None = None


@dataclasses.dataclass(frozen=True)
class Training:
    """What building the optimizer yields.

    Attributes:
        train_op: One attempted step.
        optimizer: The loss-scaled optimizer, with the counts of its steps.
        learning_rate: The rate that `train_op` uses.
    """

    train_op: tf.Operation
    optimizer: tfmp.LossScaleOptimizer
    learning_rate: tf.Tensor


def build_training(loss: tf.Tensor, settings: OptimizerSettings) -> Training:
    """Build the operation that trains all variables of the graph by one step.

    Args:
        loss: The float32 loss, not scaled.
        settings: How to train.

    Returns:
        The train operation, the optimizer and the learning rate.
    """
    global_step = tf1.train.get_or_create_global_step()
    rate = learning_rate(global_step, settings)
    adam = AdamWeightDecayOptimizer(rate, settings.weight_decay, exclude=NOT_DECAYED)
    optimizer = tfmp.LossScaleOptimizer(
        adam,
        _loss_scale_manager(settings),
        settings.is_distributed,
        aggregation_dtype=settings.aggregation_dtype,
    )
    grads, variables = zip(*optimizer.compute_gradients(loss, tf1.trainable_variables()), strict=True)
    # The norm of sparse slices would count a row that is used twice as two rows.
    dense = [tf.convert_to_tensor(grad) for grad in grads]
    # Under tf.distribute these are this worker's part of the mean, which is summed when it is applied.
    clip_norm = settings.clip_norm / tf.distribute.get_strategy().num_replicas_in_sync
    # An infinite norm clips to NaN, which the wrapper still sees and skips.
    clipped, _ = tf.clip_by_global_norm(dense, clip_norm)
    train_op = optimizer.apply_gradients(zip(clipped, variables, strict=True), global_step)
    return Training(train_op, optimizer, rate)


def learning_rate(global_step: tf.Tensor, settings: OptimizerSettings) -> tf.Tensor:
    """Rise linearly to the peak in `num_warmup_steps`, then fall linearly to zero.

    ::

        min((step + 1) / warm-up, (total - step) / (total - warm-up)) * peak

    Steps count from 0, so the first one already moves and there is no jump at the peak.
    """
    step = tf.cast(global_step, tf.float32)
    total, warmup = settings.num_train_steps, settings.num_warmup_steps
    decay = (total - step) / (total - warmup)
    rise = (step + 1) / warmup if warmup else decay
    return settings.learning_rate * tf.maximum(tf.minimum(rise, decay), 0.0)


class AdamWeightDecayOptimizer(tf1.train.Optimizer):
    """Adam without bias correction, with decoupled weight decay, as BERT was trained.

    For each variable, with gradient g::

        m = beta_1 * m + (1 - beta_1) * g
        v = beta_2 * v + (1 - beta_2) * g * g
        variable -= rate * (m / (sqrt(v) + epsilon) + decay * variable)

    The moments are the slots `adam_m` and `adam_v`. `apply_gradients` adds one to the global step
    that it is given, after all variables moved. See "Decoupled Weight Decay Regularization"
    (https://arxiv.org/abs/1711.05101).
    """

    def __init__(
        self,
        learning_rate: float | tf.Tensor,
        weight_decay_rate: float = 0.0,
        beta_1: float = 0.9,
        beta_2: float = 0.999,
        epsilon: float = 1e-6,
        exclude: Sequence[str] = (),
        name: str = "AdamWeightDecayOptimizer",
    ) -> None:
        """Make the optimizer.

        Args:
            learning_rate: A number or a scalar tensor.
            weight_decay_rate: The share of a weight that decays at a rate of 1.
            beta_1: The decay of the first moment.
            beta_2: The decay of the second moment.
            epsilon: Added to the root of the second moment.
            exclude: Regular expressions; a variable whose name holds one does not decay.
            name: The optimizer's name.
        """
        super().__init__(use_locking=False, name=name)
        self._rate = learning_rate
        self._decay = weight_decay_rate
        self._beta_1 = beta_1
        self._beta_2 = beta_2
        self._epsilon = epsilon
        self._exclude = tuple(exclude)

    def decays(self, variable: tf.Variable) -> bool:
        """Tell whether the weight decay applies to a variable."""
        excluded = any(re.search(pattern, variable.op.name) for pattern in self._exclude)
        return self._decay > 0 and not excluded

    def _create_slots(self, var_list: Sequence[tf.Variable]) -> None:
        for variable in var_list:
            for slot in ("adam_m", "adam_v"):
                self._zeros_slot(variable, slot, slot)

    def _apply_dense(self, grad: tf.Tensor, var: tf.Variable) -> tf.Operation:
        first, second = self.get_slot(var, "adam_m"), self.get_slot(var, "adam_v")
        new_first = self._beta_1 * first + (1 - self._beta_1) * grad
        new_second = self._beta_2 * second + (1 - self._beta_2) * tf.square(grad)
        update = new_first / (tf.sqrt(new_second) + self._epsilon)
        if self.decays(var):
            update += self._decay * var
        return tf.group(
            first.assign(new_first, read_value=False),
            second.assign(new_second, read_value=False),
            var.assign_sub(tf.cast(self._rate, update.dtype) * update, read_value=False),
        )

    def _apply_sparse(self, grad: tf.IndexedSlices, var: tf.Variable) -> tf.Operation:
        # The moments of all rows decay, also of those that this batch did not touch.
        return self._apply_dense(tf.convert_to_tensor(grad), var)

    def _resource_apply_dense(self, grad: tf.Tensor, handle: tf.Variable) -> tf.Operation:
        return self._apply_dense(grad, handle)

    def _resource_apply_sparse(self, grad: tf.Tensor, handle: tf.Variable, indices: tf.Tensor) -> tf.Operation:
        return self._apply_sparse(tf.IndexedSlices(grad, indices, handle.shape), handle)


def _loss_scale_manager(settings: OptimizerSettings) -> tfmp.LossScaleManager:
    if settings.loss_scale is not None:
        return tfmp.FixedLossScaleManager(settings.loss_scale)
    return tfmp.ExponentialUpdateLossScaleManager(
        init_loss_scale=settings.init_loss_scale,
        incr_every_n_steps=settings.incr_every_n_steps,
        decr_every_n_nan_or_inf=2,
        incr_ratio=2,
        decr_ratio=0.5,
    )
