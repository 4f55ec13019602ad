"""The base class of the front-ends for Keras 2, tf_keras and Keras 3."""

import inspect
import logging
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType, ModuleType
from typing import Any, ClassVar

import numpy as np
import tensorflow as tf

from tfmp.core import lists, script_lines, settings
from tfmp.core.accumulation.settings import AccumulationSettings
from tfmp.core.adapters import OptimizerAdapter
from tfmp.core.distribute.horovod_detection import is_horovods
from tfmp.core.managers import (
    OWN_MANAGERS,
    FixedLossScaleManager,
    LossScaleManager,
    Specification,
    dynamic_manager,
    get_loss_scale_manager,
    manager_of_wrapper,
)
from tfmp.core.overflow.detectors import OverflowDetector, validated_detector
from tfmp.core.step.choice import unscaled, update_of_scaled, update_of_unscaled
from tfmp.core.step.facts import Facts
from tfmp.core.step.scaler import LossScaler
from tfmp.core.step.window import accumulate
from tfmp.core.tracing import without_autograph
from tfmp.hosts.keras.own_code import is_foreign
from tfmp.optimizers.base import LossScaleOptimizer, settings_to_show
from tfmp.optimizers.keras_accumulation import KerasAccumulation
from tfmp.optimizers.keras_checkpoints import CheckpointedAsInner
from tfmp.optimizers.keras_files import SavedAsInner, StateInFiles
from tfmp.types import Gradient, Gradients, Loss

_logger = logging.getLogger("tfmp")


class LossScaleOptimizerKeras(CheckpointedAsInner, SavedAsInner, LossScaleOptimizer):
    """The methods that are the same in the front-ends for all versions of Keras.

    A custom training loop can be written in the style of Keras 2 or of Keras 3. Every front-end supports both:

        Keras 2    get_scaled_loss    get_unscaled_gradients    apply_gradients
        Keras 3    scale_loss                                   apply_gradients, which unscales

    `apply_gradients` cannot tell from the gradients alone whether it must unscale them, so the optimizer remembers
    which method was called last. All replicas call the same methods in the same order, so one record serves them all.
    `compute_gradients` of Keras 2 scales and unscales by itself. It is remembered under its own name, because Horovod's
    optimizer averages gradients in `compute_gradients` and nowhere else.
    """

    #: The package whose optimizers the front-end wraps: `keras` or `tf_keras`.
    _keras: ClassVar[ModuleType]
    #: The settings that every optimizer of this Keras has, with their defaults. Those of the inner optimizer count.
    #: Before Keras 3.10 they are also in the configuration of Keras' own wrapper, where they have no effect.
    _settings_of_every_optimizer: ClassVar[Mapping[str, Any]] = MappingProxyType(
        {
            **dict.fromkeys(("clipnorm", "clipvalue", "global_clipnorm", "ema_overwrite_frequency", "weight_decay")),
            "ema_momentum": 0.99,
            "use_ema": False,
        }
    )
    #: Holds the variables of this class in Keras' files.
    _state_in_files: ClassVar[type[StateInFiles]]
    # The next four come from a base class of Keras, or from the front-end.
    name: str
    inner_optimizer: Any
    add_variable: Callable[..., Any]
    variables: Any

    def _set_up(
        self,
        manager: LossScaleManager,
        is_distributed: bool,
        overflow_detector: OverflowDetector | None,
        accumulation: AccumulationSettings,
        aggregation_dtype: tf.DType | None = None,
    ) -> None:
        self._loss_scale_manager = manager
        self._is_distributed = settings.flag("is_distributed", is_distributed)
        detector = validated_detector(overflow_detector)
        self._scaler = LossScaler(self._loss_scale_manager, detector, is_distributed, aggregation_dtype)
        self._accumulation = KerasAccumulation(accumulation, detector)
        # TensorFlow exports a function only if the variables that it uses are reachable from a tracked attribute.
        self._overflow_counts = self._scaler.overflow_counts
        # The last of scale_loss, get_scaled_loss, get_unscaled_gradients and compute_gradients that was called.
        self._last_call: str | None = None
        # The warnings that were given, each of which is given once.
        self._told: set[str] = set()
        num_unused = len(self._own_variables())
        # The variables are made here and not in `build`, so that a checkpoint can be restored before `build`.
        self._loss_scale_manager.store_in(self._add_state_variable)
        self._loss_scale_state = self._state_in_files(lambda: self._own_variables()[num_unused:], self._continue_at)

    def _refuse_other_arguments(self, inner_optimizer: object, others: Mapping[str, Any]) -> None:
        """Raise `ValueError` for arguments of the constructor that it does not have, and say where they belong."""
        defaults = self._settings_of_every_optimizer
        given = {name: value for name, value in others.items() if name not in defaults or value != defaults[name]}
        if "loss_scale_factor" in given and "loss_scale_factor" in defaults:
            raise ValueError(
                f"loss_scale_factor={given['loss_scale_factor']!r} is a setting on the `inner_optimizer`, for training "
                "without a wrapper: write tfmp.LossScaleOptimizer(optimizer, scale) for a fixed scale."
            )
        of_inner = [name for name in given if name in {*defaults, *inspect.signature(type(inner_optimizer)).parameters}]
        if of_inner:
            values = ", ".join(f"{name}={given[name]!r}" for name in of_inner)
            kind = type(inner_optimizer).__name__
            raise ValueError(
                f"settings of the optimizer belong on the `inner_optimizer`, got {values}: write "
                f"tfmp.LossScaleOptimizer({kind}(..., {values}))."
            )
        if given:
            names = ", ".join(f"`{name}`" for name in given)
            raise ValueError(f"a tfmp.LossScaleOptimizer around an optimizer of Keras has no arguments: {names}.")

    def _add_state_variable(self, name: str, initial_value: np.generic) -> tf.Variable:
        raise NotImplementedError

    @property
    def initial_scale(self) -> float:
        """As in Keras' own wrapper: the loss scale that the manager started from, as a float.

        Raises:
            AttributeError: The manager does not follow the rule of Keras' own wrapper.
        """
        return float(self._setting_of_keras("init_loss_scale", "loss_scale"))

    @property
    def dynamic_growth_steps(self) -> int | None:
        """As in Keras' own wrapper: after how many finite steps in a row the scale grows; None for a fixed scale.

        Raises:
            AttributeError: The manager does not follow the rule of Keras' own wrapper.
        """
        return None if not self.dynamic else int(self._setting_of_keras("incr_every_n_steps"))

    @property
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

    def scale_loss(self, loss: tf.Tensor) -> tf.Tensor:
        """As in `tfmp.LossScaleOptimizer`."""
        self._last_call = "scale_loss"
        return self._scaler.scale(loss)

    def get_scaled_loss(self, loss: Loss) -> Loss:
        """As in `tfmp.LossScaleOptimizer`."""
        self._last_call = "get_scaled_loss"
        if callable(loss):
            return lambda: self._scaler.scale(loss())
        return self._scaler.scale(loss)

    @without_autograph
    def get_unscaled_gradients(self, grads: Iterable[Gradient]) -> list[Gradient]:
        """As in `tfmp.LossScaleOptimizer`."""
        grads = lists.gradients(grads)
        if self._last_call is None:
            self._warn_once(
                grads,
                "gradients are unscaled, and the loss was not scaled before: differentiate what get_scaled_loss "
                "returns, not the loss itself.",
            )
        self._last_call = "get_unscaled_gradients"
        return self._scaler.unscale(grads)

    def exclude_from_weight_decay(
        self, var_list: Iterable[Any] | None = None, var_names: Iterable[str] | None = None
    ) -> None:
        """Exclude variables from the inner optimizer's weight decay.

        Args:
            var_list: The variables to exclude.
            var_names: Strings. A variable whose name contains one of them is excluded.

        Raises:
            TypeError: An argument is a single variable or string, or anything else that is not a list.
        """
        self.inner_optimizer.exclude_from_weight_decay(
            None if var_list is None else lists.variables("var_list", var_list),
            None if var_names is None else lists.names("var_names", var_names),
        )

    def finalize_variable_values(self, var_list: Iterable[Any]) -> None:
        """Set the variables to their moving averages, if the inner optimizer keeps moving averages (`use_ema=True`).

        Args:
            var_list: The variables that were trained.

        Raises:
            TypeError: `var_list` is not a list of variables.
        """
        self.inner_optimizer.finalize_variable_values(lists.variables("var_list", var_list))

    def _own_variables(self) -> list[Any]:
        variables = self.variables
        return list(variables[: len(variables) - len(self.inner_optimizer.variables)])

    def _continue_at(self, loss_scale: float, good_steps: int) -> None:
        continue_at(self._loss_scale_manager, loss_scale, good_steps)

    def set_weights(self, weights: Iterable[np.ndarray]) -> None:
        """Set the values of `variables`, which include the inner optimizer's variables, or of the latter alone.

        Args:
            weights: An array for each variable, in the order of `variables`; or of the inner optimizer's `variables`,
                as it has them without a wrapper.

        Raises:
            TypeError: `weights` is not a list.
            ValueError: The number of values differs from the number of variables. Before `build` the optimizer does not
                have all its variables yet.
        """
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

    def get_config(self) -> dict[str, Any]:
        """As in `tfmp.LossScaleOptimizer`."""
        serialize = self._keras.saving.serialize_keras_object
        return {
            "name": self.name,
            "inner_optimizer": serialize(self.inner_optimizer),
            "loss_scale_manager": serialize(self._loss_scale_manager),
            "is_distributed": self._is_distributed,
            **self._accumulation.get_config(),
        }

    @classmethod
    def from_config(
        cls, config: dict[str, Any], custom_objects: dict[str, Any] | None = None
    ) -> "LossScaleOptimizerKeras":
        """As in `tfmp.LossScaleOptimizer`."""
        known = cls._classes_by_name() | (custom_objects or {})
        parts: dict[str, Any] = {
            name: cls._keras.saving.deserialize_keras_object(config[name], custom_objects=known)
            for name in ("inner_optimizer", "loss_scale_manager")
            if name in config
        }
        # `type.__call__` does what `cls(...)` does, without the metaclass of Keras 2. The metaclass would pass the
        # inner optimizer by position, and the subclass that Horovod makes accepts it by keyword only.
        used = {name: value for name, value in config.items() if name not in cls._settings_of_every_optimizer}
        return type.__call__(cls, **{**used, **parts})

    @classmethod
    def _classes_by_name(cls) -> dict[str, type]:
        """Return the classes that a saved configuration may name and that Keras would not find by itself."""
        return {}

    def _settings_to_show(self) -> list[str]:
        shown = {"is_distributed": self._is_distributed, **self._accumulation.get_config(), **self._own_settings()}
        return settings_to_show(self.inner_optimizer, shown)

    def _own_settings(self) -> dict[str, Any]:
        """Return the entries of `get_config` that only the front-end for this version of Keras has."""
        raise NotImplementedError

    def _are_scaled(self, grads: Gradients, scaled_by_default: bool) -> bool:
        """Return whether gradients passed to `apply_gradients` are of a scaled loss; warn if in doubt.

        `scaled_by_default` is the answer if no method of this optimizer was called before.
        """
        lists.refuse_all_none(grads)
        scaled = self._last_call == "scale_loss" or (self._last_call is None and scaled_by_default)
        if scaled and self._last_call is None:
            self._warn_once(
                grads,
                "gradients are divided by the loss scale, and scale_loss was not called before: differentiate what "
                "scale_loss returns, not the loss itself.",
            )
        elif not scaled and self._last_call not in {"get_unscaled_gradients", "compute_gradients"}:
            missing = "get_scaled_loss" if self._last_call is None else "get_unscaled_gradients"
            self._warn_once(
                grads,
                f"gradients are applied as they are, and {missing} was not called before: scale the loss by "
                "get_scaled_loss and the gradients by get_unscaled_gradients, or call scale_loss alone.",
            )
        return scaled

    def _warn_once(self, grads: Gradients, message: str) -> None:
        """Warn once with a message, and with the line that computed the gradients, or else the one that runs now."""
        if message in self._told:
            return
        self._told.add(message)
        line = script_lines.with_library(script_lines.line_of_gradients(grads))
        _logger.warning("%s: %s", line, message)

    def _step(self, adapter: OptimizerAdapter, grads: Gradients, facts: Facts, *, are_scaled: bool) -> None:
        """Apply this replica's gradients; or, if gradients are accumulated, add them to the current window."""
        accumulator = self._accumulation.accumulator_of(adapter.variables)
        if accumulator is not None:
            in_true_magnitude = unscaled(adapter, grads, facts.loss_scale) if are_scaled else grads
            accumulate(self._scaler, adapter, in_true_magnitude, facts, accumulator)
        elif are_scaled:
            self._scaler.step(update_of_scaled(adapter, grads, facts))
        else:
            self._scaler.step(update_of_unscaled(adapter, grads, facts))


def validate_inner_optimizer(keras: ModuleType, inner_optimizer: object) -> None:
    """Raise an error if the object to wrap is not an optimizer of `keras` (or `tf_keras`), or cannot be wrapped."""
    if isinstance(inner_optimizer, keras.mixed_precision.LossScaleOptimizer):
        raise ValueError(
            "inner_optimizer is a LossScaleOptimizer already: wrap the optimizer inside it, or call "
            "tfmp.LossScaleOptimizer.from_keras."
        )
    if not isinstance(inner_optimizer, keras.optimizers.Optimizer):
        raise TypeError(
            f"inner_optimizer must be a {keras.__name__}.optimizers.Optimizer, got {inner_optimizer!r} of type "
            f"{type(inner_optimizer).__name__}."
        )
    if not tf.compat.v1.executing_eagerly_outside_functions():
        raise ValueError(
            "Keras' optimizers need TensorFlow 2's behaviour, which is disabled here: wrap a "
            "tf.compat.v1.train.Optimizer in graphs."
        )


def warn_of_methods_never_called(inner_optimizer: object, methods: Iterable[str]) -> None:
    """Warn of methods of a user's own that the wrapper never calls, because it does their work itself."""
    for name in methods:
        if is_foreign(getattr(inner_optimizer, name, None)) and not is_horovods(inner_optimizer):
            _logger.warning(
                "%s.%s is never called, because the wrapper does its work: move what it adds to apply_gradients or "
                "update_step, which are called on every step that is applied.",
                type(inner_optimizer).__name__,
                name,
            )


def manager_of_keras(
    loss_scale_manager: Specification, initial_scale: float | None, dynamic_growth_steps: int | None
) -> LossScaleManager:
    """Return the loss-scale manager that the arguments of a Keras front-end describe."""
    rule: dict[str, Any] = {"initial_scale": initial_scale, "dynamic_growth_steps": dynamic_growth_steps}
    given = {name: value for name, value in rule.items() if value is not None}
    if loss_scale_manager == "fixed" and list(given) == ["initial_scale"]:
        return get_loss_scale_manager(settings.number("initial_scale", given["initial_scale"]))
    if given and loss_scale_manager != "dynamic":
        raise ValueError(
            f"loss_scale_manager={loss_scale_manager!r} decides the scale by settings of its own: leave out "
            "initial_scale and dynamic_growth_steps, or the manager."
        )
    return dynamic_manager(**given) if given else manager_of_wrapper(loss_scale_manager)


def register_managers(keras: ModuleType) -> None:
    """Register tfmp's managers with `keras` or `tf_keras`, so that a saved model that names one can be loaded.

    The author of any other manager registers it.
    """
    for manager in OWN_MANAGERS:
        keras.saving.register_keras_serializable(package="tfmp")(manager)


def continue_at(manager: LossScaleManager, loss_scale: float, good_steps: int) -> None:
    """Let a manager continue from the scale and the count of finite steps of Keras' own wrapper.

    This calls `continue_from(loss_scale, good_steps)`, which a manager of the user's own may also have, or warns.
    """
    continue_from = getattr(manager, "continue_from", None)
    if continue_from is None:
        _logger.warning(
            "the loss scale %g of Keras' own LossScaleOptimizer is not taken over: %s has no method continue_from.",
            loss_scale,
            type(manager).__name__,
        )
        return
    continue_from(loss_scale, good_steps)


def nearest_allowed(loss_scale: float) -> float:
    """Return the scale nearest to that of Keras' own wrapper that a manager can hold, from 1 to the largest float32.

    Keras' own scale has no such bounds: it can reach 0.
    """
    return float(np.clip(loss_scale, 1, np.finfo(np.float32).max))
