"""What the front-ends for all versions of Keras share."""

import logging
from collections.abc import Callable, Iterable
from types import ModuleType
from typing import Any, ClassVar

import numpy as np
import tensorflow as tf

from tfmp.core import lists, script_lines, settings
from tfmp.core.accumulation.settings import AccumulationSettings
from tfmp.core.adapters import OptimizerAdapter
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
from tfmp.core.step.scaler import LossScaler, Step
from tfmp.core.tracing import without_autograph
from tfmp.optimizers.base import LossScaleOptimizer, settings_to_show
from tfmp.optimizers.keras_accumulation import KerasAccumulation
from tfmp.types import Gradient, Gradients, Loss

_logger = logging.getLogger("tfmp")


class LossScaleOptimizerKeras(LossScaleOptimizer):
    """The part of a front-end that is the same for every Keras.

    A loop goes one of two ways, Keras 2's or Keras 3's, and every front-end goes both:

        get_scaled_loss    get_unscaled_gradients    apply_gradients
        scale_loss                                   apply_gradients, which unscales

    Only what was called before tells `apply_gradients` which it is; so that is remembered. Replicas call the same in
    the same order, and need not remember each for itself. Keras 2's `compute_gradients` goes the first way, and is
    remembered by its own name: there, and only there, Horovod's optimizer averages gradients.
    """

    #: The Keras that the front-end is for.
    _keras: ClassVar[ModuleType]
    #: What a configuration may hold and no front-end takes.
    _settings_without_effect: ClassVar[frozenset[str]] = frozenset()
    # Keras' own:
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
        # Tracked, so that a function that takes steps can be exported.
        self._overflow_counts = self._scaler.overflow_counts
        self._last_call: str | None = None
        self._told: set[str] = set()
        # Now, and not in `build`: a checkpoint that is restored before finds the variables.
        self._loss_scale_manager.store_in(self._add_state_variable)

    def _add_state_variable(self, name: str, initial_value: np.generic) -> tf.Variable:
        raise NotImplementedError

    @property
    def initial_scale(self) -> float:
        """The scale that the manager started from; as in Keras' own wrapper."""
        return float(self._setting_of_keras("init_loss_scale", "loss_scale"))

    @property
    def dynamic_growth_steps(self) -> int | None:
        """After how many finite steps in a row the scale grows, None for a fixed scale; as in Keras' own wrapper."""
        return None if not self.dynamic else int(self._setting_of_keras("incr_every_n_steps"))

    @property
    def dynamic(self) -> bool:
        """Whether the scale changes; as in Keras 2's own wrapper."""
        return not isinstance(self._loss_scale_manager, FixedLossScaleManager)

    def _setting_of_keras(self, *names: str) -> Any:  # noqa: ANN401 - a number of some kind
        manager = self._loss_scale_manager
        config = manager.get_config() if isinstance(manager, OWN_MANAGERS) else {}
        values = [config[name] for name in names if name in config]
        if not values:
            raise AttributeError(
                f"a {type(manager).__name__} does not follow the rule of Keras' own wrapper, which this describes: ask "
                "the loss-scale manager instead."
            )
        return values[0]

    def scale_loss(self, loss: tf.Tensor) -> tf.Tensor:
        """Multiply a loss by the loss scale, in float32 or float64.

        `apply_gradients` then takes the gradients as they come, and unscales them.

        Args:
            loss: The loss, of a floating-point type.

        Returns:
            The scaled loss, to be differentiated.
        """
        self._last_call = "scale_loss"
        return self._scaler.scale(loss)

    def get_scaled_loss(self, loss: Loss) -> Loss:
        """Multiply a loss by the loss scale, in float32 or float64, for a loop that unscales the gradients itself.

        Args:
            loss: The loss, of a floating-point type, or a function that returns it.

        Returns:
            The scaled loss, or a function that returns it.
        """
        self._last_call = "get_scaled_loss"
        if callable(loss):
            return lambda: self._scaler.scale(loss())
        return self._scaler.scale(loss)

    @without_autograph
    def get_unscaled_gradients(self, grads: Iterable[Gradient]) -> list[Gradient]:
        """Divide gradients by the loss scale; `apply_gradients` then takes what this returned.

        Here is the place to clip gradients, by `tfmp.clip_by_global_norm` say, or to look at them.

        Args:
            grads: The gradients of a scaled loss; None stays None.

        Returns:
            The gradients in true magnitude, in float32 or float64.

        Raises:
            TypeError: These are no gradients.
        """
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
            var_list: Variables to exclude.
            var_names: Parts of names to exclude.

        Raises:
            TypeError: One of them is no list; a single variable or string is none.
        """
        self.inner_optimizer.exclude_from_weight_decay(
            None if var_list is None else lists.variables("var_list", var_list),
            None if var_names is None else lists.names("var_names", var_names),
        )

    def finalize_variable_values(self, var_list: Iterable[Any]) -> None:
        """Set the variables to their averages, if the inner optimizer keeps such.

        Args:
            var_list: The variables that were trained.

        Raises:
            TypeError: These are no variables.
        """
        self.inner_optimizer.finalize_variable_values(lists.variables("var_list", var_list))

    def set_weights(self, weights: Iterable[np.ndarray]) -> None:
        """Set the values of `variables`, those of the inner optimizer included.

        Args:
            weights: The values, in the order of `variables`.

        Raises:
            TypeError: `weights` is no list.
            ValueError: There are more or fewer values than variables, as there are before `build`.
        """
        variables = self.variables
        weights = lists.items("weights", weights, "a list of values", "pass one array for each of the variables")
        if len(weights) != len(variables):
            raise ValueError(
                f"the optimizer has {len(variables)} variables, got {len(weights)} values: build it first, for the "
                "weights that it trains."
            )
        for variable, value in zip(variables, weights, strict=True):
            variable.assign(value)

    def get_config(self) -> dict[str, Any]:
        """Return what `from_config` makes the optimizer of again."""
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
        """Make an optimizer from what `get_config` returned, that of Keras' own wrapper included.

        Args:
            config: The configuration.
            custom_objects: Classes that are not registered, by their names.
        """
        known = cls._classes_by_name() | (custom_objects or {})
        parts: dict[str, Any] = {
            name: cls._keras.saving.deserialize_keras_object(config[name], custom_objects=known)
            for name in ("inner_optimizer", "loss_scale_manager")
            if name in config
        }
        # As `cls(...)`, but for Keras 2's metaclass, which gives the inner optimizer by position: Horovod's subclass
        # takes it by name only.
        used = {name: value for name, value in config.items() if name not in cls._settings_without_effect}
        return type.__call__(cls, **{**used, **parts})

    @classmethod
    def _classes_by_name(cls) -> dict[str, type]:
        """Return the classes that a saved configuration names, and that Keras would not find."""
        return {}

    def _settings_to_show(self) -> list[str]:
        shown = {"is_distributed": self._is_distributed, **self._accumulation.get_config(), **self._own_settings()}
        return settings_to_show(self.inner_optimizer, shown)

    def _own_settings(self) -> dict[str, Any]:
        """Return the settings that only the front-end of this Keras has, as `get_config` has them."""
        raise NotImplementedError

    def _are_scaled(self, grads: Gradients, scaled_by_default: bool) -> bool:
        """Tell whether the gradients that `apply_gradients` was given are those of a scaled loss."""
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
        """Warn of what is done to gradients, and name the line where they were made, or else the present one."""
        if message in self._told:
            return
        self._told.add(message)
        _logger.warning("%s: %s", script_lines.line_of_gradients(grads), message)

    def _step(self, adapter: OptimizerAdapter, grads: Gradients, *, are_scaled: bool, averages: bool = False) -> None:
        """Take a step with gradients, or add them to the window."""
        distribution = self._scaler.distribution()
        accumulator = self._accumulation.accumulator_of(adapter.variables)
        if accumulator is not None:
            true_grads = self._scaler.true_grads(adapter, grads) if are_scaled else list(grads)
            self._scaler.accumulate(Step(adapter, true_grads, averages=averages), distribution, accumulator)
            return
        step = self._scaler.scaled_step(adapter, grads) if are_scaled else Step(adapter, adapter.typed(grads))
        self._scaler.step(step._replace(averages=averages), distribution)


def validate_inner_optimizer(keras: ModuleType, inner_optimizer: object) -> None:
    """Say so if an optimizer cannot be wrapped.

    Args:
        keras: The Keras that it should be of.
        inner_optimizer: What the user gave.

    Raises:
        TypeError: It is no optimizer.
        ValueError: It is a wrapper already; or TensorFlow 2's behaviour is disabled.
    """
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


def manager_of_keras(
    loss_scale_manager: Specification, initial_scale: float | None, dynamic_growth_steps: int | None
) -> LossScaleManager:
    """Return the manager that the arguments of a wrapper describe, those of Keras' own wrapper among them.

    Args:
        loss_scale_manager: As in `tfmp.LossScaleOptimizer`.
        initial_scale: The scale to start from, if the former is "dynamic".
        dynamic_growth_steps: After how many finite steps it grows, in the same case.

    Raises:
        TypeError: A manager is not described, or a number is none.
        ValueError: A setting is out of range; or both a manager and settings for another are given.
    """
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
    """Let a Keras find the managers that a saved model names. A manager of the user's own is registered by its author.

    Args:
        keras: The Keras.
    """
    for manager in OWN_MANAGERS:
        keras.saving.register_keras_serializable(package="tfmp")(manager)


def continue_at(manager: LossScaleManager, loss_scale: float, good_steps: int) -> None:
    """Let a manager go on where Keras' wrapper stopped, by its `continue_from`; say so if it has none.

    Args:
        manager: The manager; one of the user's own may have the method, with the arguments `loss_scale, good_steps`.
        loss_scale: The scale.
        good_steps: Finite steps since the scale last changed.
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
    """Return the nearest scale that a manager holds. Keras' has no bounds: 0 becomes 1.

    Args:
        loss_scale: The scale of Keras' wrapper.
    """
    return float(np.clip(loss_scale, 1, np.finfo(np.float32).max))
