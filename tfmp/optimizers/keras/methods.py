"""The methods that the wrappers of all optimizers of Keras have, the legacy ones too."""

from collections.abc import Iterable, Mapping
from types import MappingProxyType, ModuleType
from typing import Any, ClassVar, NoReturn

import tensorflow as tf

from tfmp.core import lists, settings
from tfmp.core.adapters import OptimizerAdapter, names_of
from tfmp.core.managers import OWN_MANAGERS, FixedLossScaleManager
from tfmp.core.step.facts import Facts
from tfmp.core.tracing import without_autograph
from tfmp.optimizers.base import LossScaleOptimizer, optimizer_of
from tfmp.optimizers.keras.arguments import parts_of_config, refuse_other_arguments, validate_inner_optimizer
from tfmp.optimizers.keras.loops import LoopRecord
from tfmp.optimizers.keras.takeover import continue_at
from tfmp.types import Done, Gradient, Gradients, GradsAndVars, Loss


class MethodsOfKeras(LossScaleOptimizer):
    """Scales losses and unscales gradients as Keras' own wrappers do, and takes steps."""

    #: The package whose optimizers the front-end wraps: `keras` or `tf_keras`.
    _keras: ClassVar[ModuleType]
    #: Whether these are the optimizers of `optimizers.legacy` there.
    _is_legacy: ClassVar[bool] = False
    #: Whether `apply_gradients` unscales gradients unless the loop does, as in Keras 3.
    _unscales_by_default: ClassVar[bool] = False
    #: The settings that every optimizer of this Keras has, with their defaults. Those of the inner optimizer count.
    #: Before Keras 3.10 they are also in the configuration of Keras' own wrapper, where they have no effect.
    _settings_of_every_optimizer: ClassVar[Mapping[str, Any]] = MappingProxyType({})
    _loop: LoopRecord

    def __getattr__(self, name: str) -> NoReturn:
        # Python's own error would name the front-end. A property that raises AttributeError comes here too.
        if hasattr(type(self), name):
            object.__getattribute__(self, name)
        raise AttributeError(f"a tfmp.LossScaleOptimizer around an optimizer of Keras has no attribute {name!r}.")

    def _optimizer_to_wrap(self, opt: Any, inner_optimizer: Any, others: Mapping[str, Any]) -> Any:  # noqa: ANN401
        """Return the optimizer by either name, after a check that it can be wrapped; `others` are refused."""
        found = optimizer_of(opt, inner_optimizer)
        validate_inner_optimizer(self._keras, found, legacy=self._is_legacy)
        refuse_other_arguments(found, others, self._settings_of_every_optimizer)
        return found

    def _set_up(self, *arguments: Any) -> None:  # noqa: ANN401 - as of the base class
        super()._set_up(*arguments)
        self._loop = LoopRecord()

    @property
    def initial_scale(self) -> float:
        """As in Keras' own wrapper: the loss scale that the manager started from, as a float.

        Raises:
            AttributeError: The manager does not follow the rule of Keras' own wrapper.
        """
        return float(self._setting_of_keras("init_loss_scale", "loss_scale"))

    @initial_scale.setter
    def initial_scale(self, initial_scale: float) -> NoReturn:
        raise settings.cannot_be_changed("initial_scale", initial_scale, "tfmp.LossScaleOptimizer")

    @property
    def dynamic_growth_steps(self) -> int | None:
        """As in Keras' own wrapper: after how many finite steps in a row the scale grows; None for a fixed scale.

        Raises:
            AttributeError: The manager does not follow the rule of Keras' own wrapper.
        """
        return None if not self.dynamic else int(self._setting_of_keras("incr_every_n_steps"))

    @dynamic_growth_steps.setter
    def dynamic_growth_steps(self, dynamic_growth_steps: int) -> NoReturn:
        raise settings.cannot_be_changed("dynamic_growth_steps", dynamic_growth_steps, "tfmp.LossScaleOptimizer")

    @property
    def dynamic(self) -> bool:
        """Whether the loss scale can change: False for a `tfmp.FixedLossScaleManager`, True for all others."""
        return not isinstance(self._loss_scale_manager, FixedLossScaleManager)

    @dynamic.setter
    def dynamic(self, dynamic: bool) -> NoReturn:
        raise settings.cannot_be_changed("dynamic", dynamic, "tfmp.LossScaleOptimizer")

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
        return self._loop.note_scaled("scale_loss", self._scaler.scale(loss))

    def get_scaled_loss(self, loss: Loss) -> Loss:
        """As in `tfmp.LossScaleOptimizer`."""
        if callable(loss):
            return lambda: self._loop.note_scaled("get_scaled_loss", self._scaler.scale(loss()))
        return self._loop.note_scaled("get_scaled_loss", self._scaler.scale(loss))

    @without_autograph
    def get_unscaled_gradients(self, grads: Iterable[Gradient]) -> list[Gradient]:
        """As in `tfmp.LossScaleOptimizer`."""
        grads = lists.gradients(grads)
        self._loop.warn_if_never_scaled(grads)
        unscaled = self._scaler.unscale(lists.of_tensors(grads))
        self._loop.note_unscaled(grads, unscaled)
        return unscaled

    def _unscaled(self, grads_and_vars: GradsAndVars) -> list[tuple[Gradient, Any]]:
        """Return the result of `compute_gradients` for pairs of a scaled gradient and its variable."""
        grads, variables = split(grads_and_vars)
        unscaled = self.get_unscaled_gradients(grads)
        self._loop.last_call = "compute_gradients"
        return list(zip(unscaled, variables, strict=True))

    def _continue_at(self, loss_scale: float, good_steps: int) -> None:
        continue_at(self._loss_scale_manager, loss_scale, good_steps)

    def _step(self, adapter: OptimizerAdapter, grads: Gradients, facts: Facts, *, are_scaled: bool) -> Done:
        """Take a step with gradients that may be scaled, and remember that they were applied."""
        adapter.refuse_unknown_variables(grads)
        if not are_scaled:
            grads = self._all_unscaled(grads, facts.loss_scale)
        done = self._take_step(adapter, lists.of_tensors(grads), facts, are_scaled=are_scaled)
        self._loop.note_applied()
        return done

    def _all_unscaled(self, grads: Gradients, loss_scale: tf.Tensor) -> Gradients:
        """Unscale the gradients that the user passed to `get_unscaled_gradients` and not what it returned."""
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
        used = {name: value for name, value in parts.items() if name not in cls._settings_of_every_optimizer}
        # `type.__call__` does what `cls(...)` does, without the metaclass of Keras 2. The metaclass would pass the
        # inner optimizer by position, and the subclass that Horovod makes accepts it by keyword only.
        made: LossScaleOptimizer = type.__call__(cls, **used)
        return made


def split(grads_and_vars: GradsAndVars) -> tuple[list[Gradient], list[Any]]:
    """Return the gradients and the variables of pairs as two lists; complex gradients are refused."""
    pairs = list(grads_and_vars)
    grads, variables = [grad for grad, _ in pairs], [variable for _, variable in pairs]
    lists.refuse_complex(grads, names_of(variables))
    return grads, variables
