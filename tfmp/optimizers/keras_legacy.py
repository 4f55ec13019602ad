"""The base class of the front-ends for legacy optimizers: those of `keras.optimizers.legacy` and of tf_keras."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from types import ModuleType
from typing import Any, NoReturn

import numpy as np
import tensorflow as tf

from tfmp.core import lists, settings
from tfmp.core.accumulation.accumulator import GradientAccumulator
from tfmp.core.accumulation.settings import accumulation_settings
from tfmp.core.adapters import names_of, takes_float32_gradients
from tfmp.core.distribute.horovod_detection import refuse_unsupported_horovods
from tfmp.core.managers import Specification
from tfmp.core.overflow.detectors import OverflowDetector, validated_detector
from tfmp.core.spikes.detector import SpikeDetector, validated_spike_detector
from tfmp.core.step.scaler import LossScaler
from tfmp.core.tracing import without_autograph
from tfmp.hosts.keras.internals import class_of_legacy_wrappers, initialize_with_session
from tfmp.hosts.keras.legacy import LegacyAdapter
from tfmp.optimizers.accumulators import Accumulators
from tfmp.optimizers.base import optimizer_of, settings_to_show, state_in_graph, validated_aggregation_dtype
from tfmp.optimizers.keras.arguments import (
    manager_of_keras,
    parts_of_config,
    refuse_other_arguments,
    validate_inner_optimizer,
)
from tfmp.optimizers.keras.files import register_own_classes
from tfmp.optimizers.keras.loops import LoopRecord
from tfmp.optimizers.keras.methods import MethodsOfKeras, OfInnerOptimizer
from tfmp.optimizers.keras.takeover import ScaleOfKeras, manager_from_keras2
from tfmp.types import Gradient, Gradients, Loss

#: The methods by which classes of Keras decide what attributes an object has.
_ATTRIBUTES = ("__getattribute__", "__setattr__", "__dir__")

_GradsAndVars = Iterable[tuple[Gradient, tf.Variable]]


class LossScaleOptimizerLegacy(OfInnerOptimizer, MethodsOfKeras):
    """The `tfmp.LossScaleOptimizer` around a legacy optimizer of Keras 2.

    `tfmp.LossScaleOptimizer(inner_optimizer, manager)` returns an object of a subclass, which adds the base classes of
    `keras` or of `tf_keras`. The arguments are documented there. It works eagerly, in a `tf.function`, and in the
    graphs that Estimator builds. What differs for legacy optimizers:

    * A skipped step does not change `iterations`, so learning rate schedules and bias corrections do not advance; with
      Keras' own wrapper they do, and here with `iterations_include_skipped_steps=True`.
    * `dynamic=False`, an argument of Keras' own wrapper, fixes the scale at `initial_scale`.
    * Hyperparameters are those of the inner optimizer: `opt.beta_1 = 0.5` sets its `beta_1`.
    * `weights`, `get_weights` and files in Keras' formats hold the inner optimizer alone, as with Keras' own wrapper. A
      `tf.train.Checkpoint` also holds the loss scale.

    Source: `tf.keras.mixed_precision.LossScaleOptimizer`, whose interface this class keeps.
    """

    # Keras reads this private attribute: `apply_gradients` has the argument `experimental_aggregate_gradients`.
    _HAS_AGGREGATE_GRAD = True
    # This comes from TensorFlow.
    _track_trackable: Callable[..., Any]

    def __init__(
        self,
        inner_optimizer: Any = None,  # noqa: ANN401 - of either package
        loss_scale_manager: Specification = "dynamic",
        is_distributed: bool = False,
        *,
        opt: Any = None,  # noqa: ANN401 - of either package
        overflow_detector: OverflowDetector | None = None,
        aggregation_dtype: str | tf.DType | None = None,
        iterations_include_skipped_steps: bool = False,
        accumulation_steps: int = 1,
        overflow_drops: str = "window",
        micro_batches_per_epoch: int | None = None,
        skip_spikes: SpikeDetector | None = None,
        dynamic: bool = True,
        initial_scale: float | None = None,
        dynamic_growth_steps: int | None = None,
        **others: Any,  # noqa: ANN401 - what is refused
    ) -> None:
        inner_optimizer = optimizer_of(opt, inner_optimizer)
        validate_inner_optimizer(self._keras, inner_optimizer, legacy=True)
        refuse_other_arguments(inner_optimizer, others, {})
        # `tf.__internal__` has this class for wrappers of legacy optimizers alone. In a checkpoint, the wrapper is what
        # the inner optimizer is.
        tf.__internal__.tracking.DelegatingTrackableMixin.__init__(self, inner_optimizer)
        self._inner_optimizer = inner_optimizer
        manager = manager_of_keras(loss_scale_manager, initial_scale, dynamic_growth_steps, dynamic=dynamic)
        self._loss_scale_manager = manager
        self._is_distributed = settings.flag("is_distributed", is_distributed)
        self._iterations_include_skipped_steps = settings.flag(
            "iterations_include_skipped_steps", iterations_include_skipped_steps
        )
        refuse_unsupported_horovods(inner_optimizer)
        dtype = validated_aggregation_dtype(aggregation_dtype, is_distributed, self._is_of_horovod)
        self._aggregation_dtype = dtype
        detector = validated_detector(overflow_detector)
        self.spike_detector = validated_spike_detector(skip_spikes)
        self._scaler = LossScaler(manager, detector, is_distributed, dtype, self.spike_detector)
        self._accumulation_settings = accumulation_settings(accumulation_steps, overflow_drops, micro_batches_per_epoch)
        self._accumulators = Accumulators(
            self._accumulation_settings, detector, keeps_float32=takes_float32_gradients(inner_optimizer)
        )
        self._loop = LoopRecord()
        # Keras' own wrapper saves the first of these. It is restored before the manager, whose own state then decides.
        self._track_trackable(ScaleOfKeras(manager, self._continue_at), "loss_scale", overwrite=True)
        self._track_trackable(manager, "loss_scale_manager", overwrite=True)
        self._track_trackable(self._accumulators, "accumulation", overwrite=True)
        self._track_trackable(self._scaler.overflow_counts, "overflow_counts", overwrite=True)
        self._track_trackable(self._scaler.norms, "norms", overwrite=True)
        if self.spike_detector is not None:
            self._track_trackable(self.spike_detector, "spike_detector", overwrite=True)

    # What a legacy optimizer is asked for, and only the inner one has.

    lr = OfInnerOptimizer.learning_rate

    @property
    def clipnorm(self) -> float | None:
        """The inner optimizer's setting, which can be set."""
        return self.inner_optimizer.clipnorm

    @clipnorm.setter
    def clipnorm(self, norm: float | None) -> None:
        self.inner_optimizer.clipnorm = norm

    @property
    def global_clipnorm(self) -> float | None:
        """The inner optimizer's setting, which can be set."""
        return self.inner_optimizer.global_clipnorm

    @global_clipnorm.setter
    def global_clipnorm(self, norm: float | None) -> None:
        self.inner_optimizer.global_clipnorm = norm

    @property
    def clipvalue(self) -> float | None:
        """The inner optimizer's setting, which can be set."""
        return self.inner_optimizer.clipvalue

    @clipvalue.setter
    def clipvalue(self, value: float | None) -> None:
        self.inner_optimizer.clipvalue = value

    @property
    def _hyper(self) -> dict[str, Any]:
        # Keras' class takes attributes of these names for hyperparameters, whenever it finds no other attribute, also
        # before there is an inner optimizer.
        inner = vars(self).get("_inner_optimizer")
        return {} if inner is None else inner._hyper

    def _get_hyper(self, name: str, dtype: tf.DType | None = None) -> Any:  # noqa: ANN401 - as of Keras
        return self.inner_optimizer._get_hyper(name, dtype)

    def _set_hyper(self, name: str, value: Any) -> None:  # noqa: ANN401 - as of Keras
        self.inner_optimizer._set_hyper(name, value)

    @property
    def weights(self) -> list[tf.Variable]:
        """The inner optimizer's variables."""
        return self.inner_optimizer.weights

    def variables(self) -> list[tf.Variable]:
        """Return the inner optimizer's variables."""
        return self.inner_optimizer.variables()

    def get_weights(self) -> list[np.ndarray]:
        """Return the values of the inner optimizer's variables."""
        return self.inner_optimizer.get_weights()

    def set_weights(self, weights: Iterable[np.ndarray]) -> None:
        """Set the values of the inner optimizer's variables."""
        self.inner_optimizer.set_weights(list(weights))

    def get_slot_names(self) -> list[str]:
        """Return the names of the inner optimizer's slots."""
        return self.inner_optimizer.get_slot_names()

    def get_slot(self, var: tf.Variable, slot_name: str) -> tf.Variable:
        """Return a slot of the inner optimizer."""
        return self.inner_optimizer.get_slot(var, slot_name)

    def add_slot(self, var: tf.Variable, slot_name: str, *args: Any, **kwargs: Any) -> tf.Variable:  # noqa: ANN401
        """Add a slot to the inner optimizer."""
        return self.inner_optimizer.add_slot(var, slot_name, *args, **kwargs)

    # TensorFlow's checkpoints restore slots by these private methods, and Keras' own code calls the next three.

    def _restore_slot_variable(self, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        return self.inner_optimizer._restore_slot_variable(*args, **kwargs)

    def _create_or_restore_slot_variable(self, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        return self.inner_optimizer._create_or_restore_slot_variable(*args, **kwargs)

    def _create_all_weights(self, var_list: Sequence[tf.Variable]) -> None:
        self.inner_optimizer._create_all_weights(var_list)

    def _create_hypers(self) -> NoReturn:
        # Keras does not call this on a wrapper. An optimizer around the wrapper does, such as Lookahead of TensorFlow
        # Addons, which then updates single variables by further private methods.
        inner = f"{type(self.inner_optimizer).__name__}(...)"
        raise ValueError(
            "tfmp.LossScaleOptimizer must be the outermost wrapper, because the optimizer around it updates each "
            "variable without asking whether the step is skipped: write, for example, "
            f"tfmp.LossScaleOptimizer(Lookahead({inner})), not Lookahead(tfmp.LossScaleOptimizer({inner}))."
        )

    def _aggregate_gradients(self, grads_and_vars: _GradsAndVars) -> list[tuple[Gradient, tf.Variable]]:
        return list(self.inner_optimizer._aggregate_gradients(grads_and_vars))

    def _compute_gradients(
        self,
        loss: Loss,
        var_list: Any,  # noqa: ANN401 - variables, or a function that returns them
        grad_loss: tf.Tensor | None = None,
        tape: tf.GradientTape | None = None,
    ) -> list[tuple[Gradient, tf.Variable]]:
        tape = tape or tf.GradientTape()
        with tape:
            scaled = self.get_scaled_loss(loss)
        grads_and_vars = self.inner_optimizer._compute_gradients(scaled, var_list, grad_loss, tape=tape)
        return self._unscaled(grads_and_vars)

    def compute_gradients(
        self,
        loss: Loss,
        var_list: Any,  # noqa: ANN401 - as of `minimize`
        tape: tf.GradientTape | None = None,
    ) -> list[tuple[Gradient, tf.Variable]]:
        """As in `tfmp.LossScaleOptimizer`; legacy optimizers themselves have this method under a private name."""
        return self._compute_gradients(loss, var_list, tape=tape)

    def minimize(
        self,
        loss: Loss,
        var_list: Any,  # noqa: ANN401 - variables, or a function that returns them
        grad_loss: tf.Tensor | None = None,
        name: str | None = None,
        tape: tf.GradientTape | None = None,
        **kwargs: Any,  # noqa: ANN401 - of the inner optimizer
    ) -> Any:  # noqa: ANN401 - an op, or `iterations`
        """As in `tfmp.LossScaleOptimizer`; further keyword arguments are those of `apply_gradients`."""
        return self.apply_gradients(self._compute_gradients(loss, var_list, grad_loss, tape), name=name, **kwargs)

    def get_gradients(self, loss: tf.Tensor, params: Sequence[tf.Variable]) -> list[Gradient]:
        """Return the unscaled gradients of a loss in a graph; `get_updates` and Estimator's heads call this."""
        grads = self.inner_optimizer.get_gradients(self.get_scaled_loss(loss), params)
        return [grad for grad, _ in self._unscaled(zip(grads, params, strict=True))]

    def _unscaled(self, grads_and_vars: _GradsAndVars) -> list[tuple[Gradient, tf.Variable]]:
        pairs = list(grads_and_vars)
        grads, variables = [grad for grad, _ in pairs], [variable for _, variable in pairs]
        lists.refuse_complex(grads, names_of(variables))
        unscaled = self.get_unscaled_gradients(grads)
        self._loop.last_call = "compute_gradients"
        return list(zip(unscaled, variables, strict=True))

    @without_autograph
    def apply_gradients(
        self,
        grads_and_vars: _GradsAndVars,
        name: str | None = None,
        experimental_aggregate_gradients: bool = True,
        **kwargs: Any,  # noqa: ANN401 - of the inner optimizer
    ) -> Any:  # noqa: ANN401 - an op, or `iterations`
        """As in `tfmp.LossScaleOptimizer`; the inner optimizer sums the gradients over the replicas.

        Args:
            grads_and_vars: Pairs of a gradient and its variable.
            name: The name scope of the inner optimizer's ops.
            experimental_aggregate_gradients: False if the gradients are already summed over the replicas, and averaged
                over Horovod's workers.
            **kwargs: Further arguments of the inner optimizer's `apply_gradients`.

        Returns:
            The op of the whole step; `iterations` in eager mode.
        """
        pairs = lists.pairs(grads_and_vars)
        if not pairs:
            # Keras accepts an empty list too: a model without weights has nothing to train.
            return self.iterations
        grads, variables = zip(*pairs, strict=True)
        lists.refuse_complex(grads, names_of(variables))
        lists.refuse_all_none(grads, names_of(variables))
        are_scaled = self._loop.are_scaled(grads, by_default=self._unscales_by_default)
        facts = self._scaler.facts()

        def average(grads: Gradients) -> Gradients:
            return self._mean_over_workers(grads, variables, facts.distribution)

        adapter = LegacyAdapter(
            self.inner_optimizer,
            variables,
            kwargs if name is None else {"name": name, **kwargs},
            is_summed=not experimental_aggregate_gradients,
            average=average if experimental_aggregate_gradients and self._averages() else None,
            counts_skipped_steps=self._iterations_include_skipped_steps,
        )
        adapter.prepare([variable for grad, variable in pairs if grad is not None])
        done = self._step(adapter, grads, facts, are_scaled=are_scaled)
        # Where Keras trains in a graph, it initializes the variables that it made, and those that it is told of.
        initialize_with_session(
            self._keras, state_in_graph(self._loss_scale_manager, self._accumulators, self.spike_detector)
        )
        return self.iterations if tf.executing_eagerly() else done

    def _accumulator_of(self, variables: Sequence[Any]) -> GradientAccumulator | None:
        return self._accumulators.of(variables) if self._accumulators.is_on else None

    def get_config(self) -> dict[str, Any]:
        """As in `tfmp.LossScaleOptimizer`."""
        serialize = self._keras.saving.serialize_keras_object
        return {
            "inner_optimizer": serialize(self.inner_optimizer),
            "loss_scale_manager": serialize(self._loss_scale_manager),
            "skip_spikes": None if self.spike_detector is None else serialize(self.spike_detector),
            **self._own_settings(),
        }

    def _own_settings(self) -> dict[str, Any]:
        return {
            "is_distributed": self._is_distributed,
            "aggregation_dtype": None if self._aggregation_dtype is None else self._aggregation_dtype.name,
            "iterations_include_skipped_steps": self._iterations_include_skipped_steps,
            **self._accumulation_settings._asdict(),
        }

    def _settings_to_show(self) -> list[str]:
        # Keras shows this in its error if the model is of the other package, `keras` or `tf_keras`.
        kind, *others = settings_to_show(self.inner_optimizer, self._own_settings())
        return [f"{kind} of {self._keras.__name__}", *others]

    @classmethod
    def from_config(
        cls, config: Mapping[str, Any], custom_objects: Mapping[str, Any] | None = None
    ) -> "LossScaleOptimizerLegacy":
        """As in `tfmp.LossScaleOptimizer`."""
        optimizers = cls._keras.optimizers
        kinds = (optimizers.legacy.Optimizer, optimizers.Optimizer)
        parts = parts_of_config(cls._keras, config, kinds, vars(optimizers.legacy).values(), custom_objects)
        inner = parts.pop("inner_optimizer")
        if isinstance(inner, cls._keras.optimizers.Optimizer):
            # This is the configuration of a wrapper around an optimizer that is not legacy: `model_to_estimator` makes
            # a legacy one of it.
            inner = cls._keras.__internal__.optimizers.convert_to_legacy_optimizer(inner)
            parts.pop("name", None)
        # `type.__call__` does what `cls(...)` does, without the metaclass of Keras' own wrapper.
        # Horovod makes a subclass of this class whose constructor takes no other arguments than those with a name.
        return type.__call__(cls, inner_optimizer=inner, **parts)

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
    def _from_keras(cls, optimizer: Any) -> "LossScaleOptimizerLegacy":  # noqa: ANN401 - of either package
        manager = manager_from_keras2(optimizer)
        inner = optimizer.inner_optimizer
        # Keras' own wrapper marks the optimizer in it, and will not be used any more.
        inner._is_wrapped_by_loss_scale_optimizer = False
        return type.__call__(cls, inner, manager, iterations_include_skipped_steps=True)


def with_bases_of(keras: ModuleType, name: str, module: str) -> type[LossScaleOptimizerLegacy]:
    """Make the front-end for the legacy optimizers of a package that Keras 2 comes in, and register it there."""
    register_own_classes(keras)
    # Where Keras trains in a graph, it wraps every optimizer that is not of its own wrapper's class. That class has
    # attributes for the optimizer that its own constructor wraps, so those of any legacy optimizer take their place.
    of_any = {each: getattr(keras.optimizers.legacy.Optimizer, each) for each in _ATTRIBUTES}
    front_end = type(keras.mixed_precision.LossScaleOptimizer)(
        name,
        (LossScaleOptimizerLegacy, class_of_legacy_wrappers(keras)),
        {"__module__": module, "_keras": keras, **of_any},
    )
    return keras.saving.register_keras_serializable(package="tfmp", name="LegacyLossScaleOptimizer")(front_end)
