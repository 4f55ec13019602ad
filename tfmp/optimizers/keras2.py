"""The front-end for Keras 2 optimizers, whichever package Keras 2 comes in."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NoReturn

import numpy as np
import tensorflow as tf

from tfmp.core import lists
from tfmp.core.accumulation.settings import accumulation_settings
from tfmp.core.adapters import Keras2Adapter, names_of
from tfmp.core.distribute.horovod_detection import is_horovods, refuse_unsupported_horovods
from tfmp.core.managers import OWN_MANAGERS, FixedLossScaleManager, LossScaleManager, Specification, dynamic_manager
from tfmp.core.overflow.detectors import OverflowDetector
from tfmp.core.tracing import without_autograph
from tfmp.optimizers.base import validated_aggregation_dtype
from tfmp.optimizers.keras import (
    LossScaleOptimizerKeras,
    continue_at,
    manager_of_keras,
    nearest_allowed,
    validate_inner_optimizer,
)
from tfmp.optimizers.keras_accumulation import variables_of_each_replica
from tfmp.types import Gradient, Loss


class LossScaleOptimizerKeras2(LossScaleOptimizerKeras):
    """The `tfmp.LossScaleOptimizer` around a Keras 2 optimizer, but for the bases that one package gives it.

    `tfmp.LossScaleOptimizer(inner_optimizer, manager)` makes one. It takes the place of Keras' own: `compile` leaves it
    as it is under `mixed_float16`, `fit` scales the loss by it. A skipped step does not move `iterations`, and so no
    schedule or bias correction, where Keras' own does.

    Args:
        inner_optimizer: The optimizer to wrap. Clipping, weight decay and EMA are its own, and see unscaled gradients.
        loss_scale_manager: As in `tfmp.LossScaleOptimizer`. A manager keeps its state in the variables of this
            optimizer, which Keras saves; so every optimizer needs a manager of its own.
        is_distributed: As in `tfmp.LossScaleOptimizer`.
        overflow_detector: As there. It is not saved with a model.
        aggregation_dtype: As there.
        iterations_include_skipped_steps: Let skipped steps move `iterations`, as Keras' own wrapper does: for a run
            that was begun with it, and whose schedule counts that way.
        accumulation_steps: Micro-batches in a window. Their gradients are added up, and the mean is applied by one
            step, which is what `iterations` counts.
        overflow_drops: What an overflow makes invalid, "window" or "micro_batch".
        micro_batches_per_epoch: After how many micro-batches a window ends though it is not full, such as the steps of
            an epoch of `fit`. By default windows end when full.
        dynamic: As in Keras' own wrapper: False for a fixed scale, which is then `initial_scale`.
        initial_scale: As there: the scale that "dynamic" starts from, 2**15 by default.
        dynamic_growth_steps: As there: after how many finite steps "dynamic" doubles the scale, 2000 by default.
        name: The optimizer's name.

    Raises:
        TypeError: An argument is not of the type asked for.
        ValueError: The manager keeps its state in another optimizer already; or TensorFlow 2's behaviour is disabled;
            or `aggregation_dtype` is not to be had; or a setting of the accumulation is out of range; or the inner
            optimizer is one of Horovod's that does not average the gradients of each step.

    Source: `tf.keras.mixed_precision.LossScaleOptimizer`, whose interface it keeps.
    """

    # Private, and what Keras' own wrapper asks of an optimizer before it wraps it.
    _is_wrapped_by_loss_scale_optimizer = True

    def __init__(
        self,
        inner_optimizer: Any,  # noqa: ANN401 - of either package
        loss_scale_manager: Specification = "dynamic",
        is_distributed: bool = False,
        *,
        overflow_detector: OverflowDetector | None = None,
        aggregation_dtype: str | tf.DType | None = None,
        iterations_include_skipped_steps: bool = False,
        accumulation_steps: int = 1,
        overflow_drops: str = "window",
        micro_batches_per_epoch: int | None = None,
        dynamic: bool = True,
        initial_scale: float | None = None,
        dynamic_growth_steps: int | None = None,
        name: str | None = None,
    ) -> None:
        validate_inner_optimizer(self._keras, inner_optimizer)
        accumulation = accumulation_settings(accumulation_steps, overflow_drops, micro_batches_per_epoch)
        if not dynamic:
            loss_scale_manager = _fixed(loss_scale_manager, initial_scale, dynamic_growth_steps)
            initial_scale = None
        manager = manager_of_keras(loss_scale_manager, initial_scale, dynamic_growth_steps)
        self._inner_optimizer = inner_optimizer
        # It assigns to what is the inner optimizer's.
        ema = {"use_ema": inner_optimizer.use_ema, "ema_momentum": inner_optimizer.ema_momentum}
        self._keras.optimizers.Optimizer.__init__(self, name=name or "LossScaleOptimizer", **ema)
        self._iterations_include_skipped_steps = iterations_include_skipped_steps
        refuse_unsupported_horovods(inner_optimizer)
        of_horovod = is_horovods(self) or is_horovods(inner_optimizer)
        self._aggregation_dtype = validated_aggregation_dtype(aggregation_dtype, is_distributed, of_horovod)
        self._set_up(manager, is_distributed, overflow_detector, accumulation, self._aggregation_dtype)

    @property
    def inner_optimizer(self) -> Any:  # noqa: ANN401 - of either package
        """The wrapped optimizer."""
        return self._inner_optimizer

    @property
    def iterations(self) -> tf.Variable:
        """The inner optimizer's count of steps."""
        return self.inner_optimizer.iterations

    @iterations.setter
    def iterations(self, variable: tf.Variable) -> None:
        self.inner_optimizer.iterations = variable

    @property
    def learning_rate(self) -> tf.Variable:
        """The inner optimizer's learning rate."""
        return self.inner_optimizer.learning_rate

    @learning_rate.setter
    def learning_rate(self, learning_rate: float) -> None:
        self.inner_optimizer.learning_rate = learning_rate

    @property
    def use_ema(self) -> bool:
        """Whether the inner optimizer keeps averages of the weights."""
        return self.inner_optimizer.use_ema

    @use_ema.setter
    def use_ema(self, use_ema: bool) -> None:
        self.inner_optimizer.use_ema = use_ema

    @property
    def ema_momentum(self) -> float:
        """The momentum of the inner optimizer's averages."""
        return self.inner_optimizer.ema_momentum

    @ema_momentum.setter
    def ema_momentum(self, ema_momentum: float) -> None:
        self.inner_optimizer.ema_momentum = ema_momentum

    @property
    def variables(self) -> list[tf.Variable]:
        """The variables of the state, then those of the inner optimizer."""
        variables = self._keras.optimizers.Optimizer.variables.fget(self)
        # The parent's count of iterations, which is never used, and has the name of the inner optimizer's.
        del variables[0]
        variables.extend(self.inner_optimizer.variables)
        return variables

    def build(self, var_list: Iterable[tf.Variable]) -> None:
        """Make the variables of the inner optimizer, and those of a window.

        Args:
            var_list: The variables to train.

        Raises:
            TypeError: These are no variables.
        """
        var_list = lists.variables("var_list", var_list)
        self.inner_optimizer.build(var_list)
        self._accumulation.build(var_list, self._add_buffer)
        self._scaler.prepare(names_of(var_list))

    def compute_gradients(
        self, loss: Loss, var_list: Iterable[tf.Variable] | Callable[[], Any], tape: tf.GradientTape | None = None
    ) -> list[tuple[Gradient, tf.Variable]]:
        """Return the gradients of a loss in true magnitude; the loss is scaled in between.

        Args:
            loss: A function that returns the loss; or the loss itself, and the tape that recorded it.
            var_list: The variables to train, or a function that returns them.
            tape: The tape that recorded the loss.

        Returns:
            Pairs of a gradient and its variable, for `apply_gradients`.

        Raises:
            TypeError: `var_list` is no list of variables.
        """
        if not callable(var_list):
            var_list = lists.variables("var_list", var_list)
        tape = tape or tf.GradientTape()
        with tape:
            scaled = self.get_scaled_loss(loss)
        grads_and_vars = self.inner_optimizer.compute_gradients(scaled, var_list, tape=tape)
        grads = self.get_unscaled_gradients([grad for grad, _ in grads_and_vars])
        self._last_call = "compute_gradients"
        return [(grad, variable) for grad, (_, variable) in zip(grads, grads_and_vars, strict=True)]

    @without_autograph
    def aggregate_gradients(
        self, grads_and_vars: Iterable[tuple[Gradient, tf.Variable]]
    ) -> list[tuple[Gradient, tf.Variable]]:
        """Sum gradients over the replicas, as the inner optimizer does; average them over Horovod's workers.

        Args:
            grads_and_vars: Pairs of a gradient and its variable.

        Returns:
            The sums or means, and the variables.

        Raises:
            TypeError: These are no such pairs.
        """
        summed = list(self.inner_optimizer.aggregate_gradients(lists.pairs(grads_and_vars)))
        if not summed:
            return summed
        if not self._averages():
            return summed
        grads, variables = zip(*summed, strict=True)
        names, distribution = names_of(variables), self._scaler.distribution()
        means = self._scaler.average_over_workers(grads, names, distribution, are_scaled=False)
        return list(zip(means, variables, strict=True))

    def _averages(self) -> bool:
        """Tell whether the mean over Horovod's workers is still to be taken.

        Horovod's optimizer, inside this one or made of it, averages gradients when it computes them, and only then.
        """
        of_horovod = is_horovods(self) or is_horovods(self.inner_optimizer)
        return not (of_horovod and self._last_call == "compute_gradients")

    @without_autograph
    def apply_gradients(
        self,
        grads_and_vars: Iterable[tuple[Gradient, tf.Variable]],
        name: str | None = None,
        skip_gradients_aggregation: bool = False,
        *,
        experimental_aggregate_gradients: bool = True,
    ) -> tf.Variable:
        """Sum gradients over the replicas, and apply the sums if they are finite.

        Args:
            grads_and_vars: Pairs of a gradient and its variable; a gradient may be None. They are taken in true
                magnitude, unless the loss was scaled by `scale_loss`.
            name: The scope of the inner optimizer's ops.
            skip_gradients_aggregation: Take the gradients as summed already.
            experimental_aggregate_gradients: The opposite, by its older name.

        Returns:
            `iterations`.

        Raises:
            TypeError: These are no such pairs.
            ValueError: Every gradient is None.
            RuntimeError: A strategy is active, and the call is not made on its replicas.
            NotImplementedError: The active strategy is not supported.
        """
        grads_and_vars = lists.pairs(grads_and_vars)
        if not grads_and_vars:
            # As in Keras: a model without weights trains nothing.
            return self.iterations
        grads, variables = zip(*grads_and_vars, strict=True)
        with tf.init_scope():
            self.build(variables)

        is_reduced = skip_gradients_aggregation or not experimental_aggregate_gradients
        adapter = Keras2Adapter(
            self.inner_optimizer,
            variables,
            {"name": name},
            sums_first=not is_reduced,
            counts_skipped_steps=self._iterations_include_skipped_steps,
        )
        are_scaled = self._are_scaled(grads, scaled_by_default=False)
        self._step(adapter, grads, are_scaled=are_scaled, averages=not is_reduced and self._averages())
        return self.iterations

    def get_config(self) -> dict[str, Any]:
        """Return what `from_config` makes the optimizer of again."""
        return {
            **super().get_config(),
            **self._own_settings(),
        }

    def _own_settings(self) -> dict[str, Any]:
        return {
            "aggregation_dtype": None if self._aggregation_dtype is None else self._aggregation_dtype.name,
            "iterations_include_skipped_steps": self._iterations_include_skipped_steps,
        }

    def load_own_variables(self, store: Mapping[str, Any]) -> None:
        """Set the variables to what a file holds.

        Args:
            store: The values, by their positions.
        """
        # A variable of each replica divides what it is given, and what a file returns is no array yet.
        arrays = {name: np.asarray(store[name]) for name in store.keys()}  # noqa: SIM118 - a file has only this
        self._keras.optimizers.Optimizer.load_own_variables(self, arrays)

    @classmethod
    def _classes_by_name(cls) -> dict[str, type]:
        # The legacy formats, .h5 among them, find no class by the module or the package that it is registered with.
        known = (*vars(cls._keras.optimizers).values(), *OWN_MANAGERS)
        return {value.__name__: value for value in known if isinstance(value, type)}

    @property
    def apply(self) -> NoReturn:
        """Absent: it is Keras 3's."""
        raise AttributeError("apply is Keras 3's: call apply_gradients(zip(grads, variables)).")

    @property
    def dynamic_counter(self) -> NoReturn:
        """Not kept: Keras' own count of finite steps is what some managers call `good_steps`."""
        raise AttributeError(
            "dynamic_counter is the count of Keras' own wrapper: read the state of the loss-scale manager instead, "
            "manager.state_dict()."
        )

    @classmethod
    def _from_keras(cls, optimizer: Any) -> "LossScaleOptimizerKeras2":  # noqa: ANN401 - of either package
        manager: LossScaleManager
        if optimizer.dynamic:
            manager = dynamic_manager(nearest_allowed(optimizer.initial_scale), optimizer.dynamic_growth_steps)
            continue_at(manager, float(optimizer.loss_scale), int(optimizer.dynamic_counter))
        else:
            manager = FixedLossScaleManager(nearest_allowed(optimizer.initial_scale))
        return cls(optimizer.inner_optimizer, manager, iterations_include_skipped_steps=True)

    def _add_state_variable(self, name: str, initial_value: np.generic) -> tf.Variable:
        return self.add_variable(
            shape=(), dtype=initial_value.dtype, initializer=lambda *_: tf.constant(initial_value), name=name
        )

    def _add_buffer(self, name: str, shape: Sequence[int], dtype: tf.DType) -> tf.Variable:
        with variables_of_each_replica():
            return self.add_variable(shape, dtype, tf.zeros, name)


def _fixed(loss_scale_manager: Specification, initial_scale: float | None, dynamic_growth_steps: int | None) -> float:
    """Return the fixed scale that `dynamic=False` asks for, as it does in Keras' own wrapper."""
    if loss_scale_manager != "dynamic" or initial_scale is None or dynamic_growth_steps is not None:
        raise ValueError(
            "dynamic=False asks for a fixed scale, which is initial_scale: give that alone; or write "
            "tfmp.LossScaleOptimizer(optimizer, scale)."
        )
    return initial_scale
