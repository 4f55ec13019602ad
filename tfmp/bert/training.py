"""Builds the training step of BERT."""

import dataclasses
from types import ModuleType
from typing import NamedTuple

import tensorflow as tf

from tfmp.bert import precision_modes
from tfmp.bert.accumulation import NamedWindow
from tfmp.bert.lamb import LAMBOptimizer
from tfmp.bert.optimizers import AdamWeightDecayOptimizer
from tfmp.bert.schedule import warm_up_then_decay
from tfmp.core import settings
from tfmp.core.gradients import clipping
from tfmp.core.managers import LossScaleManager
from tfmp.hosts.base import LossScaleOptimizer
from tfmp.hosts.tf1.optimizer import LossScaleOptimizerV1
from tfmp.types import Gradients

tf1 = tf.compat.v1

#: A variable whose name contains one of these has no weight decay.
NOT_DECAYED = ("LayerNorm", "layer_norm", "bias")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Training:
    """The training step that `build_training` builds, with the objects that monitor it.

    Attributes:
        train_op: The op that attempts one step or, with gradient accumulation, processes one micro-batch.
        optimizer: The optimizer with loss scaling. It counts its steps, and `tfmp.LossScaleLoggingHook` accepts it.
        learning_rate: The learning rate that `train_op` uses, a float32 scalar tensor.
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

    The op is `build_training(...).train_op`. The arguments and the errors are those of `build_training`, which also
    tells what one run of the op does, and which tensors can be fetched by name. The op increments the global step, so
    the script must not do that.

    A step whose gradients are not finite is skipped and not counted, in float32 too, where the original scripts would
    make all weights NaN.

    Gradients are clipped by their true global norm. The original scripts compute the norm of a sparse gradient, such as
    that of `tf.gather`, from its rows one by one, unless `manual_fp16` or Horovod made it dense before. If a batch
    contains a row several times, the result differs from the norm of the summed gradient.

    Examples:
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
    """Build a training step with BERT's schedule, clipping, optimizer and loss scaling, for all trainable variables.

    One run of the step does the following. A window is the group of `num_accumulation_steps` runs that make one step.

        every run                     grads = gradients of loss / num_accumulation_steps, averaged over the processes
                                      grads = grads clipped by their global norm
                                      sums = grads in the first run of a window, sums + grads in the other runs
        the last run of a window      if all sums are finite: optimizer.apply_gradients(sums); global_step += 1
                                      update the loss scale

    In every mode, a step whose gradients are not finite is skipped on all processes, and is not counted. Without a
    float16 mode the loss scale is fixed at 1 and adds no variable. The check is still needed there: a single infinity
    would make every weight NaN, and every later checkpoint useless.

    Under a `tf.distribute` strategy each replica clips its own gradients, to `clip_norm` divided by the number of
    replicas, and the sum over the replicas is applied. The loss of a replica must be its part of the whole loss, which
    is its mean loss divided by the number of replicas; Estimator divides it, any other script must do so itself. What
    is applied is therefore the mean of gradients that are each clipped to `clip_norm`, as with
    `allreduce_post_accumulation`. The norm of this mean is at most `clip_norm`, and lower if the gradients of the
    replicas differ in direction.

    Processes exchange scaled gradients. So in the float16 modes, small gradients are not lost when they are exchanged
    in half precision.

    If the graph is built outside of all name scopes, these tensors can be fetched by name:

        learning_rate:0    the learning rate of this run
        loss_scale:0       the loss scale, in both float16 modes
        step_update:0      the global step after this run
        update_step:0      whether this run is the last one of its window, if a window has more than one run

    Fetch `step_update:0` and `update_step:0` only together with the op, because fetching them runs the step too.

    Args:
        loss: The unscaled loss, a floating-point scalar tensor.
        init_lr: The learning rate at the end of the warm-up; at least 0.
        num_train_steps: The number of steps of the whole training, after which the rate is 0; at least 1.
        num_warmup_steps: The number of steps of the warm-up; 0 or None for no warm-up.
        hvd: The initialized module `horovod.tensorflow`, if several processes train together. tfmp averages the
            gradients over the processes, so do not use `hvd.DistributedOptimizer` in addition.
        manual_fp16: Set this if the model itself casts to float16. The loss is then scaled; the scale doubles after
            1000 finite steps and is halved at every second overflow.
        use_fp16: Set this to let TensorFlow rewrite the graph to float16. The loss is then scaled; the scale doubles
            after 1000 finite steps and is halved at every overflow. The rewrite acts on GPUs only. It is a setting of
            the whole process, and lasts until
            `tf.compat.v1.mixed_precision.disable_mixed_precision_graph_rewrite()` is called.
        num_accumulation_steps: The number of runs in a window; at least 1. If it is more than 1, each run processes one
            micro-batch.
        optimizer_type: "adam" or "lamb", in upper or lower case.
        allreduce_post_accumulation: If True, the processes exchange the sums of each window, in place of the gradients
            of each run. Each process then clips its own gradients.
        init_loss_scale: The loss scale at the start of training, in both float16 modes; at least 1.
        start_rate: The rate from which the decay starts at step 0, as in `warm_up_then_decay`; at least 0. By default,
            with Adam the rate at which the decay meets the end of the warm-up, and with LAMB `init_lr`.
        weight_decay_rate: The weight decay of all variables except biases and layer norms; at least 0.
        clip_norm: The largest allowed global norm of the gradients of a run; above 0.
        loss_scale_manager: A manager that decides the loss scale, in place of the manager of the float16 mode.
        is_distributed: Whether Horovod's processes train together; by default whether `hvd` is given. If it is True and
            Horovod is initialized, `hvd` need not be passed.
        aggregation_dtype: The type in which processes exchange gradients: "float16", or None for the type of the
            gradients. The default "auto" means float16 if `hvd` is given and a float16 mode is chosen, else None.

    Returns:
        The op, the optimizer and the learning rate.

    Raises:
        TypeError: A setting is of the wrong type.
        ValueError: A setting is out of range; or both float16 modes are chosen; or Horovod is not initialized; or the
            graph already holds an op that trains its variables.
        NotImplementedError: Gradients are to be accumulated under a `tf.distribute` strategy.
        RuntimeError: TensorFlow executes eagerly.

    Examples:
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
    precision_modes.refuse_unsupported_setup(hvd, runs)
    precision_modes.refuse_second_training()
    global_step = tf1.train.get_or_create_global_step()
    kind = _kind(optimizer_type)
    if start_rate is None and not kind.meets_warm_up:
        start_rate = init_lr
    rate = warm_up_then_decay(
        global_step,
        init_lr,
        num_train_steps=num_train_steps,
        num_warmup_steps=num_warmup_steps,
        power=kind.power,
        start_rate=start_rate,
    )
    inner = kind.make(rate, weight_decay_rate, exclude_from_weight_decay=NOT_DECAYED)
    is_distributed = hvd is not None if is_distributed is None else is_distributed
    if aggregation_dtype == "auto":
        aggregation_dtype = "float16" if is_distributed and hvd is not None and (manual_fp16 or use_fp16) else None
    wrap = _SharesWindows if allreduce_post_accumulation and runs > 1 else LossScaleOptimizerV1
    optimizer = wrap(
        inner,
        precision_modes.manager_of_mode(loss_scale_manager, manual_fp16, use_fp16, init_loss_scale),
        is_distributed,
        sparse_as_dense=True,
        aggregation_dtype=aggregation_dtype,
    )
    if use_fp16:
        precision_modes.enable_float16_rewrite(inner)
    train_op = _step(optimizer, loss, runs, clip_norm, global_step)
    with tf.control_dependencies([train_op]):
        tf.identity(global_step.read_value(), name="step_update")
    return Training(train_op=train_op, optimizer=optimizer, learning_rate=inner.learning_rate)


class _Kind(NamedTuple):
    """An optimizer type, with the schedule that the published scripts use for it."""

    make: type[AdamWeightDecayOptimizer]
    #: The power of the learning rate's decay.
    #: The power of the learning rate's decay.
    power: float
    #: Whether the decay starts from the rate at which it meets the end of the warm-up. If False, it starts from
    #: `init_lr`.
    #: Whether the decay starts from the rate at which it meets the end of the warm-up. If False, it starts from
    #: `init_lr`.
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
    """Averages gradients over Horovod's processes when it applies them, not when it computes them."""

    def _averages_when_applying(self) -> bool:
        return True


def _step(
    optimizer: LossScaleOptimizerV1, loss: tf.Tensor, runs: int, clip_norm: float, global_step: tf.Variable
) -> tf.Operation:
    variables = tf1.trainable_variables()
    if not variables:
        raise ValueError("the graph has no trainable variables: build the model before its optimizer.")
    part = loss / runs if runs > 1 else loss
    grads = [grad for grad, _ in optimizer.compute_gradients(part, variables)]
    # Under tf.distribute the gradients of a replica are its part of the mean, and apply_gradients adds the parts. So
    # each part is clipped to its share of clip_norm.
    clipped, norm = clipping.clip_by_global_norm(grads, clip_norm / tf.distribute.get_strategy().num_replicas_in_sync)

    def apply(grads: Gradients) -> tf.Operation:
        return optimizer.apply_gradients(zip(grads, variables, strict=True), global_step)

    if runs == 1:
        return apply(clipped)
    return NamedWindow(variables, runs).add(clipped, apply, tf.math.is_finite(norm))
