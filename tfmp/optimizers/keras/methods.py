"""The methods that the wrappers of all optimizers of Keras have, the legacy ones too."""

from collections.abc import Iterable, Sequence
from types import ModuleType
from typing import Any, ClassVar, NoReturn

import tensorflow as tf

from tfmp.core import lists, settings
from tfmp.core.accumulation.accumulator import GradientAccumulator
from tfmp.core.adapters import OptimizerAdapter, names_of
from tfmp.core.distribute import Distribution
from tfmp.core.distribute.horovod_detection import is_horovods
from tfmp.core.managers import OWN_MANAGERS, FixedLossScaleManager
from tfmp.core.step.scaler import Facts
from tfmp.core.step.step import accumulate, in_true_magnitude, step_of, take
from tfmp.core.tracing import without_autograph
from tfmp.optimizers.base import LossScaleOptimizer
from tfmp.optimizers.keras.loops import LoopRecord
from tfmp.optimizers.keras.takeover import continue_at
from tfmp.types import Done, Gradient, Gradients, Loss


class MethodsOfKeras(LossScaleOptimizer):
    """Scales losses and unscales gradients as Keras' own wrappers do, and takes steps."""

    #: The package whose optimizers the front-end wraps: `keras` or `tf_keras`.
    _keras: ClassVar[ModuleType]
    #: Whether `apply_gradients` unscales gradients unless the loop does, as in Keras 3.
    _unscales_by_default: ClassVar[bool] = False
    _loop: LoopRecord

    def __getattr__(self, name: str) -> NoReturn:
        # Python's own error would name the front-end. A property that raises AttributeError comes here too.
        if hasattr(type(self), name):
            object.__getattribute__(self, name)
        raise AttributeError(f"a tfmp.LossScaleOptimizer around an optimizer of Keras has no attribute {name!r}.")

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

    def _continue_at(self, loss_scale: float, good_steps: int) -> None:
        continue_at(self._loss_scale_manager, loss_scale, good_steps)

    @property
    def _is_of_horovod(self) -> bool:
        """True if this optimizer contains Horovod's, or is of a subclass that Horovod made of its class."""
        return is_horovods(self) or is_horovods(self.inner_optimizer)

    def _averages(self) -> bool:
        """Return whether gradients must still be averaged over Horovod's workers.

        Horovod's optimizers average gradients where they compute them, and nowhere else.
        """
        return not (self._is_of_horovod and self._loop.last_call == "compute_gradients")

    def _mean_over_workers(
        self, grads: Gradients, variables: Sequence[tf.Variable], distribution: Distribution
    ) -> list[Gradient]:
        names = names_of(variables)
        return self._scaler.worker_average.mean(grads, names, distribution, are_scaled=False)

    def _accumulator_of(self, variables: Sequence[Any]) -> GradientAccumulator | None:
        """Return the accumulator for gradients of these variables, in their order; None if none are accumulated."""
        raise NotImplementedError

    def _step(self, adapter: OptimizerAdapter, grads: Gradients, facts: Facts, *, are_scaled: bool) -> Done:
        """Apply this replica's gradients; or, if gradients are accumulated, add them to the current window."""
        adapter.refuse_unknown_variables(grads)
        if not are_scaled:
            grads = self._all_unscaled(grads, facts.loss_scale)
        done = self._apply_or_accumulate(adapter, lists.of_tensors(grads), facts, are_scaled=are_scaled)
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

    def _apply_or_accumulate(
        self, adapter: OptimizerAdapter, grads: Gradients, facts: Facts, *, are_scaled: bool
    ) -> Done:
        accumulator = self._accumulator_of(adapter.variables)
        if accumulator is not None:
            unscaled = in_true_magnitude(adapter, grads, facts.loss_scale) if are_scaled else grads
            return accumulate(adapter, unscaled, facts, accumulator)
        return take(step_of(adapter, grads, facts, are_scaled=are_scaled))


class OfInnerOptimizer:
    """What the wrappers of Keras 2 have from the optimizer in them."""

    _inner_optimizer: Any

    @property
    def inner_optimizer(self) -> Any:  # noqa: ANN401 - of either package
        """The wrapped optimizer."""
        return self._inner_optimizer

    @property
    def _optimizer(self) -> Any:  # noqa: ANN401 - of either package
        # The name that Keras 2's own wrappers have for it, and that public code reads. A property is in no checkpoint.
        return self._inner_optimizer

    @property
    def iterations(self) -> tf.Variable:
        """The inner optimizer's count of steps, which can be set, for example to the global step.

        Skipped steps count only with `iterations_include_skipped_steps=True`.
        """
        return self.inner_optimizer.iterations

    @iterations.setter
    def iterations(self, variable: tf.Variable) -> None:
        self.inner_optimizer.iterations = variable

    @property
    def learning_rate(self) -> Any:  # noqa: ANN401 - a variable, or of a legacy optimizer a number or a schedule
        """The inner optimizer's learning rate, which can be set."""
        return self.inner_optimizer.learning_rate

    @learning_rate.setter
    def learning_rate(self, learning_rate: Any) -> None:  # noqa: ANN401
        self.inner_optimizer.learning_rate = learning_rate
