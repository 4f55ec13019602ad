"""The base classes of the front-ends for Keras: for all, and for those of optimizers that are not legacy."""

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType, ModuleType
from typing import Any, ClassVar, NoReturn, TypeAlias

import numpy as np
import tensorflow as tf

from tfmp.core import lists, settings
from tfmp.core.accumulation import AccumulationSettings, accumulation_settings
from tfmp.core.adapter import OptimizerAdapter, names_of
from tfmp.core.managers import OWN_MANAGERS, FixedLossScaleManager, Specification
from tfmp.core.overflow.detectors import OverflowDetector
from tfmp.core.spikes.detector import SpikeDetector
from tfmp.core.step.scaler import Facts
from tfmp.core.watch import LoopRecord
from tfmp.hosts.base import LossScaleOptimizer, optimizer_of
from tfmp.hosts.keras.arguments import (
    manager_of_keras,
    parts_of_config,
    refuse_other_arguments,
    validate_inner_optimizer,
)
from tfmp.hosts.keras.checkpoints import CheckpointedAsInner, continue_at, manager_from_keras
from tfmp.hosts.keras.files import SavedAsInner, StateInFiles
from tfmp.hosts.keras.program import JitCompile, ProgramsByOptimizer
from tfmp.types import Done, Gradient, Gradients, GradsAndVars


def _unchangeable(read: Callable[[Any], Any]) -> Any:  # noqa: ANN401 - a property, and what it returns
    def refuse(_: object, value: object) -> NoReturn:
        raise settings.cannot_be_changed(read.__name__, value, "tfmp.LossScaleOptimizer")

    return property(read, refuse, doc=read.__doc__)


#: Makes a value of a shape and dtype, or the name of what does.
Initializer: TypeAlias = str | Callable[..., tf.Tensor]


class OfAnyKeras(LossScaleOptimizer):
    """Takes steps as Keras' own wrappers do. Each constructor has the arguments that the classes below it share."""

    #: The package whose optimizers the front-end wraps: `keras` or `tf_keras`.
    _keras: ClassVar[ModuleType]
    #: Whether these are the optimizers of `optimizers.legacy` there.
    _is_legacy: ClassVar[bool] = False
    #: Whether `apply_gradients` unscales gradients unless the loop does, as in Keras 3.
    _unscales_by_default: ClassVar[bool] = False
    #: The settings that every optimizer of this Keras has, with their defaults; before 3.10, Keras' own wrapper too.
    _settings_of_every_optimizer: ClassVar[Mapping[str, Any]] = MappingProxyType({})
    #: The arguments with which a front-end takes the place of Keras' own wrapper.
    _as_keras_own: ClassVar[Mapping[str, Any]] = MappingProxyType({})

    def __init__(
        self,
        inner_optimizer: Any = None,  # noqa: ANN401 - of any Keras
        loss_scale_manager: Specification = "dynamic",
        is_distributed: bool = False,
        *,
        opt: Any = None,  # noqa: ANN401 - of any Keras
        overflow_detector: OverflowDetector | None = None,
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
        validate_inner_optimizer(self._keras, inner_optimizer, legacy=self._is_legacy)
        refuse_other_arguments(inner_optimizer, others, self._settings_of_every_optimizer)
        accumulation = accumulation_settings(accumulation_steps, overflow_drops, micro_batches_per_epoch)
        manager = manager_of_keras(loss_scale_manager, initial_scale, dynamic_growth_steps, dynamic=dynamic)
        self._wrap(inner_optimizer, accumulation)
        self._loop = LoopRecord()
        self._set_up(manager, is_distributed, overflow_detector, accumulation, skip_spikes)

    def _wrap(self, inner_optimizer: Any, accumulation: AccumulationSettings) -> None:  # noqa: ANN401
        raise NotImplementedError

    def __getattr__(self, name: str) -> NoReturn:
        # Python's error would name the front-end. A property that raises AttributeError comes here too.
        if hasattr(type(self), name):
            object.__getattribute__(self, name)
        raise AttributeError(f"a tfmp.LossScaleOptimizer around an optimizer of Keras has no attribute {name!r}.")

    @_unchangeable
    def initial_scale(self) -> float:
        """As in Keras' own wrapper: the loss scale that the manager started from, if it follows the same rule."""
        return float(self._setting_of_keras("init_loss_scale", "loss_scale"))

    @_unchangeable
    def dynamic_growth_steps(self) -> int | None:
        """As in Keras' own wrapper: after how many finite steps in a row the scale grows; None for a fixed scale."""
        return None if not self.dynamic else int(self._setting_of_keras("incr_every_n_steps"))

    @_unchangeable
    def dynamic(self) -> bool:
        """Whether the loss scale can change: False for a `tfmp.FixedLossScaleManager`, True for all others."""
        return not isinstance(self._loss_scale_manager, FixedLossScaleManager)

    def _setting_of_keras(self, *names: str) -> Any:  # noqa: ANN401 - a number of some kind
        manager = self._loss_scale_manager
        config = manager.get_config() if isinstance(manager, OWN_MANAGERS) else {}
        values = [config[name] for name in names if name in config]
        if not values:
            raise AttributeError(
                f"a {type(manager).__name__} does not follow the rule of Keras' own wrapper, which has this setting: "
                "ask the loss-scale manager instead."
            )
        return values[0]

    def _unscaled(self, grads_and_vars: GradsAndVars) -> list[tuple[Gradient, Any]]:
        """Return the result of `compute_gradients` for pairs of a scaled gradient and its variable."""
        grads, variables = split(grads_and_vars)
        unscaled = self.get_unscaled_gradients(grads)
        self._loop.last_call = "compute_gradients"
        return list(zip(unscaled, variables, strict=True))

    def _take_step_of_loop(self, adapter: OptimizerAdapter, grads: Gradients, facts: Facts) -> Done:
        """Take a step with gradients, which the loop may have unscaled, and remember that they were applied."""
        are_scaled = self._loop.are_scaled(grads, by_default=self._unscales_by_default)
        adapter.refuse_unknown_variables(grads)
        if not are_scaled:
            grads = self._all_unscaled(grads, facts.loss_scale)
        done = self._take_step(adapter, lists.of_tensors(grads), facts, are_scaled=are_scaled)
        self._loop.note_applied()
        return done

    def _all_unscaled(self, grads: Gradients, loss_scale: tf.Tensor) -> Gradients:
        """Unscale those gradients that the user passed to `get_unscaled_gradients`, instead of its result."""
        scaled = self._loop.still_scaled(grads, unscales=self._unscales_by_default)
        if not any(scaled):
            return grads
        rest = [grad if is_scaled else None for grad, is_scaled in zip(grads, scaled, strict=True)]
        own = self._scaler.unscale(rest, loss_scale)
        return [own[index] if is_scaled else grads[index] for index, is_scaled in enumerate(scaled)]

    def get_config(self) -> dict[str, Any]:
        """As in `tfmp.LossScaleOptimizer`."""
        serialize = self._keras.saving.serialize_keras_object
        return {
            "inner_optimizer": serialize(self.inner_optimizer),
            "loss_scale_manager": serialize(self._loss_scale_manager),
            "skip_spikes": None if self.spike_detector is None else serialize(self.spike_detector),
            **self._settings(),
        }

    @classmethod
    def from_config(cls, config: dict[str, Any], custom_objects: dict[str, Any] | None = None) -> "LossScaleOptimizer":
        """As in `tfmp.LossScaleOptimizer`."""
        parts = parts_of_config(cls._keras, config, custom_objects, legacy=cls._is_legacy)
        return cls._made({name: value for name, value in parts.items() if name not in cls._settings_of_every_optimizer})

    @classmethod
    def _from_keras(cls, optimizer: Any) -> "LossScaleOptimizer":  # noqa: ANN401 - of any Keras
        manager = manager_from_keras(optimizer)
        return cls._made(
            {"inner_optimizer": optimizer.inner_optimizer, "loss_scale_manager": manager, **cls._as_keras_own}
        )

    @classmethod
    def _made(cls, arguments: Mapping[str, Any]) -> "LossScaleOptimizer":
        # The metaclass of Keras 2 passes the inner optimizer by position; Horovod's subclass takes keywords only.
        made: LossScaleOptimizer = type.__call__(cls, **arguments)
        return made


def split(grads_and_vars: GradsAndVars) -> tuple[list[Gradient], list[Any]]:
    """Return the gradients and the variables of pairs as two lists; complex gradients are refused."""
    pairs = list(grads_and_vars)
    grads, variables = [grad for grad, _ in pairs], [variable for _, variable in pairs]
    lists.refuse_complex(grads, names_of(variables))
    return grads, variables


class LossScaleOptimizerKeras(CheckpointedAsInner, SavedAsInner, OfAnyKeras):
    """The methods that are the same in the front-ends for all versions of Keras."""

    _settings_of_every_optimizer = MappingProxyType(
        {
            **dict.fromkeys(("clipnorm", "clipvalue", "global_clipnorm", "ema_overwrite_frequency", "weight_decay")),
            "ema_momentum": 0.99,
            "use_ema": False,
        }
    )
    #: Holds the variables of this class in Keras' files.
    _state_in_files: ClassVar[type[StateInFiles]]
    # These come from a base class of Keras, or from the front-end.
    name: str
    add_variable: Callable[..., Any]
    variables: Any

    def __init__(
        self,
        *arguments: Any,  # noqa: ANN401 - as of the base class
        jit_compile: JitCompile = "auto",
        **settings: Any,  # noqa: ANN401 - as of the base class
    ) -> None:
        self._jit_compile = jit_compile
        self._programs = ProgramsByOptimizer(jit_compile)
        super().__init__(*arguments, **settings)

    def _set_up(self, *arguments: Any) -> None:  # noqa: ANN401 - as of the base class
        super()._set_up(*arguments)
        self._has_spike_state = False
        # TensorFlow exports functions only with variables in tracked attributes.
        self._overflow_counts = self._scaler.overflow_counts
        self._norms = self._scaler.norms
        num_unused = len(self._own_variables())
        # Here, so that a checkpoint can be restored before `build`.
        self._loss_scale_manager.store_in(self._add_state_variable)
        self._loss_scale_state = self._state_in_files(
            lambda: self._own_variables()[num_unused:], functools.partial(continue_at, self._loss_scale_manager)
        )

    def build(self, var_list: Iterable[Any]) -> None:
        """Make the variables of the inner optimizer and those that accumulate gradients.

        With `accumulation_steps`, float8 scales of Keras are refused: their "gradients" are their next values.
        """
        var_list = lists.variables("var_list", var_list)
        # The accumulation may raise an error, so it comes before Keras marks the optimizers as built.
        self._accumulators.build(var_list, self._add_buffer)
        self._build_optimizers(var_list)
        # Last, so that the positions of all others in checkpoints are the same without a detector.
        if self.spike_detector is not None and not self._has_spike_state:
            self.spike_detector.store_in(self._add_state_variable)
            self._has_spike_state = True
        self._scaler.prepare(names_of(var_list))

    def _build_optimizers(self, variables: Sequence[Any]) -> None:
        self.inner_optimizer.build(variables)

    def _add_state_variable(self, name: str, initial_value: np.generic | np.ndarray) -> tf.Variable:
        # No Constant of Keras 3, which multiplies: TensorFlow before 2.19 cannot multiply booleans.
        shape, dtype = initial_value.shape, initial_value.dtype.name
        # Every replica computes the same state.
        return self._add(name, shape, dtype, lambda *_, **__: tf.constant(initial_value), "only_first_replica")

    def _add_buffer(self, name: str, shape: Sequence[int], dtype: tf.DType) -> tf.Variable:
        """Make a variable of which each replica has its own copy; a checkpoint holds the copies' sum."""

        def make(next_creator: Any, **settings: Any) -> tf.Variable:  # noqa: ANN401 - TensorFlow ships no types
            settings["synchronization"] = tf.VariableSynchronization.ON_READ
            settings["aggregation"] = tf.VariableAggregation.SUM
            return next_creator(**settings)

        with tf.variable_creator_scope(make):
            return self._add(name, shape, dtype.name, "zeros", "sum")

    def _add(
        self, name: str, shape: Sequence[int], dtype: str, initializer: Initializer, aggregation: str
    ) -> tf.Variable:
        """Add a variable to the wrapper's own; Keras 2 knows no `aggregation`."""
        raise NotImplementedError

    def exclude_from_weight_decay(
        self, var_list: Iterable[Any] | None = None, var_names: Iterable[str] | None = None
    ) -> None:
        """Exclude variables, and those whose names contain one of some strings, from the optimizer's weight decay."""
        self.inner_optimizer.exclude_from_weight_decay(
            None if var_list is None else lists.variables("var_list", var_list),
            None if var_names is None else lists.names("var_names", var_names),
        )

    def finalize_variable_values(self, var_list: Iterable[Any]) -> None:
        """Set the trained variables to their moving averages, if the inner optimizer keeps these (`use_ema=True`)."""
        self.inner_optimizer.finalize_variable_values(lists.variables("var_list", var_list))

    def _own_variables(self) -> list[Any]:
        variables = self.variables
        return list(variables[: len(variables) - len(self.inner_optimizer.variables)])

    def set_weights(self, weights: Iterable[np.ndarray]) -> None:
        """Set the values of `variables`, or of the inner optimizer's variables alone; call `build` before."""
        variables, inner_variables = self.variables, self.inner_optimizer.variables
        weights = lists.items("weights", weights, "a list of values", "pass one array for each of the variables")
        if len(weights) not in {len(variables), len(inner_variables)}:
            raise ValueError(
                f"the optimizer has {len(variables)} variables, got {len(weights)} values: build it first, for the "
                "weights that it trains."
            )
        if len(weights) == len(inner_variables):
            variables = inner_variables
        for variable, value in zip(variables, weights, strict=True):
            variable.assign(value)

    def _settings(self) -> dict[str, Any]:
        return {**super()._settings(), "jit_compile": self._jit_compile}

    def get_config(self) -> dict[str, Any]:
        """As in `tfmp.LossScaleOptimizer`."""
        return {"name": self.name, **super().get_config()}
