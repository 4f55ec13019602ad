"""LossScaleOptimizer: the front door to the front-ends of all hosts."""

import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import tensorflow as tf

from tfmp.core import lists, settings
from tfmp.core.accumulation import AccumulationSettings
from tfmp.core.adapter import OptimizerAdapter, names_of
from tfmp.core.distribute import Distribution
from tfmp.core.distribute.horovod_detection import is_horovods, refuse_unsupported_horovods
from tfmp.core.managers import LossScaleManager, Specification
from tfmp.core.overflow.detectors import OverflowDetector, validated_detector
from tfmp.core.spikes.detector import SpikeDetector, validated_spike_detector
from tfmp.core.step.scaler import Facts, LossScaler
from tfmp.core.step.step import accumulate, in_true_magnitude, step_of, take
from tfmp.core.storage.graph_variables import STATE_COLLECTION
from tfmp.core.tracing import without_autograph
from tfmp.core.watch import LoopRecord
from tfmp.hosts.accumulators import Accumulators
from tfmp.hosts.front_ends import front_end_for, front_end_of_config
from tfmp.ranges.gradient_ranges import StepsWithRanges
from tfmp.types import Done, Gradient, Gradients, GradsAndVars, Loss

if TYPE_CHECKING:
    from typing_extensions import Self

    # Any: pyright reads from the defaults of Keras' functions that they take strings, not optimizers.
    _OptimizerOfHost: TypeAlias = Any
else:
    _OptimizerOfHost = object


class LossScaleOptimizer(StepsWithRanges, _OptimizerOfHost):
    """Wraps an optimizer: scales the loss, and skips each step in which a gradient overflowed.

    The wrapper is an optimizer of the same framework as the one inside it: a `tf.compat.v1.train.Optimizer`, or an
    optimizer of the same Keras. Replace your optimizer by the wrapper and change nothing else.

    In each step the loss is multiplied by the loss scale, and the gradients are divided by it, in float32. If they are
    finite on every replica, the wrapped optimizer applies them. If not, the step is skipped: weights, slots and the
    count of steps (`global_step` or `iterations`) stay as they are, and only the loss scale changes.

    Around a Keras optimizer this class takes the place of Keras' own `LossScaleOptimizer`: `fit` scales the loss with
    it, and under the policy `mixed_float16` `compile` does not wrap it again.

    Args:
        opt: The optimizer to wrap, also a legacy one of Keras. Its own clipping, weight decay and moving averages see
            unscaled gradients. Below, Keras 2 means Keras 2.15 and tf_keras, with their legacy optimizers.
        loss_scale_manager: Decides the loss scale: what `tfmp.get_loss_scale_manager` accepts. "dynamic" starts at
            2**15, halves the scale at each overflow, and doubles it after 2000 finite steps, as Keras does. A number is
            a fixed scale for TF1. For Keras, whose wrapper would start a dynamic scale from it, it is refused: pass
            `initial_scale` or a `tfmp.FixedLossScaleManager`. Only TF1 and legacy optimizers can share a manager.
        is_distributed: Whether Horovod's processes train together: they then agree on each step, and their gradients
            are averaged, unless Horovod's own optimizer averages them. Not for Keras 3. The replicas of a
            `tf.distribute` strategy agree with either value. If nothing distributes, the first step refuses True.
        inner_optimizer: Another name of `opt`, which Keras' own wrapper has.
        sparse_as_dense: For TF1: whether `compute_gradients` makes every `IndexedSlices` dense, as tf.contrib did.
        overflow_detector: Decides which gradients overflowed; by default a `tfmp.NonFiniteDetector`. It is not saved.
        aggregation_dtype: For TF1 and Keras 2: "float16" if scaled gradients travel between Horovod's workers in
            float16, or None for their own type.
        jit_compile: For Keras, but not for legacy optimizers: whether XLA compiles unscaling, clipping and the update
            into one program: "auto", where that saves time, for Keras' own code; True, wherever possible; False, never.
        iterations_include_skipped_steps: For Keras 2: whether `iterations` counts skipped steps, as in Keras' wrapper.
        accumulation_steps: The number of micro-batches in a window. Each `apply_gradients` adds the gradients of one in
            float32. The last one applies their mean; `global_step` or `iterations` counts windows.
        overflow_drops: As in `tfmp.GradientAccumulator`. The manager learns of an overflow when the window ends.
        micro_batches_per_epoch: As in `tfmp.GradientAccumulator`.
        skip_spikes: A `tfmp.SpikeDetector` of this optimizer's own, which skips finite steps whose norm is an outlier.
        dynamic: For Keras 2, as in its own wrapper: False makes `initial_scale` a fixed scale.
        initial_scale: For Keras, as in its own wrapper: the scale that "dynamic" starts from, 2**15 by default.
        dynamic_growth_steps: For Keras, as in its own wrapper: the finite steps in a row after which "dynamic" doubles.
        name: For Keras, but not for legacy optimizers: the wrapper's name.

    Raises:
        TypeError: tfmp does not wrap this kind of optimizer; or an argument has the wrong type, or is not for this kind
            of optimizer.
        ValueError: `opt` is wrapped already, or is made by Horovod and does not average the gradients of each step; the
            manager or the spike detector is in use by another optimizer; a setting is out of range, contradicts another
            one, or belongs to the wrapped optimizer; or Keras does not run on TensorFlow with its version 2 behaviour.
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

    Source: `tf.contrib.mixed_precision.LossScaleOptimizer`, and the wrappers of this name in `tf.keras.mixed_precision`
    and `keras.optimizers`.
    """

    _public_name = "LossScaleOptimizer"

    if TYPE_CHECKING:
        # What the front-ends have: a type checker does not know which one `__new__` picks.
        inner_optimizer: Any
        """The wrapped optimizer."""
        variables: Any
        """The variables of the wrapped optimizer; for Keras those of the wrapper too. A method for TF1, and around a
        legacy optimizer a method for those of the wrapped optimizer alone."""
        name: Any
        """For Keras, but not for legacy optimizers: the name of the optimizer."""
        accumulation: Any
        """For TF1: the sums of unfinished windows in eager code, to be saved by a `tf.train.Checkpoint`."""
        iterations: Any
        """For Keras: the variable that counts the applied steps, of the wrapped optimizer."""
        learning_rate: Any
        """For Keras: the learning rate of the wrapped optimizer, or its schedule when it is set."""
        dynamic_scale: Any
        """For Keras 3: the variable that holds the loss scale; a tensor if the manager's scale cannot be set."""
        step_counter: Any
        """For Keras 3: the variable that counts the finite steps since the loss scale last changed."""

        @property
        def initial_scale(self) -> float:
            """For Keras: the loss scale that the manager started from."""

        @property
        def dynamic_growth_steps(self) -> int | None:
            """For Keras: after how many finite steps in a row the loss scale grows; None for a fixed scale."""

        @property
        def dynamic(self) -> bool:
            """For Keras: whether the loss scale can change: False for a `tfmp.FixedLossScaleManager`."""

        def get_slot(self, var: tf.Variable, name: str) -> tf.Variable | None:
            """For TF1 and legacy optimizers of Keras: return a slot of the wrapped optimizer."""

        def get_slot_names(self) -> list[str]:
            """For TF1 and legacy optimizers of Keras: return the names of the wrapped optimizer's slots."""

        def get_name(self) -> str:
            """For TF1: return the name of the wrapped optimizer."""

        def set_weights(self, weights: Sequence[Any]) -> None:
            """For Keras: set the values of `variables`, or those of the wrapped optimizer's variables alone."""

        def build(self, var_list: Sequence[Any]) -> None:
            """For Keras, but not for legacy optimizers: make the variables of the wrapped optimizer."""

        def get_config(self) -> dict[str, Any]:
            """For Keras: return the configuration, for `from_config`; the overflow detector is not part of it."""

    def __init_subclass__(cls, **kwargs: Any) -> None:  # noqa: ANN401 - of the host's classes
        """Let Python's errors about the arguments of a method name the public class."""
        super().__init_subclass__(**kwargs)
        if cls.__module__.startswith("tfmp."):
            for name, method in vars(cls).items():
                if inspect.isfunction(method):
                    method.__qualname__ = f"{cls._public_name}.{name}"

    def __new__(cls, *args: Any, **kwargs: Any) -> "Self":  # noqa: ANN401 - the front-end's arguments
        """Make an object of the front-end for the kind of optimizer that is wrapped."""
        if cls is LossScaleOptimizer:
            opt = optimizer_of(args[0] if args else kwargs.get("opt"), kwargs.get("inner_optimizer"))
            refuse_wrapped(opt)
            return cast("Self", super().__new__(front_end_for(opt)))
        return super().__new__(cls)

    def __init__(
        self,
        opt: Any = None,  # noqa: ANN401 - of any host
        loss_scale_manager: Specification = "dynamic",
        is_distributed: bool = False,
        *,
        inner_optimizer: Any = None,  # noqa: ANN401 - of any host
        sparse_as_dense: bool = False,
        overflow_detector: OverflowDetector | None = None,
        aggregation_dtype: str | tf.DType | None = None,
        jit_compile: bool | str = "auto",
        iterations_include_skipped_steps: bool = False,
        accumulation_steps: int = 1,
        overflow_drops: str = "window",
        micro_batches_per_epoch: int | None = None,
        skip_spikes: SpikeDetector | None = None,
        dynamic: bool = True,
        initial_scale: float | None = None,
        dynamic_growth_steps: int | None = None,
        name: str | None = None,
    ) -> None:
        # Front-ends have constructors of their own: only a subclass of the front door itself comes here.
        raise TypeError(
            f"{type(self).__name__} subclasses tfmp.LossScaleOptimizer, which only picks a front-end: subclass "
            "the front-end for your optimizer instead, such as tfmp.optimizers.LossScaleOptimizerV1."
        )

    @property
    def manager(self) -> LossScaleManager:  # type: ignore[override] # Keras would save an attribute a second time
        """The loss-scale manager, which decides the loss scale."""
        return self._loss_scale_manager

    # Otherwise `inspect.signature` and `help` would show the parameters of `__new__`: (*args, **kwargs).
    __new__.__wrapped__ = __init__  # type: ignore[attr-defined] # as functools.wraps sets it

    # The first three methods call those of the host's own class, a later base of a front-end.

    def minimize(self, loss: Loss, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - the host's
        """Take one step: scale the loss, compute its gradients, unscale them, and apply them if they are finite.

        Args:
            loss: The loss, of a floating-point type. In eager code a function that returns it; for Keras also the loss
                itself, with the `tf.GradientTape` that recorded it.
            *args: Further arguments. TF1: `global_step=None, var_list=None, ...`. Keras: `var_list, tape=None`.
            **kwargs: The same, by their names.

        Returns:
            TF1: the op of the whole step, None in eager code. Keras: what its own `minimize` returns.
        """
        return super().minimize(loss, *args, **kwargs)

    def compute_gradients(self, loss: Loss, *args: Any, **kwargs: Any) -> list[tuple[Gradient, Any]]:  # noqa: ANN401
        """Compute the unscaled gradients of a loss, which can then be clipped and applied.

        Clip by `tfmp.clip_by_value`, `tfmp.clip_by_norm` or `tfmp.clip_by_global_norm`, which keep overflows visible.
        `tf.clip_by_value` turns infinity into a finite number, so that the step is applied in spite of the overflow.

        Args:
            loss: As in `minimize`.
            *args: Further arguments. TF1: `var_list=None, ...`. Keras: `var_list, tape=None`.
            **kwargs: The same, by their names.

        Returns:
            Pairs of an unscaled gradient and its variable, for `apply_gradients`. Gradients are in float32, or float64
            if the scaled gradient is; None if the loss does not depend on the variable. Sparse ones stay sparse.
        """
        return super().compute_gradients(loss, *args, **kwargs)

    @without_autograph
    def apply_gradients(self, grads_and_vars: GradsAndVars, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        """Apply the gradients if they are finite on every replica, and update the loss scale.

        Args:
            grads_and_vars: Pairs of a gradient and its variable; a gradient may be None. TF1: pairs as
                `compute_gradients` returns them. Keras: scaled gradients if `scale_loss` was called for the loss;
                unscaled gradients if `get_unscaled_gradients` or `compute_gradients` returned them.
            *args: Further arguments. TF1: `global_step=None, name=None`. Keras: those of its own method.
            **kwargs: The same, by their names.

        Returns:
            TF1: the op of the whole step, None in eager code. Keras: `iterations`.

        Raises:
            TypeError: `grads_and_vars` does not consist of such pairs, or a gradient is complex.
            ValueError: Every gradient is None; or is_distributed=True, and nothing distributes the training.
            RuntimeError: A strategy is active, and the call is not made on its replicas; or, with Keras, it cannot be
                known which gradients are still scaled after `get_unscaled_gradients`.
            NotImplementedError: The active `tf.distribute` strategy is not supported.
        """
        return super().apply_gradients(grads_and_vars, *args, **kwargs)

    # These three are for Keras; on the front-end for TF1 they raise AttributeError.

    def scale_loss(self, loss: tf.Tensor) -> tf.Tensor:
        """For Keras: return a loss, of a floating-point type, times the loss scale, in float32 or float64.

        Pass the gradients of the scaled loss to `apply_gradients` or `apply`, which unscale them. If you need unscaled
        gradients before, call `get_unscaled_gradients`; they are then applied as they are.
        """
        return self._loop.note_scaled("scale_loss", self._scaler.scale(loss))

    def get_scaled_loss(self, loss: Loss) -> Loss:
        """For Keras: do as `scale_loss`, in a loop that unscales the gradients by `get_unscaled_gradients`.

        The loss may be a function that returns it; then the result is one too.
        """
        if callable(loss):
            # A subclass that overrides this method has been called already.
            return lambda: LossScaleOptimizer.get_scaled_loss(self, loss())
        return self._loop.note_scaled("get_scaled_loss", self._scaler.scale(loss))

    @without_autograph
    def get_unscaled_gradients(self, grads: Iterable[Gradient]) -> list[Gradient]:
        """For Keras: divide the gradients of a scaled loss by the loss scale; None stays None.

        You can inspect or clip the result, in float32 or float64, and pass it to `apply_gradients`.

        Raises:
            TypeError: `grads` is not a list of gradients, or a gradient is complex.
        """
        grads = lists.gradients(grads)
        unscaled = self._scaler.unscale(lists.of_tensors(grads))
        self._loop.note_unscaled(grads, unscaled)
        return unscaled

    def apply(self, grads: Iterable[Gradient], trainable_variables: Iterable[Any] | None = None) -> Any:  # noqa: ANN401
        """For Keras 3: do as `apply_gradients`, with gradients and variables in two lists.

        Args:
            grads: The gradients, one for each variable.
            trainable_variables: The variables; by default those that the optimizer was built with.

        Raises:
            TypeError: One of the two is not such a list; or a gradient is complex.
            ValueError: Every gradient is None; the numbers differ; or `trainable_variables` is missing before `build`.
        """
        raise NotImplementedError

    @classmethod
    def from_config(cls, config: dict[str, Any], custom_objects: dict[str, Any] | None = None) -> "LossScaleOptimizer":
        """For Keras: make an optimizer from a configuration that `get_config` returned.

        Args:
            config: The configuration, of this class or of Keras' own `LossScaleOptimizer`. No module that it names is
                imported, except those of Keras, TensorFlow and tfmp.
            custom_objects: Classes by their names, if they are not registered and their modules are not imported.

        Raises:
            ValueError: It is the configuration of something else; or it names a class that is not known.

        Examples:
            >>> import keras, tfmp
            >>> opt = tfmp.LossScaleOptimizer(keras.optimizers.SGD(0.5), tfmp.FixedLossScaleManager(256))
            >>> float(tfmp.LossScaleOptimizer.from_config(opt.get_config()).loss_scale)
            256.0
        """
        if cls is not LossScaleOptimizer:
            raise NotImplementedError(f"{cls.__name__} wraps no optimizer of Keras.")
        return front_end_of_config(config).from_config(config, custom_objects)

    @classmethod
    def from_keras(cls, optimizer: Any) -> "LossScaleOptimizer":  # noqa: ANN401 - of any Keras
        """For Keras: wrap the optimizer inside Keras' own `LossScaleOptimizer`, and continue from its loss scale.

        Use it for a model that was saved with Keras' own wrapper, after it is loaded. Keras 2's own wrapper saves its
        scale with `tf.train.Checkpoint` only, and otherwise starts again from the initial scale.

        Returns:
            A `tfmp.LossScaleOptimizer` around the same inner optimizer, with a manager that follows the same rule from
            the same scale, but at least 1, and the same count of finite steps. In Keras 2 skipped steps still count in
            `iterations`.

        Raises:
            TypeError: `optimizer` is not such a wrapper.
            ValueError: `optimizer` is a `tfmp.LossScaleOptimizer` already.

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
        refuse_wrapped(optimizer.inner_optimizer)
        return front_end_for(optimizer.inner_optimizer)._from_keras(optimizer)

    @classmethod
    def _from_keras(cls, optimizer: Any) -> "LossScaleOptimizer":  # noqa: ANN401 - of any Keras
        raise NotImplementedError(f"{cls.__name__} wraps no optimizer of Keras.")

    #: The type in which gradients travel between Horovod's workers; None for their own.
    _aggregation_dtype: tf.DType | None = None
    #: What a loop for Keras called.
    _loop: LoopRecord

    def _set_up(
        self,
        manager: LossScaleManager,
        is_distributed: bool,
        overflow_detector: OverflowDetector | None,
        accumulation: AccumulationSettings,
        skip_spikes: SpikeDetector | None,
    ) -> None:
        """Check and keep the arguments that mean the same for all optimizers; `inner_optimizer` is set already."""
        self._loss_scale_manager = manager
        self._is_distributed = settings.flag("is_distributed", is_distributed)
        refuse_unsupported_horovods(self.inner_optimizer)
        if self._is_of_horovod:
            self._refuse_aggregation_dtype()
        detector = validated_detector(overflow_detector)
        self.spike_detector = validated_spike_detector(skip_spikes)
        self._scaler = LossScaler(manager, detector, is_distributed, self._aggregation_dtype, self.spike_detector)
        self._accumulators = Accumulators(accumulation, detector, self.inner_optimizer)

    @property
    def _is_of_horovod(self) -> bool:
        """True if this optimizer contains Horovod's, or is of a subclass that Horovod made of its class."""
        return is_horovods(self) or is_horovods(self.inner_optimizer)

    def _refuse_aggregation_dtype(self) -> None:
        """Raise `ValueError` if there is one, although an optimizer of Horovod sends the gradients."""
        if self._aggregation_dtype is not None:
            raise ValueError(
                "aggregation_dtype='float16' is for an optimizer that Horovod did not make: leave it out, and give "
                "hvd.DistributedOptimizer compression=hvd.Compression.fp16; or wrap the plain optimizer."
            )

    def _settings(self) -> dict[str, Any]:
        """Return the arguments of the constructor that are no objects of tfmp or of the host."""
        return {"is_distributed": self._is_distributed, **self._accumulators.settings._asdict()}

    def _settings_to_show(self) -> list[str]:
        shown = settings.not_default(LossScaleOptimizer, {**self._settings(), "skip_spikes": self.spike_detector})
        return [type(self.inner_optimizer).__name__, *(f"{name}={value!r}" for name, value in shown.items())]

    def _average_over_workers(
        self, variables: Iterable[Any], distribution: Distribution
    ) -> Callable[[Gradients], list[Gradient]]:
        """Return what averages unscaled gradients over Horovod's workers."""
        names, mean = names_of(variables), self._scaler.mean_over_workers
        return lambda grads: mean(grads, names, distribution, are_scaled=False)

    def _take_step(
        self, adapter: OptimizerAdapter, grads: Gradients, facts: Facts, *, are_scaled: bool = False
    ) -> Done:
        """Apply this replica's gradients; or, if gradients are accumulated, add them to the current window."""
        accumulator = self._accumulators.of(adapter.variables)
        if accumulator is not None:
            unscaled = in_true_magnitude(adapter, grads, facts.loss_scale) if are_scaled else grads
            return accumulate(adapter, unscaled, facts, accumulator)
        return take(step_of(adapter, grads, facts, are_scaled=are_scaled))

    def _state_in_graph(self) -> list[tf.Variable]:
        """Return the variables of the current graph that hold tfmp's state, of which Keras 2 must be told."""
        with tf.init_scope():
            if tf.executing_eagerly():
                return []
            of_scripts = tf.compat.v1.global_variables()
            # Those of a manager that a user wrote are its attributes.
            of_manager = {id(variable) for variable in self._loss_scale_manager.variables}
            return [
                *tf.compat.v1.get_collection(STATE_COLLECTION),
                *(each for each in of_scripts if id(each) in of_manager),
            ]


def of_inner(name: str) -> Any:  # noqa: ANN401 - a property, and what it returns
    """Return a property for an attribute or method of the inner optimizer."""

    def get(self: Any) -> Any:  # noqa: ANN401
        return getattr(self.inner_optimizer, name)

    def set_(self: Any, value: Any) -> None:  # noqa: ANN401
        setattr(self.inner_optimizer, name, value)

    return property(get, set_, doc=f"`{name}` of the inner optimizer; an attribute can be set.")


def optimizer_of(opt: Any, inner_optimizer: Any) -> Any:  # noqa: ANN401 - of any host
    """Return the optimizer to wrap, by the name of tf.contrib or that of Keras; None if neither is given."""
    if opt is not None and inner_optimizer is not None:
        raise TypeError("opt and inner_optimizer are two names of one argument: give one of them.")
    return inner_optimizer if opt is None else opt


def refuse_wrapped(opt: object) -> None:
    """Raise `ValueError` if an optimizer is wrapped already."""
    if isinstance(opt, LossScaleOptimizer):
        raise ValueError("opt is a LossScaleOptimizer already: wrapping it again would scale the loss twice.")


def validated_aggregation_dtype(dtype: str | tf.DType | None, is_distributed: bool) -> tf.DType | None:
    """Return the type in which gradients travel between Horovod's workers, as the user gave it."""
    if dtype is None:
        return None
    # Horovod 0.28.1 sums no bfloat16.
    if dtype != tf.float16:
        raise ValueError(f'aggregation_dtype must be "float16" or None, got {dtype!r}.')
    if not is_distributed:
        raise ValueError("aggregation_dtype='float16' needs is_distributed=True: no gradients travel without it.")
    return tf.float16
