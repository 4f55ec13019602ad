"""The base classes of the front-ends for Keras 2: that of Keras 2.15 and that of the package tf_keras."""

from collections.abc import Callable, Iterable, Sequence
from types import MappingProxyType
from typing import Any, NoReturn

import tensorflow as tf

from tfmp.any_keras.internals import learning_rate_or_schedule
from tfmp.any_keras.which import is_foreign
from tfmp.core import lists, settings
from tfmp.core.accumulation import AccumulationSettings
from tfmp.core.distribute.horovod_detection import is_horovods, running_horovod
from tfmp.core.managers import Specification
from tfmp.core.step.scaler import LossScaler
from tfmp.core.tracing import without_autograph
from tfmp.hosts.base import of_inner, validated_aggregation_dtype
from tfmp.hosts.keras.adapters import Keras2Adapter
from tfmp.hosts.keras.arguments import warn_of_methods_never_called
from tfmp.hosts.keras.base import Initializer, LossScaleOptimizerKeras, OfAnyKeras, split
from tfmp.types import Gradient, Loss


class OfKeras2(OfAnyKeras):
    """What the wrappers of Keras 2's optimizers have in common with those of its legacy optimizers."""

    _inner_optimizer: Any
    _as_keras_own = MappingProxyType({"iterations_include_skipped_steps": True})

    def __init__(
        self,
        inner_optimizer: Any = None,  # noqa: ANN401 - of either package
        loss_scale_manager: Specification = "dynamic",
        is_distributed: bool = False,
        *,
        aggregation_dtype: str | tf.DType | None = None,
        iterations_include_skipped_steps: bool = False,
        **settings_of_all: Any,  # noqa: ANN401 - as of the base class
    ) -> None:
        self._aggregation_dtype = validated_aggregation_dtype(aggregation_dtype, is_distributed)
        self._iterations_include_skipped_steps = settings.flag(
            "iterations_include_skipped_steps", iterations_include_skipped_steps
        )
        super().__init__(inner_optimizer, loss_scale_manager, is_distributed, **settings_of_all)

    learning_rate = of_inner("learning_rate")
    #: The inner optimizer's count of steps, which can be set, for example to the global step.
    iterations = of_inner("iterations")

    @property
    def inner_optimizer(self) -> Any:  # noqa: ANN401 - of either package
        """The wrapped optimizer."""
        return self._inner_optimizer

    # Public code reads this name of Keras 2's own wrappers. A property is in no checkpoint.
    _optimizer = inner_optimizer

    def _is_averaged(self, is_reduced: bool = False) -> bool:
        # Horovod's optimizers average only where they compute gradients.
        return is_reduced or (self._is_of_horovod and self._loop.last_call == "compute_gradients")

    def _settings(self) -> dict[str, Any]:
        return {
            **super()._settings(),
            "aggregation_dtype": None if self._aggregation_dtype is None else self._aggregation_dtype.name,
            "iterations_include_skipped_steps": self._iterations_include_skipped_steps,
        }

    @property
    def apply(self) -> NoReturn:
        """Not available: `apply` is a method of Keras 3's optimizers. Call `apply_gradients`."""
        raise AttributeError("apply is Keras 3's: call apply_gradients(zip(grads, variables)).")

    @property
    def dynamic_counter(self) -> NoReturn:
        """Not available: Keras' own wrapper counts finite steps here; read `manager.state_dict()` instead."""
        raise AttributeError(
            "dynamic_counter is the count of Keras' own wrapper: read the state of the loss-scale manager instead, "
            "manager.state_dict()."
        )


class LossScaleOptimizerKeras2(LossScaleOptimizerKeras, OfKeras2):
    """The `tfmp.LossScaleOptimizer` around a Keras 2 optimizer, where the arguments are documented.

    A subclass adds the base classes of `keras` or of `tf_keras`. What differs for Keras 2:

    * A skipped step does not change `iterations`, so learning rate schedules and bias corrections do not advance; with
      Keras' own wrapper they do, and here with `iterations_include_skipped_steps=True`.
    * `jit_compile` is not the wrapped optimizer's setting of that name, which compiles the update of each variable.

    Source: `tf.keras.mixed_precision.LossScaleOptimizer`, whose interface this class keeps.
    """

    # Keras' own wrapper refuses to wrap an optimizer where this is true.
    _is_wrapped_by_loss_scale_optimizer = True

    def __init__(
        self,
        *arguments: Any,  # noqa: ANN401 - as of the base class
        name: str | None = None,
        **settings: Any,  # noqa: ANN401 - as of the base class
    ) -> None:
        super().__init__(*arguments, **settings)
        self.name = name or self.name

    def _wrap(self, inner_optimizer: Any, accumulation: AccumulationSettings) -> None:  # noqa: ANN401
        del accumulation
        self._inner_optimizer = inner_optimizer
        # The parent's constructor sets these two, which here set the inner optimizer's, so it gets their values.
        ema = {"use_ema": inner_optimizer.use_ema, "ema_momentum": inner_optimizer.ema_momentum}
        self._keras.optimizers.Optimizer.__init__(self, name="LossScaleOptimizer", **ema)
        warn_of_methods_never_called(inner_optimizer, ("minimize",))

    use_ema = of_inner("use_ema")
    ema_momentum = of_inner("ema_momentum")

    @property
    def _learning_rate(self) -> Any:  # noqa: ANN401 - a variable or a schedule
        # Keras' TensorBoard callback reads this to log the rate of a schedule.
        return learning_rate_or_schedule(self.inner_optimizer)

    @property
    def variables(self) -> list[tf.Variable]:
        """The wrapper's own variables, then those of the inner optimizer."""
        variables = self._keras.optimizers.Optimizer.variables.fget(self)
        # The parent's own count of iterations is never used, and has the name of the inner optimizer's.
        del variables[0]
        variables.extend(self.inner_optimizer.variables)
        return variables

    def compute_gradients(
        self, loss: Loss, var_list: Iterable[tf.Variable] | Callable[[], Any], tape: tf.GradientTape | None = None
    ) -> list[tuple[Gradient, tf.Variable]]:
        """As in `tfmp.LossScaleOptimizer`; `var_list` may also be a function that returns the variables.

        If the class of the inner optimizer is your own, its `compute_gradients` gets the unscaled loss and gradients.
        """
        if not callable(var_list):
            var_list = lists.variables("var_list", var_list)
        tape = tape or tf.GradientTape()
        if is_foreign(self.inner_optimizer.compute_gradients) and not is_horovods(self.inner_optimizer):
            self._loop.last_call = "compute_gradients"
            own_tape = _ScalingTape(tape, self._scaler)
            return list(self.inner_optimizer.compute_gradients(loss, var_list, tape=own_tape))
        with tape:
            scaled = self.get_scaled_loss(loss)
        return self._unscaled(self.inner_optimizer.compute_gradients(scaled, var_list, tape=tape))

    @without_autograph
    def aggregate_gradients(
        self, grads_and_vars: Iterable[tuple[Gradient, tf.Variable]]
    ) -> list[tuple[Gradient, tf.Variable]]:
        """Sum gradients over the replicas of a strategy, and average them over Horovod's workers.

        `apply_gradients` does this by itself, unless it is called with `skip_gradients_aggregation=True`.
        """
        pairs = lists.pairs(grads_and_vars)
        own = lists.of_tensors(grad for grad, _ in pairs)
        given = [(grad, variable) for grad, (_, variable) in zip(own, pairs, strict=True)]
        summed = list(self.inner_optimizer.aggregate_gradients(given))
        if not summed or self._is_averaged():
            return summed
        grads, variables = zip(*summed, strict=True)
        average = self._average_over_workers(variables, self._scaler.distribution())
        return list(zip(average(grads), variables, strict=True))

    @without_autograph
    def apply_gradients(
        self,
        grads_and_vars: Iterable[tuple[Gradient, tf.Variable]],
        name: str | None = None,
        skip_gradients_aggregation: bool = False,
        *,
        experimental_aggregate_gradients: bool = True,
    ) -> tf.Variable:
        """As in `tfmp.LossScaleOptimizer`; gradients are first summed over the replicas.

        Args:
            grads_and_vars: Pairs of a gradient and its variable.
            name: The name scope of the inner optimizer's ops.
            skip_gradients_aggregation: Whether the gradients are already summed over the replicas.
            experimental_aggregate_gradients: The older name of this argument, with the opposite value.
        """
        pairs = lists.pairs(grads_and_vars)
        if not pairs:
            # As in Keras: a model may have no weights.
            return self.iterations
        grads, variables = split(pairs)
        with tf.init_scope():
            self.build(variables)
        lists.refuse_all_none(grads)
        facts = self._scaler.facts()
        is_reduced = skip_gradients_aggregation or not experimental_aggregate_gradients
        is_averaged = self._is_averaged(is_reduced)
        adapter = Keras2Adapter(
            self.inner_optimizer,
            variables,
            {} if name is None else {"name": name},
            average=None if is_averaged else self._average_over_workers(variables, facts.distribution),
            leaves_out_none=False,
            # Horovod's ops can be no part of a program.
            programs=self._programs.of(self.inner_optimizer) if running_horovod() is None else None,
            is_summed=is_reduced,
            counts_skipped_steps=self._iterations_include_skipped_steps,
        )
        self._take_step_of_loop(adapter, grads, facts)
        return self.iterations

    def _add(
        self, name: str, shape: Sequence[int], dtype: str, initializer: Initializer, aggregation: str
    ) -> tf.Variable:
        del aggregation
        return self.add_variable(shape, dtype, initializer, name)


class _ScalingTape:
    """Stands for a tape in a user's own `compute_gradients`, which may clip: gradients of the scaled loss, unscaled."""

    def __init__(self, tape: tf.GradientTape, scaler: LossScaler) -> None:
        self._tape = tape
        self._scaler = scaler

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - any method of a tape
        return getattr(self._tape, name)

    def __enter__(self) -> "_ScalingTape":
        self._tape.__enter__()
        return self

    def __exit__(self, *raised: object) -> None:
        self._tape.__exit__(*raised)

    def gradient(self, target: tf.Tensor, sources: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - a tape's
        """Return the gradients of a loss in their true magnitude, in the structure of the sources."""
        with self._tape:
            scaled = self._scaler.scale(target)
        grads = self._tape.gradient(scaled, sources, *args, **kwargs)
        return tf.nest.pack_sequence_as(grads, self._scaler.unscale(tf.nest.flatten(grads)))
