"""The base class of the front-ends for Keras 2: that of Keras 2.15 and that of the package tf_keras."""

from collections.abc import Callable, Iterable, Sequence
from types import ModuleType
from typing import Any, NoReturn

import numpy as np
import tensorflow as tf

from tfmp.core import lists, settings
from tfmp.core.accumulation.settings import accumulation_settings
from tfmp.core.adapters import names_of
from tfmp.core.distribute.horovod_detection import is_horovods, refuse_unsupported_horovods, running_horovod
from tfmp.core.managers import Specification
from tfmp.core.overflow.detectors import OverflowDetector
from tfmp.core.spikes.detector import SpikeDetector
from tfmp.core.tracing import without_autograph
from tfmp.hosts.keras.adapters import Keras2Adapter
from tfmp.hosts.keras.internals import learning_rate_or_schedule
from tfmp.hosts.keras.own_code import is_foreign
from tfmp.hosts.keras.program import JitCompile, UpdateCompilers, validated_jit_compile
from tfmp.optimizers.base import optimizer_of, validated_aggregation_dtype
from tfmp.optimizers.keras.accumulation import variables_of_each_replica
from tfmp.optimizers.keras.arguments import (
    manager_of_keras,
    refuse_other_arguments,
    validate_inner_optimizer,
    warn_of_methods_never_called,
)
from tfmp.optimizers.keras.base import LossScaleOptimizerKeras
from tfmp.optimizers.keras.files import StateInFiles, register_own_classes
from tfmp.optimizers.keras.methods import OfInnerOptimizer
from tfmp.optimizers.keras.takeover import manager_from_keras2
from tfmp.optimizers.keras2_tape import ScalingTape
from tfmp.types import Gradient, Gradients, Loss


class LossScaleOptimizerKeras2(OfInnerOptimizer, LossScaleOptimizerKeras):
    """The `tfmp.LossScaleOptimizer` around a Keras 2 optimizer.

    `tfmp.LossScaleOptimizer(inner_optimizer, manager)` returns an object of a subclass, which adds the base classes of
    `keras` or of `tf_keras`. The arguments are documented there. What differs for Keras 2:

    * A skipped step does not change `iterations`, so learning rate schedules and bias corrections do not advance; with
      Keras' own wrapper they do, and here with `iterations_include_skipped_steps=True`.
    * The argument `jit_compile` is not the wrapped optimizer's setting of that name, which compiles the update of each
      variable.
    * `dynamic=False`, an argument of Keras' own wrapper, fixes the scale at `initial_scale`.
    * Settings of the inner optimizer, such as `use_ema`, are refused by name, except with the defaults that every
      optimizer has.

    Source: `tf.keras.mixed_precision.LossScaleOptimizer`, whose interface this class keeps.
    """

    # Keras' own wrapper reads this private attribute, and refuses to wrap an optimizer where it is true.
    _is_wrapped_by_loss_scale_optimizer = True

    def __init__(
        self,
        inner_optimizer: Any = None,  # noqa: ANN401 - of either package
        loss_scale_manager: Specification = "dynamic",
        is_distributed: bool = False,
        *,
        opt: Any = None,  # noqa: ANN401 - of either package
        overflow_detector: OverflowDetector | None = None,
        aggregation_dtype: str | tf.DType | None = None,
        jit_compile: JitCompile = "auto",
        iterations_include_skipped_steps: bool = False,
        accumulation_steps: int = 1,
        overflow_drops: str = "window",
        micro_batches_per_epoch: int | None = None,
        skip_spikes: SpikeDetector | None = None,
        dynamic: bool = True,
        initial_scale: float | None = None,
        dynamic_growth_steps: int | None = None,
        name: str | None = None,
        **others: Any,  # noqa: ANN401 - what is refused
    ) -> None:
        inner_optimizer = optimizer_of(opt, inner_optimizer)
        validate_inner_optimizer(self._keras, inner_optimizer)
        refuse_other_arguments(inner_optimizer, others, self._settings_of_every_optimizer)
        accumulation = accumulation_settings(accumulation_steps, overflow_drops, micro_batches_per_epoch)
        manager = manager_of_keras(loss_scale_manager, initial_scale, dynamic_growth_steps, dynamic=dynamic)
        self._jit_compile = validated_jit_compile(jit_compile)
        self._compilers = UpdateCompilers(self._jit_compile)
        self._inner_optimizer = inner_optimizer
        # The parent's constructor sets these two attributes. Here they are properties that set the inner optimizer's,
        # so the constructor must get the inner optimizer's own values.
        ema = {"use_ema": inner_optimizer.use_ema, "ema_momentum": inner_optimizer.ema_momentum}
        self._keras.optimizers.Optimizer.__init__(self, name=name or "LossScaleOptimizer", **ema)
        self._iterations_include_skipped_steps = settings.flag(
            "iterations_include_skipped_steps", iterations_include_skipped_steps
        )
        refuse_unsupported_horovods(inner_optimizer)
        dtype = validated_aggregation_dtype(aggregation_dtype, is_distributed, self._is_of_horovod)
        self._aggregation_dtype = dtype
        self._set_up(manager, is_distributed, overflow_detector, accumulation, skip_spikes, self._aggregation_dtype)
        warn_of_methods_never_called(inner_optimizer, ("minimize",))

    @property
    def _learning_rate(self) -> Any:  # noqa: ANN401 - a variable or a schedule
        # Keras' TensorBoard callback reads this private attribute of the optimizer, to log the rate of a schedule.
        return learning_rate_or_schedule(self.inner_optimizer)

    @property
    def use_ema(self) -> bool:
        """Whether the inner optimizer keeps moving averages of the weights."""
        return self.inner_optimizer.use_ema

    @use_ema.setter
    def use_ema(self, use_ema: bool) -> None:
        self.inner_optimizer.use_ema = use_ema

    @property
    def ema_momentum(self) -> float:
        """The momentum of the inner optimizer's moving averages."""
        return self.inner_optimizer.ema_momentum

    @ema_momentum.setter
    def ema_momentum(self, ema_momentum: float) -> None:
        self.inner_optimizer.ema_momentum = ema_momentum

    @property
    def variables(self) -> list[tf.Variable]:
        """The variables of the loss-scale manager and of the accumulation, then those of the inner optimizer."""
        variables = self._keras.optimizers.Optimizer.variables.fget(self)
        # The first is the parent's own count of iterations. It is never used, and its name is the same as that of the
        # inner optimizer's count.
        del variables[0]
        variables.extend(self.inner_optimizer.variables)
        return variables

    def build(self, var_list: Iterable[tf.Variable]) -> None:
        """Make the variables of the inner optimizer and those that accumulate gradients.

        Args:
            var_list: The variables to train.

        Raises:
            TypeError: `var_list` is not a list of variables.
        """
        var_list = lists.variables("var_list", var_list)
        self.inner_optimizer.build(var_list)
        self._accumulation.build(var_list, self._add_buffer)
        self._build_spike_detector()
        self._scaler.prepare(names_of(var_list))

    def compute_gradients(
        self, loss: Loss, var_list: Iterable[tf.Variable] | Callable[[], Any], tape: tf.GradientTape | None = None
    ) -> list[tuple[Gradient, tf.Variable]]:
        """As in `tfmp.LossScaleOptimizer`; `var_list` may also be a function that returns the variables.

        If the inner optimizer is of a class of your own that overrides `compute_gradients`, your method gets the loss
        as it is, and gradients in their true magnitude.
        """
        if not callable(var_list):
            var_list = lists.variables("var_list", var_list)
        tape = tape or tf.GradientTape()
        if is_foreign(self.inner_optimizer.compute_gradients) and not is_horovods(self.inner_optimizer):
            self._loop.last_call = "compute_gradients"
            own_tape = ScalingTape(tape, self._scaler.scale, self._scaler.unscale)
            return list(self.inner_optimizer.compute_gradients(loss, var_list, tape=own_tape))
        with tape:
            scaled = self.get_scaled_loss(loss)
        grads_and_vars = self.inner_optimizer.compute_gradients(scaled, var_list, tape=tape)
        grads, variables = [grad for grad, _ in grads_and_vars], [variable for _, variable in grads_and_vars]
        lists.refuse_complex(grads, names_of(variables))
        unscaled = self.get_unscaled_gradients(grads)
        self._loop.last_call = "compute_gradients"
        return list(zip(unscaled, variables, strict=True))

    @without_autograph
    def aggregate_gradients(
        self, grads_and_vars: Iterable[tuple[Gradient, tf.Variable]]
    ) -> list[tuple[Gradient, tf.Variable]]:
        """Sum gradients over the replicas of a strategy, and average them over Horovod's workers.

        `apply_gradients` does this by itself, unless it is called with `skip_gradients_aggregation=True`.

        Args:
            grads_and_vars: Pairs of a gradient and its variable.

        Returns:
            Pairs of the sum or mean of a gradient, and its variable.

        Raises:
            TypeError: `grads_and_vars` does not consist of such pairs.
        """
        pairs = lists.pairs(grads_and_vars)
        own = lists.of_tensors(grad for grad, _ in pairs)
        given = [(grad, variable) for grad, (_, variable) in zip(own, pairs, strict=True)]
        summed = list(self.inner_optimizer.aggregate_gradients(given))
        if not summed:
            return summed
        if not self._averages():
            return summed
        grads, variables = zip(*summed, strict=True)
        means = self._mean_over_workers(grads, variables, self._scaler.distribution())
        return list(zip(means, variables, strict=True))

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
            experimental_aggregate_gradients: The older name of this argument, with the opposite value: False means
                `skip_gradients_aggregation=True`.

        Returns:
            `iterations`.
        """
        grads_and_vars = lists.pairs(grads_and_vars)
        if not grads_and_vars:
            # Keras accepts an empty list too: a model without weights has nothing to train.
            return self.iterations
        grads, variables = zip(*grads_and_vars, strict=True)
        lists.refuse_complex(grads, names_of(variables))
        # The variables are made outside of a function that is being traced, so that they outlive its graph.
        with tf.init_scope():
            self.build(variables)

        is_reduced = skip_gradients_aggregation or not experimental_aggregate_gradients
        lists.refuse_all_none(grads)
        are_scaled = self._loop.are_scaled(grads, by_default=self._unscales_by_default)
        facts = self._scaler.facts()

        def average(grads: Gradients) -> Gradients:
            return self._mean_over_workers(grads, variables, facts.distribution)

        adapter = Keras2Adapter(
            self.inner_optimizer,
            variables,
            {} if name is None else {"name": name},
            compiler=self._compilers.of(self.inner_optimizer) if self._may_unscale_late() else None,
            aggregates=not is_reduced,
            average=average if not is_reduced and self._averages() else None,
            counts_skipped_steps=self._iterations_include_skipped_steps,
        )
        self._step(adapter, grads, facts, are_scaled=are_scaled)
        return self.iterations

    def _may_unscale_late(self) -> bool:
        # Horovod averages unscaled gradients. A dtype is for Horovod alone; without it, averaging raises an error.
        return running_horovod() is None and not self._is_of_horovod and self._aggregation_dtype is None

    def get_config(self) -> dict[str, Any]:
        """As in `tfmp.LossScaleOptimizer`."""
        return {
            **super().get_config(),
            **self._own_settings(),
        }

    def _own_settings(self) -> dict[str, Any]:
        return {
            "aggregation_dtype": None if self._aggregation_dtype is None else self._aggregation_dtype.name,
            "iterations_include_skipped_steps": self._iterations_include_skipped_steps,
            "jit_compile": self._jit_compile,
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

    @classmethod
    def _from_keras(cls, optimizer: Any) -> "LossScaleOptimizerKeras2":  # noqa: ANN401 - of either package
        manager = manager_from_keras2(optimizer)
        return cls(optimizer.inner_optimizer, manager, iterations_include_skipped_steps=True)

    def _add_state_variable(self, name: str, initial_value: np.generic | np.ndarray) -> tf.Variable:
        return self.add_variable(
            shape=initial_value.shape,
            dtype=initial_value.dtype,
            initializer=lambda *_: tf.constant(initial_value),
            name=name,
        )

    def _add_buffer(self, name: str, shape: Sequence[int], dtype: tf.DType) -> tf.Variable:
        with variables_of_each_replica():
            return self.add_variable(shape, dtype, tf.zeros, name)


def with_bases_of(keras: ModuleType, name: str, module: str) -> type[LossScaleOptimizerKeras2]:
    """Make the front-end for a package that Keras 2 comes in, and register it there, so that saved models load."""
    register_own_classes(keras)
    bases = (LossScaleOptimizerKeras2, keras.optimizers.Optimizer, keras.mixed_precision.LossScaleOptimizer)
    state_in_files = type("_StateInFiles", (StateInFiles, keras.losses.Loss), {})
    front_end = type(name, bases, {"__module__": module, "_keras": keras, "_state_in_files": state_in_files})
    return keras.saving.register_keras_serializable(package="tfmp", name="LossScaleOptimizer")(front_end)
