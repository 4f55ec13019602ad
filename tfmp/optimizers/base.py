"""LossScaleOptimizer: the front door to the front-ends of all hosts."""

import sys
from typing import Any

import tensorflow as tf

from tfmp.core.managers import LossScaleManager
from tfmp.core.overflow import OverflowDetector
from tfmp.core.step_properties import StepProperties


class LossScaleOptimizer(StepProperties):
    """Wraps an optimizer: scales the loss, and applies only gradients that are finite on every replica.

    Constructing it gives the front-end for the wrapped optimizer's type, which is also an optimizer of that
    framework: around a `tf.compat.v1.train.Optimizer` it is one, around a Keras optimizer it is a Keras optimizer.
    Replace the optimizer by it and change nothing else.

    On a step that overflows nothing changes but the loss scale: not weights, slots or `global_step`.

    Args:
        opt: The optimizer to wrap: a `tf.compat.v1.train.Optimizer`, or an optimizer of Keras or tf_keras (where the
            argument is called `inner_optimizer`, as in Keras).
        loss_scale_manager: Decides the scale, a `tfmp.LossScaleManager`.
        is_distributed: Whether more than one device takes part. With True under Horovod the workers agree, and share
            the gradients of an optimizer that Horovod did not make. The replicas of a `tf.distribute` strategy are
            found, and agree, with either value. Where nothing distributes, True refuses to build a step.
        sparse_as_dense: Make every `IndexedSlices` that `compute_gradients` finds dense, as tf.contrib did. By default
            they stay sparse: Momentum and Adam then treat them as they do without a wrapper.
        overflow_detector: What counts as overflow; a `tfmp.NonFiniteDetector` unless given.
        aggregation_dtype: The type that scaled gradients travel in between Horovod's workers, `"float16"`:
            half the bytes. By default they travel in their own type. Not for Keras 3.
        jit_compile: For Keras 3: whether XLA compiles unscaling, clipping and update into one program, which makes a
            step faster than it is without a wrapper. By default "auto": where that pays.
        accumulation_steps: Micro-batches in a window. Each call takes the gradients of one; they are added up in
            float32, and the step is taken with their mean, on the call that ends the window. With 1 each call takes a
            step.
        overflow_drops: What an overflow in a micro-batch makes invalid, for TF1's optimizers and all versions of Keras.
            `"window"`: the step is skipped, and nothing of the window is applied. `"micro_batch"`: that micro-batch
            alone, on the replica that it is of; the mean is of the others, and the step is skipped only if there are
            none. The scale backs off when the window ends, either way.
        micro_batches_per_epoch: After how many micro-batches a window ends though it is not full: the number of those
            in an epoch, or in the whole training. Counting then begins anew. By default windows end when full.

    Raises:
        TypeError: `opt` is no optimizer, or of a kind that tfmp does not wrap; `loss_scale_manager` is no manager; or
            a number is none.
        ValueError: `opt` is wrapped already; or `aggregation_dtype` is not to be had; or `opt` is one of Horovod's that
            does not average the gradients of each step; or a setting of the accumulation is out of range.

    Example:
        >>> import tfmp
        >>> w = tf.Variable([1.0, 2.0])
        >>> opt = tfmp.LossScaleOptimizer(
        ...     tf.compat.v1.train.GradientDescentOptimizer(0.5), tfmp.FixedLossScaleManager(1024))
        >>> _ = opt.minimize(lambda: tf.reduce_sum(w), var_list=[w])
        >>> w.numpy()
        array([0.5, 1.5], dtype=float32)
        >>> _ = opt.minimize(lambda: tf.reduce_sum(w) * float("inf"), var_list=[w])
        >>> w.numpy(), int(opt.skipped_steps)
        (array([0.5, 1.5], dtype=float32), 1)

    Source: tf.contrib.mixed_precision.LossScaleOptimizer.
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> "LossScaleOptimizer":  # noqa: ANN401 - the front-end's arguments
        """Make an object of the front-end for the optimizer that is wrapped."""
        if cls is LossScaleOptimizer:
            opt = args[0] if args else kwargs.get("opt", kwargs.get("inner_optimizer"))
            return super().__new__(_front_end_for(opt))
        return super().__new__(cls)

    def __init__(
        self,
        opt: tf.compat.v1.train.Optimizer,
        loss_scale_manager: LossScaleManager,
        is_distributed: bool = False,
        *,
        sparse_as_dense: bool = False,
        overflow_detector: OverflowDetector | None = None,
        aggregation_dtype: str | tf.DType | None = None,
        jit_compile: bool | str = "auto",
        accumulation_steps: int = 1,
        overflow_drops: str = "window",
        micro_batches_per_epoch: int | None = None,
    ) -> None:
        # Front-ends have constructors of their own: only a subclass of the front door itself comes here.
        raise TypeError(
            f"{type(self).__name__} subclasses tfmp.LossScaleOptimizer, which only picks a front-end: subclass "
            "the front-end for your optimizer instead, such as tfmp.optimizers.v1.LossScaleOptimizerV1."
        )

    @classmethod
    def from_keras(cls, optimizer: Any) -> "LossScaleOptimizer":  # noqa: ANN401 - of any Keras
        """Take the place of Keras' own `LossScaleOptimizer`, and go on where it stopped.

        For a model that was saved with it: load the model, then take over. Keras 2's own wrapper saves its scale with
        `tf.train.Checkpoint` only, and starts anew from the initial scale otherwise; so does this.

        Args:
            optimizer: A `keras.mixed_precision.LossScaleOptimizer`, of any Keras.

        Returns:
            A `tfmp.LossScaleOptimizer` around the same inner optimizer, with a manager that follows the same rule from
            the same scale and count of finite steps. The scale is brought within 1 and the largest float32, and
            in Keras 2 skipped steps go on moving `iterations`.

        Raises:
            TypeError: It is no such optimizer.
            ValueError: It is a `tfmp.LossScaleOptimizer` already.

        Example:
            >>> import keras, tfmp
            >>> stock = keras.mixed_precision.LossScaleOptimizer(keras.optimizers.SGD(), initial_scale=256)
            >>> float(tfmp.LossScaleOptimizer.from_keras(stock).loss_scale)
            256.0
        """
        if isinstance(optimizer, LossScaleOptimizer):
            raise ValueError("optimizer is a tfmp.LossScaleOptimizer already: use it as it is.")
        if not hasattr(optimizer, "inner_optimizer"):
            raise TypeError(
                f"optimizer must be a keras.mixed_precision.LossScaleOptimizer, got {optimizer!r} of type "
                f"{type(optimizer).__name__}: wrap any other by tfmp.LossScaleOptimizer(optimizer, manager)."
            )
        return _front_end_for(optimizer.inner_optimizer)._from_keras(optimizer)

    @classmethod
    def _from_keras(cls, optimizer: Any) -> "LossScaleOptimizer":  # noqa: ANN401 - of any Keras
        raise NotImplementedError(f"{cls.__name__} wraps no optimizer of Keras.")


def validated_aggregation_dtype(
    dtype: str | tf.DType | None, is_distributed: bool, horovod_averages: bool
) -> tf.DType | None:
    """Return the type that gradients travel in, None for their own, or say why none can be set.

    Args:
        dtype: What the user gave as a type.
        is_distributed: Whether they travel.
        horovod_averages: Whether an optimizer of Horovod sends them.

    Raises:
        ValueError: It is another than float16; or it is not this package that sends the gradients.
    """
    if dtype is None:
        return None
    # Horovod 0.28.1 sums no bfloat16.
    if dtype != tf.float16:
        raise ValueError(f'aggregation_dtype must be "float16" or None, got {dtype!r}.')
    if not is_distributed:
        raise ValueError("aggregation_dtype='float16' needs is_distributed=True: no gradients travel without it.")
    if horovod_averages:
        raise ValueError(
            "aggregation_dtype='float16' is for an optimizer that Horovod did not make: leave it out, and give "
            "hvd.DistributedOptimizer compression=hvd.Compression.fp16; or wrap the plain optimizer."
        )
    return tf.float16


def refuse_wrapped(opt: object) -> None:
    """Say so if an optimizer is wrapped already.

    Args:
        opt: The optimizer to wrap.

    Raises:
        ValueError: It is a `LossScaleOptimizer`.
    """
    if isinstance(opt, LossScaleOptimizer):
        raise ValueError("opt is a LossScaleOptimizer already: wrapping it again would scale the loss twice.")


def _front_end_for(opt: object) -> type[LossScaleOptimizer]:
    refuse_wrapped(opt)
    if isinstance(opt, tf.compat.v1.train.Optimizer):
        from tfmp.optimizers.v1 import LossScaleOptimizerV1

        return LossScaleOptimizerV1
    if _is_of(opt, "keras", "3."):
        from tfmp.optimizers.keras3 import LossScaleOptimizerKeras3

        return LossScaleOptimizerKeras3
    if _is_of(opt, "keras", "2."):
        from tfmp.optimizers.keras215 import LossScaleOptimizerKeras215

        return LossScaleOptimizerKeras215
    if _is_of(opt, "tf_keras", "2."):
        from tfmp.optimizers.tf_keras import LossScaleOptimizerTfKeras

        return LossScaleOptimizerTfKeras
    advice = ": take it from keras.optimizers, without legacy" if ".legacy." in type(opt).__module__ else ""
    raise TypeError(
        "opt must be a tf.compat.v1.train.Optimizer or an optimizer of Keras or tf_keras, "
        f"got {opt!r} of type {type(opt).__module__}.{type(opt).__qualname__}{advice}."
    )


def _is_of(opt: object, package: str, version: str) -> bool:
    # A user who has an optimizer of Keras has imported Keras; nobody else should pay for that.
    keras = sys.modules.get(package)
    return keras is not None and keras.__version__.startswith(version) and isinstance(opt, keras.optimizers.Optimizer)
