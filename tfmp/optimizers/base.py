"""LossScaleOptimizer: the front door to the front-ends of all hosts."""

import importlib
from collections.abc import Iterable, Mapping, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any, cast

import tensorflow as tf

from tfmp.core.managers import LossScaleManager, Specification
from tfmp.core.overflow.detectors import OverflowDetector
from tfmp.core.settings import not_default
from tfmp.core.step.properties import StepProperties
from tfmp.core.tracing import without_autograph
from tfmp.hosts.keras.which import is_keras2, keras_of, module_for
from tfmp.types import Gradient, Gradients, GradsAndVars, Loss

if TYPE_CHECKING:
    from typing_extensions import Self


class LossScaleOptimizer(StepProperties):
    """Wraps an optimizer: scales the loss, and applies only gradients that are finite on every replica.

    Constructing it gives the front-end for the wrapped optimizer's type, which is also an optimizer of that
    framework: around a `tf.compat.v1.train.Optimizer` it is one, around a Keras optimizer it is a Keras optimizer.
    Replace the optimizer by it and change nothing else.

    On a step that overflows nothing changes but the loss scale: not weights, slots or `global_step`.

    Args:
        opt: The optimizer to wrap: a `tf.compat.v1.train.Optimizer`, or an optimizer of Keras or tf_keras. For Keras
            the keyword is `inner_optimizer`, as in Keras' own wrapper.
        loss_scale_manager: Decides the scale: a `tfmp.LossScaleManager`; "dynamic", the rule of the wrappers of Keras
            and TensorFlow (from 2**15, halved at each overflow, doubled after 2000 finite steps in a row); a number for
            a fixed scale; or any other value of `tfmp.get_loss_scale_manager` except None.
        is_distributed: True if several processes of Horovod train together. They then agree on each step, and tfmp
            averages the gradients, unless the wrapped optimizer is one of Horovod's, which averages them itself. The
            replicas of a `tf.distribute` strategy are found, and agree, with either value. If it is True and there is
            neither Horovod nor a strategy, building a step is an error.
        inner_optimizer: For Keras: the optimizer to wrap, instead of `opt`.
        sparse_as_dense: For TF1: make every `IndexedSlices` that `compute_gradients` finds dense, as tf.contrib did. By
            default they stay sparse: Momentum and Adam then treat them as they do without a wrapper.
        overflow_detector: What counts as overflow; a `tfmp.NonFiniteDetector` unless given.
        aggregation_dtype: The type that scaled gradients travel in between Horovod's workers, `"float16"`:
            half the bytes. By default they travel in their own type. Not for Keras 3.
        jit_compile: For Keras: whether XLA compiles unscaling, clipping and update into one program, which makes a
            step faster than it is without a wrapper. By default "auto": where that pays.
        iterations_include_skipped_steps: For Keras 2: let skipped steps move `iterations`, as its own wrapper does.
        accumulation_steps: Micro-batches in a window. Each call takes the gradients of one; they are added up in
            float32, and the step is taken with their mean, on the call that ends the window. With 1 each call takes a
            step.
        overflow_drops: What an overflow in a micro-batch drops. `"window"`: the step is skipped. `"micro_batch"`: only
            that micro-batch is dropped, on its own replica; the step uses the mean of the others, and is skipped if
            there are none. In both cases the manager learns of the overflow when the window ends.
        micro_batches_per_epoch: After how many micro-batches a window ends though it is not full: the number of those
            in an epoch, or in the whole training. Counting then begins anew. By default windows end when full.
        initial_scale: For Keras, as in its own wrapper: the scale that "dynamic" starts from.
        dynamic_growth_steps: For Keras, as in its own wrapper: after how many finite steps "dynamic" doubles the scale.
        name: For Keras: the optimizer's name.

    Raises:
        TypeError: `opt` is no optimizer, or of a kind that tfmp does not wrap; `loss_scale_manager` describes no
            manager; a number is none; or an argument is not for this kind of optimizer.
        ValueError: `opt` is wrapped already; or `aggregation_dtype` cannot be used here; or `opt` is one of Horovod's
            that does not average the gradients of each step; or a setting is out of range.
        ImportError: The optimizer is of a Keras that is too old.

    Examples:
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

    _public_name = "LossScaleOptimizer"

    if TYPE_CHECKING:
        # What the front-ends have, and a type checker would miss: it does not know which one `__new__` picks.
        inner_optimizer: Any
        name: Any
        variables: Any
        accumulation: Any

        @property
        def iterations(self) -> tf.Variable:
            """For Keras: the count of applied steps."""

        @property
        def learning_rate(self) -> Any:  # noqa: ANN401 - a schedule's is a tensor
            """For Keras: the learning rate of the wrapped optimizer."""

        @learning_rate.setter
        def learning_rate(self, learning_rate: Any) -> None: ...  # noqa: ANN401 - a number, or a schedule

        @property
        def initial_scale(self) -> float:
            """For Keras: the scale that the manager started from."""

        @property
        def dynamic_growth_steps(self) -> int | None:
            """For Keras: after how many finite steps in a row the scale grows."""

        @property
        def dynamic(self) -> bool:
            """For Keras: whether the scale changes."""

        def get_slot(self, var: tf.Variable, name: str) -> tf.Variable | None:
            """For TF1: return a slot of the wrapped optimizer."""

        def get_slot_names(self) -> list[str]:
            """For TF1: return the names of the wrapped optimizer's slots."""

        def get_name(self) -> str:
            """For TF1: return the name of the wrapped optimizer."""

        def set_weights(self, weights: Sequence[Any]) -> None:
            """For Keras: set the values of `variables`."""

        def build(self, var_list: Sequence[Any]) -> None:
            """For Keras: make the variables of the wrapped optimizer."""

        def get_config(self) -> dict[str, Any]:
            """For Keras: return what `from_config` makes the optimizer of again."""

    def __new__(cls, *args: Any, **kwargs: Any) -> "Self":  # noqa: ANN401 - the front-end's arguments
        """Make an object of the front-end for the optimizer that is wrapped."""
        if cls is LossScaleOptimizer:
            opt = args[0] if args else kwargs.get("opt", kwargs.get("inner_optimizer"))
            return cast("Self", super().__new__(_front_end_for(opt)))
        return super().__new__(cls)

    def __init__(
        self,
        opt: Any = None,  # noqa: ANN401 - of any host
        loss_scale_manager: Specification = "dynamic",
        is_distributed: bool = False,
        *,
        inner_optimizer: Any = None,  # noqa: ANN401 - of any Keras
        sparse_as_dense: bool = False,
        overflow_detector: OverflowDetector | None = None,
        aggregation_dtype: str | tf.DType | None = None,
        jit_compile: bool | str = "auto",
        iterations_include_skipped_steps: bool = False,
        accumulation_steps: int = 1,
        overflow_drops: str = "window",
        micro_batches_per_epoch: int | None = None,
        initial_scale: float | None = None,
        dynamic_growth_steps: int | None = None,
        name: str | None = None,
    ) -> None:
        # Front-ends have constructors of their own: only a subclass of the front door itself comes here.
        raise TypeError(
            f"{type(self).__name__} subclasses tfmp.LossScaleOptimizer, which only picks a front-end: subclass "
            "the front-end for your optimizer instead, such as tfmp.optimizers.v1.LossScaleOptimizerV1."
        )

    @property
    def manager(self) -> LossScaleManager:  # type: ignore[override] # Keras would save an attribute a second time
        """The loss-scale manager, which decides the loss scale."""
        return self._loss_scale_manager

    # Otherwise `inspect.signature` and `help` would show the parameters of `__new__`: (*args, **kwargs).
    __new__.__wrapped__ = __init__  # type: ignore[attr-defined] # as functools.wraps sets it

    # The first three methods call those of the host's own class, which comes after this one among the bases of a
    # front-end. The four after them exist only for Keras: its front-ends override them, and on the others they raise
    # AttributeError.

    def minimize(self, loss: Loss, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - the host's
        """Take one step down the gradient of a loss: scale it, differentiate, unscale, and apply if all is finite.

        TF1:   `minimize(loss, global_step=None, var_list=None, ...)`
        Keras: `minimize(loss, var_list, tape=None)`

        Args:
            loss: The loss, of a floating-point type. Eagerly a function that returns it; for Keras also the loss
                itself, with the `tf.GradientTape` that recorded it.
            *args: The host's further arguments.
            **kwargs: The same, by their names.

        Returns:
            TF1: the op of the whole step, None in eager code. Keras: what its own `minimize` returns.
        """
        return super().minimize(loss, *args, **kwargs)  # type: ignore[misc] # the host's base class has it

    def compute_gradients(self, loss: Loss, *args: Any, **kwargs: Any) -> list[tuple[Gradient, Any]]:  # noqa: ANN401
        """Return the gradients of a loss in true magnitude, with their variables; the loss is scaled in between.

        TF1:   `compute_gradients(loss, var_list=None, ...)`
        Keras: `compute_gradients(loss, var_list, tape=None)`

        Args:
            loss: As in `minimize`.
            *args: The host's further arguments.
            **kwargs: The same, by their names.

        Returns:
            Pairs of a gradient and its variable, for `apply_gradients`. Clip in between by `tfmp.clip_by_global_norm`
            and the like, which hide no overflow.
        """
        return super().compute_gradients(loss, *args, **kwargs)  # type: ignore[misc] # the host's base class has it

    @without_autograph
    def apply_gradients(self, grads_and_vars: GradsAndVars, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        """Apply gradients if they are finite on every replica, and move the loss scale.

        TF1:   `apply_gradients(grads_and_vars, global_step=None, name=None)`
        Keras: `apply_gradients(grads_and_vars, ...)`

        Args:
            grads_and_vars: Pairs of a gradient and its variable. TF1: as `compute_gradients` returned them. Keras:
                scaled after `scale_loss`, unscaled after `get_unscaled_gradients` and `compute_gradients`.
            *args: The host's further arguments.
            **kwargs: The same, by their names.

        Returns:
            TF1: the op of the whole step, None in eager code. Keras: a count of steps.
        """
        return super().apply_gradients(grads_and_vars, *args, **kwargs)  # type: ignore[misc] # the host's base class

    def scale_loss(self, loss: tf.Tensor) -> tf.Tensor:
        """For Keras: multiply a loss by the loss scale; `apply_gradients` and `apply` then unscale the gradients.

        Args:
            loss: The loss, of a floating-point type.

        Returns:
            The scaled loss, in float32 or float64.
        """
        raise NotImplementedError

    def get_scaled_loss(self, loss: Loss) -> Loss:
        """For Keras: multiply a loss by the loss scale, for a loop that calls `get_unscaled_gradients`.

        Args:
            loss: The loss, of a floating-point type, or a function that returns it.

        Returns:
            The scaled loss, in float32 or float64, or a function that returns it.
        """
        raise NotImplementedError

    def get_unscaled_gradients(self, grads: Gradients) -> list[Gradient]:
        """For Keras: divide gradients by the loss scale; `apply_gradients` then takes what this returned.

        Args:
            grads: The gradients of what `get_scaled_loss` returned; None stays None.

        Returns:
            The gradients in true magnitude, in float32 or float64.
        """
        raise NotImplementedError

    def apply(self, grads: Iterable[Gradient], trainable_variables: Iterable[Any] | None = None) -> Any:  # noqa: ANN401
        """For Keras 3: as `apply_gradients`, with gradients and variables in two lists.

        Args:
            grads: The gradients, one for each variable.
            trainable_variables: The variables; by default those that the optimizer was built with.
        """
        raise NotImplementedError

    @classmethod
    def from_config(cls, config: dict[str, Any], custom_objects: dict[str, Any] | None = None) -> "LossScaleOptimizer":
        """For Keras: make an optimizer from what `get_config` returned, that of Keras' own wrapper included.

        Args:
            config: The configuration.
            custom_objects: Classes that are not registered with Keras, by their names.

        Raises:
            ValueError: It is the configuration of something else.

        Examples:
            >>> import keras, tfmp
            >>> opt = tfmp.LossScaleOptimizer(keras.optimizers.SGD(0.5), tfmp.FixedLossScaleManager(256))
            >>> float(tfmp.LossScaleOptimizer.from_config(opt.get_config()).loss_scale)
            256.0
        """
        if cls is not LossScaleOptimizer:
            raise NotImplementedError(f"{cls.__name__} wraps no optimizer of Keras.")
        return _front_end_of_config(config).from_config(config, custom_objects)

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

        Examples:
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
                f"{type(optimizer).__name__}: wrap any other by tfmp.LossScaleOptimizer(optimizer)."
            )
        return _front_end_for(optimizer.inner_optimizer)._from_keras(optimizer)

    @classmethod
    def _from_keras(cls, optimizer: Any) -> "LossScaleOptimizer":  # noqa: ANN401 - of any Keras
        raise NotImplementedError(f"{cls.__name__} wraps no optimizer of Keras.")


def validated_aggregation_dtype(
    dtype: str | tf.DType | None, is_distributed: bool, horovod_averages: bool
) -> tf.DType | None:
    """Return the dtype in which gradients are sent between Horovod's workers; None for their own dtype.

    Args:
        dtype: The user's `aggregation_dtype`.
        is_distributed: The user's `is_distributed`; without it no gradients are sent.
        horovod_averages: Whether an optimizer of Horovod sends the gradients.

    Raises:
        ValueError: The dtype is not float16; or tfmp does not send the gradients.
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


def settings_to_show(opt: object, settings: Mapping[str, Any]) -> list[str]:
    """Return what the `repr` of a wrapper shows: the type of the wrapped optimizer, and settings that are no defaults.

    Args:
        opt: The wrapped optimizer.
        settings: The settings, by the names of the constructor's arguments.
    """
    shown = not_default(LossScaleOptimizer, settings)
    return [type(opt).__name__, *(f"{name}={value!r}" for name, value in shown.items())]


def refuse_wrapped(opt: object) -> None:
    """Raise an error if an optimizer is wrapped already.

    Args:
        opt: The optimizer to wrap.

    Raises:
        ValueError: `opt` is a `LossScaleOptimizer`.
    """
    if isinstance(opt, LossScaleOptimizer):
        raise ValueError("opt is a LossScaleOptimizer already: wrapping it again would scale the loss twice.")


def _front_end_for(opt: object) -> type[LossScaleOptimizer]:
    refuse_wrapped(opt)
    if isinstance(opt, tf.compat.v1.train.Optimizer):
        from tfmp.optimizers.v1 import LossScaleOptimizerV1

        return LossScaleOptimizerV1
    keras = keras_of(opt, "optimizers.Optimizer")
    if keras is not None:
        return front_end_of(keras)
    advice = ": take it from keras.optimizers, without legacy" if ".legacy." in type(opt).__module__ else ""
    raise TypeError(
        "opt must be a tf.compat.v1.train.Optimizer or an optimizer of Keras or tf_keras, "
        f"got {opt!r} of type {type(opt).__module__}.{type(opt).__qualname__}{advice}."
    )


def _front_end_of_config(config: Mapping[str, Any]) -> type[LossScaleOptimizer]:
    if "inner_optimizer" not in config:
        raise ValueError(
            "config must be what get_config of a LossScaleOptimizer of tfmp or Keras returned, with an "
            f"inner_optimizer, got {', '.join(config) or 'nothing'}."
        )
    # tf_keras writes "keras" for its name too; what tells them apart is a setting that all optimizers of Keras 2 have.
    of_keras2 = "is_legacy_optimizer" in config["inner_optimizer"]["config"]
    keras = importlib.import_module("keras")
    if of_keras2 and not is_keras2(keras):
        keras = importlib.import_module("tf_keras")
    return front_end_of(keras)


def front_end_of(keras: ModuleType) -> type[LossScaleOptimizer]:
    """Return the front-end for the optimizers of a Keras, importing it.

    Args:
        keras: The package `keras` or `tf_keras`.

    Raises:
        ImportError: It is too old.
    """
    match module_for(keras):
        case "tf_keras":
            from tfmp.optimizers.tf_keras import LossScaleOptimizerTfKeras

            return LossScaleOptimizerTfKeras
        case "keras215":
            from tfmp.optimizers.keras215 import LossScaleOptimizerKeras215

            return LossScaleOptimizerKeras215
        case "keras3":
            from tfmp.optimizers.keras3 import LossScaleOptimizerKeras3

            return LossScaleOptimizerKeras3
