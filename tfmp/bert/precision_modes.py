"""What the modes of the BERT kit stand for, and where they do not work."""

from types import ModuleType

import tensorflow as tf

from tfmp.core.managers import ExponentialUpdateLossScaleManager, FixedLossScaleManager, LossScaleManager

tf1 = tf.compat.v1


def manager(
    given: LossScaleManager | None, manual_fp16: bool, use_fp16: bool, init_loss_scale: float
) -> LossScaleManager:
    """Return the manager of a mode.

    Args:
        given: The script's own, which takes its place; or None.
        manual_fp16: As in `create_optimizer`.
        use_fp16: As there.
        init_loss_scale: As there.

    Raises:
        TypeError: The scale is no number.
        ValueError: The scale is out of range, or both modes are asked for.

    Example:
        >>> float(manager(None, manual_fp16=True, use_fp16=False, init_loss_scale=2.0**10).get_loss_scale())
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


def rewrite_graph(optimizer: tf.compat.v1.train.Optimizer) -> None:
    """Let TensorFlow rewrite the graphs of this process to float16, on GPUs.

    Args:
        optimizer: Any optimizer.
    """
    # TensorFlow has no other public switch. It also wraps the optimizer, which is not needed, and whose scale makes no
    # variable as long as it is fixed.
    tf1.mixed_precision.enable_mixed_precision_graph_rewrite(optimizer, loss_scale=1.0)


def refuse_unsupported(hvd: ModuleType | None, runs: int) -> None:
    """Say so where the step cannot be built.

    Args:
        hvd: As in `build_training`.
        runs: Runs in a window.

    Raises:
        RuntimeError: TensorFlow executes eagerly.
        TypeError: `hvd` is no module of Horovod.
        NotImplementedError: Runs are to be accumulated under a strategy.
        ValueError: Horovod is not initialized.
    """
    if tf.executing_eagerly():
        raise RuntimeError(
            "this builds a step into a graph, and TensorFlow executes eagerly: call it in Estimator's model_fn, under "
            "tf.Graph().as_default(), or after tf.compat.v1.disable_v2_behavior()."
        )
    if runs > 1 and tf.distribute.has_strategy():
        raise NotImplementedError(
            f"num_accumulation_steps={runs} under {type(tf.distribute.get_strategy()).__name__}: use Horovod, or "
            "tfmp.LossScaleOptimizer(..., accumulation_steps=...)."
        )
    if hvd is not None and not hasattr(hvd, "is_initialized"):
        raise TypeError(
            f"hvd must be the module horovod.tensorflow or None, got {hvd!r} of type {type(hvd).__name__}. For the "
            "signature of Google's BERT, whose fifth argument is use_tpu, write from tfmp.bert import google as "
            "optimization."
        )
    if hvd is not None and not hvd.is_initialized():
        raise ValueError(
            "hvd was given, and Horovod is not initialized: call hvd.init() before this, or pass hvd=None."
        )


def refuse_second_training() -> None:
    """Say so if the graph has a step that trains its variables, whose moments a second one would not share.

    Raises:
        ValueError: It has.
    """
    # The replicas of a strategy all come by here before one of them makes the moments.
    made = [variable.op.name for variable in tf1.global_variables() if variable.op.name.endswith("/adam_m")]
    for variable in tf1.trainable_variables():
        # Below the variable scope that the step was built in.
        slots = [slot for slot in made if f"/{slot}".endswith(f"/{variable.op.name}/adam_m")]
        if slots:
            raise ValueError(
                f"the graph holds a step that trains {variable.op.name} already, with the moments {slots[0]}: call "
                "create_optimizer once in a graph, and for several losses on their sum."
            )
