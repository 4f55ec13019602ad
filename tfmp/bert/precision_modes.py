"""The float16 modes of `create_optimizer`, and the set-ups in which it cannot build a step."""

from types import ModuleType

import tensorflow as tf

from tfmp.core.managers import ExponentialUpdateLossScaleManager, FixedLossScaleManager, LossScaleManager

tf1 = tf.compat.v1


def manager_of_mode(
    given: LossScaleManager | None, manual_fp16: bool, use_fp16: bool, init_loss_scale: float
) -> LossScaleManager:
    """Return the manager that the script gave, if any, else that of the mode; without a mode its scale is fixed at 1.

    Examples:
        >>> float(manager_of_mode(None, manual_fp16=True, use_fp16=False, init_loss_scale=2.0**10).get_loss_scale())
        1024.0
    """
    if manual_fp16 and use_fp16:
        raise ValueError(
            "manual_fp16 and use_fp16 are both True, which would scale the loss twice: leave one of them False."
        )
    if given is not None:
        return given
    if manual_fp16:
        return ExponentialUpdateLossScaleManager(init_loss_scale, 1000, 2, decr_ratio=0.5)
    if use_fp16:
        return ExponentialUpdateLossScaleManager(init_loss_scale, 1000, 1, decr_ratio=0.5)
    return FixedLossScaleManager(1)


def enable_float16_rewrite(optimizer: tf.compat.v1.train.Optimizer) -> None:
    """Make TensorFlow rewrite all graphs of this process to float16 when they run on GPUs.

    The optimizer, which may be any, is not changed.
    """
    # TensorFlow has no other public switch for the rewrite. The function also returns a wrapper of the optimizer, which
    # is not needed here. With a fixed scale this wrapper creates no variable.
    tf1.mixed_precision.enable_mixed_precision_graph_rewrite(optimizer, loss_scale=1.0)


def refuse_unsupported_setup(hvd: ModuleType | None, runs: int) -> None:
    """Raise an error if a step of so many runs cannot be built in the present set-up."""
    if tf.executing_eagerly():
        raise RuntimeError(
            "a BERT training step is built into a graph, but TensorFlow executes eagerly: call this in Estimator's "
            "model_fn, under tf.Graph().as_default(), or after tf.compat.v1.disable_v2_behavior()."
        )
    if runs > 1 and tf.distribute.has_strategy():
        raise NotImplementedError(
            f"num_accumulation_steps={runs} is not supported under {type(tf.distribute.get_strategy()).__name__}: use "
            "Horovod, or tfmp.LossScaleOptimizer(..., accumulation_steps=...)."
        )
    if hvd is not None and not hasattr(hvd, "is_initialized"):
        raise TypeError(
            f"hvd must be the module horovod.tensorflow or None, got {hvd!r} of type {type(hvd).__name__}. For the "
            "signature of Google's BERT, whose fifth argument is use_tpu, write from tfmp.bert import google as "
            "optimization."
        )
    if hvd is not None and not hvd.is_initialized():
        raise ValueError(
            "hvd was given, but Horovod is not initialized: call hvd.init() before this, or pass hvd=None."
        )


def refuse_second_training() -> None:
    """Raise an error if the graph already holds a step that trains its variables.

    A second step would have moments of its own, which differ from those of the first.
    """
    # All replicas of a strategy pass this check before one of them creates the moments, so no replica sees another's.
    made = [variable.op.name for variable in tf1.global_variables() if variable.op.name.endswith("/adam_m")]
    for variable in tf1.trainable_variables():
        # The name of a slot begins with the variable scope in which the step was built.
        slots = [slot for slot in made if f"/{slot}".endswith(f"/{variable.op.name}/adam_m")]
        if slots:
            raise ValueError(
                f"the graph holds a step that trains {variable.op.name} already, with the moments {slots[0]}: call "
                "create_optimizer once in a graph; for several losses, pass their sum."
            )
