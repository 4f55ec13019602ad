"""The step that trains BERT."""

import dataclasses
from types import ModuleType
from typing import NamedTuple

import tensorflow as tf

from tfmp.bert import precision_modes
from tfmp.bert.accumulation import NamedWindow
from tfmp.bert.lamb import LAMBOptimizer
from tfmp.bert.optimizers import AdamWeightDecayOptimizer
from tfmp.bert.schedule import warm_up_then_decay
from tfmp.core import clipping, settings
from tfmp.core.managers import LossScaleManager
from tfmp.optimizers.base import LossScaleOptimizer
from tfmp.optimizers.v1 import LossScaleOptimizerV1
from tfmp.types import Gradients

tf1 = tf.compat.v1

#: What holds one of these in its name has no weight decay.
NOT_DECAYED = ("LayerNorm", "layer_norm", "bias")


@dataclasses.dataclass(frozen=True)
class Training:
    """What building the step yields.

    Attributes:
        train_op: One run: an attempted step or, with accumulation, a micro-batch.
        optimizer: The loss-scaled optimizer, with the counts of its steps; for `tfmp.LossScaleLoggingHook`.
        learning_rate: The rate that `train_op` uses, a float32 scalar.
    """

    train_op: tf.Operation
    optimizer: LossScaleOptimizer
    learning_rate: tf.Tensor


def create_optimizer(
    loss: tf.Tensor,
    init_lr: float,
    num_train_steps: int,
    num_warmup_steps: int | None,
    hvd: ModuleType | None = None,
    manual_fp16: bool = False,
    use_fp16: bool = False,
    num_accumulation_steps: int = 1,
    optimizer_type: str = "adam",
    allreduce_post_accumulation: bool = False,
    init_loss_scale: float = 2**32,
) -> tf.Operation:
    """Build the op that trains all trainable variables of the graph, with the signature of NVIDIA's BERT.

    It is `build_training(...).train_op`: see there for what a run does, and for the tensors to fetch by name.

    A step that is not finite is skipped and not counted; in float32 too, where it makes the originals' weights NaN.

    Gradients are clipped by their true global norm. The originals take that of sparse gradients, such as those of
    `tf.gather`, row by row, unless `manual_fp16` or Horovod made them dense before: where a batch names a row several
    times, their norm is another than that of the sum.

    Args:
        loss: The loss, a floating-point scalar tensor, not scaled.
        init_lr: The learning rate at the end of the warm-up, a number of at least 0.
        num_train_steps: Steps in the training, after which the rate is 0; a whole number from 1. With accumulation a
            step is a window.
        num_warmup_steps: Steps of the warm-up; 0 or None for none.
        hvd: The module `horovod.tensorflow`, initialized, if several processes train together. tfmp takes the mean:
            leave `hvd.DistributedOptimizer` out.
        manual_fp16: The model computes in float16 where it says so: scale the loss by a scale that doubles after 1000
            finite steps, and is halved at every second overflow.
        use_fp16: Let TensorFlow rewrite the graph to float16; the scale is halved at every overflow. The rewrite acts
            on GPUs only, and is a setting of the whole process, which lasts until
            `tf.compat.v1.mixed_precision.disable_mixed_precision_graph_rewrite()`.
        num_accumulation_steps: Runs in a window, a whole number from 1. Above 1 each run is of a micro-batch.
        optimizer_type: "adam" or "lamb", in any case of letters.
        allreduce_post_accumulation: Let the gradients travel once for each window, and not at every run. Each process
            then clips its own.
        init_loss_scale: The scale to start from, in both modes that have one; a number of at least 1.

    Returns:
        The op; it counts the global step, so no line of the script is to assign it.

    Raises:
        TypeError: A setting is of the wrong type.
        ValueError: A setting is out of range; or both float16 modes are asked for, or Horovod is not initialized, or
            the graph trains its variables already.
        NotImplementedError: Runs are to be accumulated under a `tf.distribute` strategy.
        RuntimeError: It is called eagerly.

    Example:
        >>> import tfmp.bert as optimization
        >>> with tf.Graph().as_default(), tf1.Session() as session:
        ...     w = tf1.get_variable("w", initializer=[1.0, 2.0])
        ...     train_op = optimization.create_optimizer(tf.reduce_sum(w), 0.5, 8, 4, manual_fp16=True)
        ...     session.run(tf1.global_variables_initializer())
        ...     for _ in range(3):
        ...         _, *fetched = session.run([train_op, "step_update:0", "learning_rate:0", "loss_scale:0"])
        ...         [float(value) for value in fetched]
        [1.0, 0.0, 4294967296.0]
        [2.0, 0.125, 4294967296.0]
        [3.0, 0.25, 4294967296.0]
    """
    return build_training(
        loss,
        init_lr,
        num_train_steps,
        num_warmup_steps,
        hvd,
        manual_fp16,
        use_fp16,
        num_accumulation_steps,
        optimizer_type,
        allreduce_post_accumulation,
        init_loss_scale,
    ).train_op


def build_training(
    loss: tf.Tensor,
    init_lr: float,
    num_train_steps: int,
    num_warmup_steps: int | None = 0,
    hvd: ModuleType | None = None,
    manual_fp16: bool = False,
    use_fp16: bool = False,
    num_accumulation_steps: int = 1,
    optimizer_type: str = "adam",
    allreduce_post_accumulation: bool = False,
    init_loss_scale: float = 2**32,
    *,
    start_rate: float | None = None,
    weight_decay_rate: float = 0.01,
    clip_norm: float = 1.0,
    loss_scale_manager: LossScaleManager | None = None,
    is_distributed: bool | None = None,
    aggregation_dtype: str | None = "auto",
) -> Training:
    """Build what trains all trainable variables of the graph: BERT's schedule, clipping, optimizer and loss scaling.

        every run           grads = gradients of loss / num_accumulation_steps, the mean over Horovod's processes
                            grads = grads clipped by their global norm
                            sums = grads in the first run of a window, sums + grads in the others
        the last of one     if sums are finite everywhere: optimizer.apply_gradients(sums); global_step += 1
                            move the loss scale

    Under a `tf.distribute` strategy each replica clips its own gradients, to `clip_norm` divided by the number of
    replicas, and the sum of them is applied. The loss of a replica is its part of the whole, a mean divided by the
    replicas: by Estimator, or else by the script. So what is applied is the mean of gradients that are each clipped to
    `clip_norm`, as with `allreduce_post_accumulation`; the norm of it is at most `clip_norm`, and below that where the
    replicas' gradients point elsewhere.

    In every mode a step that is not finite is skipped, on all processes, and not counted. In float32 too, with a
    scale of 1 that adds no variable: a single infinity would make every weight NaN, and each checkpoint from then on.

    Gradients travel between processes scaled; so in half precision, in the modes that have a scale to move, small ones
    are not lost. Fetched by name, from a graph built outside of all scopes: `learning_rate:0`, the rate of this run;
    `step_update:0`, the global step after it; `update_step:0`, whether it ends a window, if windows have more than one
    run; `loss_scale:0`, in both modes that have one. Fetch the two named after steps together with the op:
    fetching them takes the step too.

    Args:
        loss: The loss, not scaled. `create_optimizer` tells more of it, and of all arguments up to `init_loss_scale`.
        init_lr: The learning rate at the end of the warm-up.
        num_train_steps: Steps until it is 0.
        num_warmup_steps: Steps of the warm-up.
        hvd: The module `horovod.tensorflow`, if several processes train together.
        manual_fp16: Scale the loss, of a model that computes in float16 itself.
        use_fp16: Scale the loss, and let TensorFlow rewrite the graph to float16.
        num_accumulation_steps: Runs in a window.
        optimizer_type: "adam" or "lamb".
        allreduce_post_accumulation: Average over processes the sums of each window, and not every run's gradients.
        init_loss_scale: The scale to start from.
        start_rate: As in `warm_up_then_decay`, at least 0; by default the adjusted one for Adam, `init_lr` for LAMB.
        weight_decay_rate: For all variables but biases and layer norms.
        clip_norm: The largest global norm of a run's gradients; above 0.
        loss_scale_manager: Decides the scale in place of the one that the mode stands for.
        is_distributed: Whether several workers train together; by default if `hvd` is given. Horovod need not be
            passed where this is true, only initialized.
        aggregation_dtype: "float16" to let gradients travel so, None for their own type; by default float16 if Horovod
            is given in the modes of float16.

    Returns:
        The op, the optimizer and the rate.

    Raises:
        TypeError: A setting is of the wrong type.
        ValueError: A setting is out of range; or both float16 modes are asked for, or Horovod is not initialized, or
            the graph trains its variables already.
        NotImplementedError: Runs are to be accumulated under a `tf.distribute` strategy.
        RuntimeError: It is called eagerly.

    Example:
        >>> with tf.Graph().as_default(), tf1.Session() as session:
        ...     w = tf1.get_variable("w", initializer=[1.0, 2.0])
        ...     training = build_training(tf.reduce_sum(w), 0.5, 8, optimizer_type="lamb", weight_decay_rate=0.0)
        ...     session.run(tf1.global_variables_initializer())
        ...     _ = session.run(training.train_op)
        ...     int(session.run(training.optimizer.applied_steps)), float(session.run(training.learning_rate)) < 0.5
        (1, True)

    Source: the `optimization.py` of NVIDIA's DeepLearningExamples (TensorFlow/LanguageModeling/BERT).
    """
    settings.flag("manual_fp16", manual_fp16)
    settings.flag("use_fp16", use_fp16)
    settings.flag("allreduce_post_accumulation", allreduce_post_accumulation)
    runs = settings.count("num_accumulation_steps", num_accumulation_steps)
    clip_norm = settings.positive("clip_norm", clip_norm)
    precision_modes.refuse_unsupported(hvd, runs)
    precision_modes.refuse_second_training()
    global_step = tf1.train.get_or_create_global_step()
    kind = _kind(optimizer_type)
    if start_rate is None and not kind.meets_warm_up:
        start_rate = init_lr
    rate = warm_up_then_decay(
        global_step, init_lr, num_train_steps, num_warmup_steps, power=kind.power, start_rate=start_rate
    )
    inner = kind.make(rate, weight_decay_rate, exclude_from_weight_decay=NOT_DECAYED)
    is_distributed = hvd is not None if is_distributed is None else is_distributed
    if aggregation_dtype == "auto":
        aggregation_dtype = "float16" if is_distributed and hvd is not None and (manual_fp16 or use_fp16) else None
    wrap = _SharesWindows if allreduce_post_accumulation and runs > 1 else LossScaleOptimizerV1
    optimizer = wrap(
        inner,
        precision_modes.manager(loss_scale_manager, manual_fp16, use_fp16, init_loss_scale),
        is_distributed,
        sparse_as_dense=True,
        aggregation_dtype=aggregation_dtype,
    )
    if use_fp16:
        precision_modes.rewrite_graph(inner)
    train_op = _step(optimizer, loss, runs, clip_norm, global_step)
    with tf.control_dependencies([train_op]):
        tf.identity(global_step.read_value(), name="step_update")
    return Training(train_op, optimizer, inner.learning_rate)


class _Kind(NamedTuple):
    """What an optimizer type stands for.

    Attributes:
        make: The optimizer's class.
        power: The power of the decay.
        meets_warm_up: Whether the decay starts from where it meets the end of the warm-up, and not from `init_lr`.
    """

    make: type[AdamWeightDecayOptimizer]
    power: float
    meets_warm_up: bool


_KINDS = {
    "adam": _Kind(AdamWeightDecayOptimizer, power=1.0, meets_warm_up=True),
    "lamb": _Kind(LAMBOptimizer, power=0.5, meets_warm_up=False),
}


def _kind(optimizer_type: str) -> _Kind:
    found = _KINDS.get(optimizer_type.lower()) if isinstance(optimizer_type, str) else None
    if found is None:
        raise ValueError(f'optimizer_type must be "adam" or "lamb", got {optimizer_type!r}.')
    return found


class _SharesWindows(LossScaleOptimizerV1):
    """Averages over Horovod's processes the gradients that it applies, in place of those that it computes."""

    def _shares_windows(self) -> bool:
        return True


def _step(
    optimizer: LossScaleOptimizerV1, loss: tf.Tensor, runs: int, clip_norm: float, global_step: tf.Variable
) -> tf.Operation:
    variables = tf1.trainable_variables()
    if not variables:
        raise ValueError("the graph has no trainable variables: build the model before its optimizer.")
    part = loss / runs if runs > 1 else loss
    grads = [grad for grad, _ in optimizer.compute_gradients(part, variables)]
    # Under tf.distribute these are a replica's part of the mean, which the parts are summed to when they are applied.
    clipped, norm = clipping.clip_by_global_norm(grads, clip_norm / tf.distribute.get_strategy().num_replicas_in_sync)

    def apply(grads: Gradients) -> tf.Operation:
        return optimizer.apply_gradients(zip(grads, variables, strict=True), global_step)

    if runs == 1:
        return apply(clipped)
    return NamedWindow(variables, runs).add(clipped, apply, tf.math.is_finite(norm))
