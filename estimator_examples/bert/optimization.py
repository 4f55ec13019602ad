"""The training step of the example, built by `tfmp.bert` from the example's settings."""

import dataclasses

import tensorflow as tf

import tfmp
from tfmp import bert


@dataclasses.dataclass(frozen=True)
class OptimizerSettings:
    """The settings of the optimizer.

    Attributes:
        learning_rate: The learning rate at the end of the warm-up.
        clip_norm: The global norm to which the gradients are clipped.
        loss_scale: The fixed loss scale; None for a dynamic one.
        is_distributed: Whether several workers train together.
        aggregation_dtype: The type in which gradients are sent between workers; None for the gradients' own type.
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


def build_training(loss: tf.Tensor, settings: OptimizerSettings) -> bert.Training:
    """Build the operation that trains all variables of the graph by one step.

    Args:
        loss: The unscaled float32 loss.
        settings: The settings of the optimizer.

    Returns:
        The train operation, the optimizer and the learning rate.
    """
    return bert.build_training(
        loss,
        settings.learning_rate,
        settings.num_train_steps,
        settings.num_warmup_steps,
        weight_decay_rate=settings.weight_decay,
        clip_norm=settings.clip_norm,
        loss_scale_manager=_loss_scale_manager(settings),
        is_distributed=settings.is_distributed,
        aggregation_dtype=settings.aggregation_dtype,
    )


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
