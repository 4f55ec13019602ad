"""The front-end for Keras 3 optimizers, on the TensorFlow backend."""

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NoReturn

import keras
import numpy as np
import tensorflow as tf

from tfmp.core import lists
from tfmp.core.accumulation.settings import AccumulationSettings, accumulation_settings
from tfmp.core.adapters import Keras3Adapter, names_of
from tfmp.core.distribute.horovod_detection import running_horovod
from tfmp.core.managers import Specification, dynamic_manager
from tfmp.core.overflow.detectors import OverflowDetector
from tfmp.core.tracing import without_autograph
from tfmp.optimizers.keras import (
    LossScaleOptimizerKeras,
    continue_at,
    manager_of_keras,
    nearest_allowed,
    register_managers,
    validate_inner_optimizer,
)
from tfmp.optimizers.keras3_update import JitCompile, Keras3Update
from tfmp.optimizers.keras_accumulation import variables_of_each_replica
from tfmp.types import Gradient, GradsAndVars, Loss

_logger = logging.getLogger("tfmp")

register_managers(keras)


@keras.saving.register_keras_serializable(package="tfmp", name="LossScaleOptimizer")
class LossScaleOptimizerKeras3(LossScaleOptimizerKeras, keras.optimizers.LossScaleOptimizer):
    """The `tfmp.LossScaleOptimizer` around a Keras 3 optimizer.

    `tfmp.LossScaleOptimizer(inner_optimizer, manager)` makes one. It takes the place of Keras' own, which decides by
    the first replica's gradients alone and lets an overflow on any other into the weights: `compile` leaves it as it is
    under `mixed_float16`, `fit` scales the loss by it.

    Args:
        inner_optimizer: The optimizer to wrap. Clipping, weight decay, EMA and gradient accumulation are its own, and
            see unscaled gradients.
        loss_scale_manager: As in `tfmp.LossScaleOptimizer`. A manager keeps its state in the variables of this
            optimizer, which Keras saves; so every optimizer needs a manager of its own.
        is_distributed: As in `tfmp.LossScaleOptimizer`.
        overflow_detector: As there. It is not saved with a model.
        jit_compile: Whether XLA compiles unscaling, clipping and update into one program in a `tf.function`: "auto" for
            large variables that Keras' own code alone updates, True whatever code updates them. Replicas of a strategy
            update without. `Keras3Update` has the rule.
        accumulation_steps: Micro-batches in a window. Their gradients are added up, and the mean is applied by one
            step, which is what `iterations` counts.
        overflow_drops: What an overflow makes invalid, "window" or "micro_batch".
        micro_batches_per_epoch: After how many micro-batches a window ends though it is not full, such as the steps of
            an epoch of `fit`. By default windows end when full.
        initial_scale: As in Keras' own wrapper: the scale that "dynamic" starts from, 2**15 by default.
        dynamic_growth_steps: As there: after how many finite steps "dynamic" doubles the scale, 2000 by default.
        name: The optimizer's name.

    Raises:
        TypeError: An argument is not of the type asked for.
        ValueError: The manager keeps its state in another optimizer already, or is given beside settings for another;
            the inner optimizer accumulates gradients as this one does; a setting of the accumulation is out of range;
            Keras runs on another backend than TensorFlow; or TensorFlow 2's behaviour is disabled.

    Example:
        >>> import keras, tfmp
        >>> w = keras.Variable([1.0, 2.0])
        >>> manager = tfmp.ExponentialUpdateLossScaleManager(1024, 1000, decr_every_n_nan_or_inf=1, decr_ratio=0.5)
        >>> opt = tfmp.LossScaleOptimizer(keras.optimizers.SGD(0.5), manager)
        >>> for factor in (1.0, float("inf")):
        ...     with tf.GradientTape() as tape:
        ...         loss = opt.scale_loss(tf.reduce_sum(w.value) * factor)
        ...     opt.apply(tape.gradient(loss, [w.value]), [w])
        ...     print(w.numpy(), float(opt.loss_scale), int(opt.iterations))
        [0.5 1.5] 1024.0 1
        [0.5 1.5] 512.0 1

    Source: `keras.optimizers.LossScaleOptimizer`, whose interface it keeps.
    """

    _keras = keras
    # What the configuration of Keras' own wrapper has of its base class, before Keras 3.10.
    _settings_without_effect = frozenset(
        {
            *("clipnorm", "clipvalue", "ema_momentum", "ema_overwrite_frequency", "global_clipnorm"),
            *("gradient_accumulation_steps", "loss_scale_factor", "use_ema", "weight_decay"),
        }
    )

    def __init__(
        self,
        inner_optimizer: keras.optimizers.Optimizer,
        loss_scale_manager: Specification = "dynamic",
        is_distributed: bool = False,
        *,
        overflow_detector: OverflowDetector | None = None,
        jit_compile: JitCompile = "auto",
        accumulation_steps: int = 1,
        overflow_drops: str = "window",
        micro_batches_per_epoch: int | None = None,
        initial_scale: float | None = None,
        dynamic_growth_steps: int | None = None,
        name: str | None = None,
    ) -> None:
        accumulation = accumulation_settings(accumulation_steps, overflow_drops, micro_batches_per_epoch)
        _validate(inner_optimizer, accumulation)
        if not (isinstance(jit_compile, bool) or jit_compile == "auto"):
            raise ValueError(f'jit_compile must be True, False or "auto", got {jit_compile!r}.')
        manager = manager_of_keras(loss_scale_manager, initial_scale, dynamic_growth_steps)
        # Not the parent's constructor, which sets up a scale of its own. The parent's learning rate is never used.
        keras.optimizers.Optimizer.__init__(self, learning_rate=0.0, name=name)
        self._jit_compile = jit_compile
        self.inner_optimizer = inner_optimizer
        self._set_up(manager, is_distributed, overflow_detector, accumulation)
        # Last: an optimizer of the user's is changed, as Keras' own wrapper changes it, only if there is a wrapper.
        _turn_loss_scale_factor_off(inner_optimizer)

    @property
    def iterations(self) -> keras.Variable:
        """The inner optimizer's count of steps."""
        # Keras' own wrapper counts by itself before Keras 3.9.
        return self.inner_optimizer.iterations

    def build(self, var_list: Iterable[keras.Variable]) -> None:
        """Make the variables of the inner optimizer, and those of a window.

        Args:
            var_list: The variables to train.

        Raises:
            TypeError: These are no variables.
            ValueError: Gradients are to be accumulated, and those of a variable are its next values (float8 scales).
        """
        var_list = lists.variables("var_list", var_list)
        # First: Keras takes an optimizer for built, though an error follows.
        self._accumulation.build(var_list, self._add_buffer)
        self.inner_optimizer.build(var_list)
        keras.optimizers.Optimizer.build(self, var_list)
        self._scaler.prepare(names_of(var_list))
        self._update = Keras3Update(self.inner_optimizer, self._trainable_variables, self._jit_compile)

    def get_config(self) -> dict[str, Any]:
        """Return what `from_config` makes the optimizer of again."""
        return {**super().get_config(), **self._own_settings()}

    def _own_settings(self) -> dict[str, Any]:
        return {"jit_compile": self._jit_compile}

    def compute_gradients(
        self, loss: Loss, var_list: Iterable[keras.Variable], tape: tf.GradientTape | None = None
    ) -> list[tuple[Gradient, keras.Variable]]:
        """Return the gradients of a loss in true magnitude, as Keras 2's optimizers do; the loss is scaled in between.

        Args:
            loss: A function that returns the loss; or the loss itself, and the tape that recorded it.
            var_list: The variables to train.
            tape: The tape that recorded the loss.

        Returns:
            Pairs of a gradient and its variable, for `apply_gradients`.

        Raises:
            TypeError: `var_list` is no list of variables.
            ValueError: The loss is a tensor, and there is no tape.
        """
        variables = lists.variables("var_list", var_list)
        grads = self.get_unscaled_gradients(self._scaled_gradients(loss, variables, tape))
        return list(zip(grads, variables, strict=True))

    def minimize(self, loss: Loss, var_list: Iterable[keras.Variable], tape: tf.GradientTape | None = None) -> None:
        """Take one step down the gradient of a loss, as Keras 2's optimizers do.

        Args:
            loss: A function that returns the loss; or the loss itself, and the tape that recorded it.
            var_list: The variables to train.
            tape: The tape that recorded the loss.

        Raises:
            TypeError: `var_list` is no list of variables.
            ValueError: The loss is a tensor, and there is no tape.
        """
        variables = lists.variables("var_list", var_list)
        self.apply(self._scaled_gradients(loss, variables, tape), variables)

    def _scaled_gradients(
        self, loss: Loss, variables: Sequence[keras.Variable], tape: tf.GradientTape | None
    ) -> list[Gradient]:
        if tape is None and not callable(loss):
            raise ValueError("the loss is a tensor: pass the tape that recorded it, or a function that returns it.")
        tape = tape or tf.GradientTape()
        with tape:
            scaled = self.scale_loss(loss() if callable(loss) else loss)
        return list(tape.gradient(scaled, variables))

    @property
    def loss_scale_factor(self) -> NoReturn:
        """Absent: the manager decides the scale."""
        # No None: Keras does not call a setter with the value that the attribute has.
        raise AttributeError("a tfmp.LossScaleOptimizer has no loss_scale_factor: read its loss_scale.")

    @loss_scale_factor.setter
    def loss_scale_factor(self, factor: float | None) -> None:
        # Keras' constructor sets it, before there is an inner optimizer. Later, from Keras 3.10 on, Keras' own wrapper
        # does, of the optimizer that it wraps.
        if "inner_optimizer" in vars(self):
            raise ValueError(
                "a tfmp.LossScaleOptimizer takes no loss_scale_factor, and Keras' own LossScaleOptimizer cannot wrap "
                "it: the loss would be scaled twice. Use it as it is."
            )

    @without_autograph
    def apply(self, grads: Iterable[Gradient], trainable_variables: Iterable[keras.Variable] | None = None) -> None:
        """Apply gradients if they are finite on every replica.

        Args:
            grads: The gradients of a scaled loss, one for each variable, or what `get_unscaled_gradients` made of
                them; None is left out.
            trainable_variables: The variables; by default those that the optimizer was built with.

        Raises:
            TypeError: These are no gradients, or no variables.
            ValueError: Every gradient is None; or there are no variables.
            RuntimeError: A strategy is active, and the call is not made on its replicas.
            NotImplementedError: The active strategy is not supported; or Horovod is to distribute the step.
        """
        grads = lists.gradients(grads)
        if not grads:
            # As in Keras: a model without weights trains nothing.
            return
        variables = self._built_with(trainable_variables)
        self._scaler.warn_if_nothing_averages()
        horovod = running_horovod()
        if self._is_distributed and horovod is not None and horovod.size() > 1:
            raise NotImplementedError(
                "Horovod is supported for optimizers of Keras 2.15 and TF1, not for those of Keras 3: distribute the "
                "training by tf.distribute.MultiWorkerMirroredStrategy."
            )
        if len(grads) != len(variables):
            raise ValueError(
                f"there are {len(grads)} gradients for {len(variables)} variables: pass one for each, None where the "
                "loss does not depend on it."
            )
        are_scaled = self._are_scaled(grads, scaled_by_default=True)
        self._step(Keras3Adapter(self.inner_optimizer, variables, self._update), grads, are_scaled=are_scaled)

    @without_autograph
    def apply_gradients(self, grads_and_vars: GradsAndVars) -> keras.Variable:
        """Apply gradients as `apply` does, in the form of Keras 2.

        Args:
            grads_and_vars: Pairs of a gradient and its variable.

        Returns:
            `iterations`.

        Raises:
            TypeError: These are no such pairs.
        """
        # What Keras returns is the wrapper's own count, which nothing moves.
        super().apply_gradients(lists.pairs(grads_and_vars))
        return self.iterations

    def stateless_apply(self, *args: Any, **kwargs: Any) -> NoReturn:  # noqa: ANN401 - whatever it is given
        """Refuse: it is for backends without variables."""
        raise NotImplementedError("stateless_apply is not for the TensorFlow backend: call apply.")

    def load_own_variables(self, store: Mapping[str, np.ndarray]) -> None:
        """Set the variables to what a file holds, also to what Keras' own wrapper saved.

        Args:
            store: The values, by their positions.
        """
        # The inner optimizer is an attribute, and Keras loads it by itself.
        if len(store.keys()) == len(_VARIABLES_OF_KERAS) + len(self.inner_optimizer.variables):
            saved = {name: store[str(index)][()] for index, name in enumerate(_VARIABLES_OF_KERAS)}
            continue_at(self._loss_scale_manager, saved["dynamic_scale"], saved["step_counter"])
        else:
            super().load_own_variables(store)

    @classmethod
    def _from_keras(cls, optimizer: keras.optimizers.LossScaleOptimizer) -> "LossScaleOptimizerKeras3":
        manager = dynamic_manager(nearest_allowed(optimizer.initial_scale), optimizer.dynamic_growth_steps)
        if optimizer.built:
            continue_at(manager, float(optimizer.dynamic_scale.numpy()), int(optimizer.step_counter.numpy()))
        return cls(optimizer.inner_optimizer, manager)

    def _built_with(self, trainable_variables: Iterable[keras.Variable] | None) -> list[keras.Variable]:
        variables = None
        if trainable_variables is not None:
            variables = lists.variables("trainable_variables", trainable_variables)
        if not self.built:
            if variables is None:
                raise ValueError("the optimizer is not built yet: pass trainable_variables, or call build with them.")
            with keras.name_scope(self.name):
                self.build(variables)
        return self._trainable_variables if variables is None else variables

    def _add_state_variable(self, name: str, initial_value: np.generic) -> tf.Variable:
        variable = self.add_variable(
            shape=(),
            dtype=initial_value.dtype.name,
            # Not Keras' Constant, which multiplies: TensorFlow before 2.19 multiplies no bools.
            initializer=lambda *_, **__: tf.constant(initial_value),
            # Every replica computes the same state.
            aggregation="only_first_replica",
            name=name,
        )
        return variable.value

    def _add_buffer(self, name: str, shape: Sequence[int], dtype: tf.DType) -> tf.Variable:
        with variables_of_each_replica():
            return self.add_variable(shape, "zeros", dtype.name, aggregation="sum", name=name).value


#: What Keras' own wrapper holds before the inner optimizer's variables.
_VARIABLES_OF_KERAS = ("iteration", "learning_rate", "step_counter", "dynamic_scale")


def _validate(inner_optimizer: keras.optimizers.Optimizer, accumulation: AccumulationSettings) -> None:
    if keras.backend.backend() != "tensorflow":
        raise ValueError(
            f"tfmp works with the TensorFlow backend of Keras, got {keras.backend.backend()!r}: set "
            "KERAS_BACKEND=tensorflow before Keras is imported."
        )
    validate_inner_optimizer(keras, inner_optimizer)
    own_steps = [
        steps for optimizer in _inner_optimizers(inner_optimizer) if (steps := optimizer.gradient_accumulation_steps)
    ]
    if own_steps and accumulation.accumulation_steps > 1:
        raise ValueError(
            f"inner_optimizer has gradient_accumulation_steps={own_steps[0]!r}, and accumulation_steps="
            f"{accumulation.accumulation_steps!r}: gradients would be accumulated twice. Leave out the former."
        )


def _inner_optimizers(inner_optimizer: keras.optimizers.Optimizer) -> list[keras.optimizers.Optimizer]:
    # A MultiOptimizer leaves the step to those inside it.
    return [inner_optimizer, *getattr(inner_optimizer, "optimizers", [])]


def _turn_loss_scale_factor_off(inner_optimizer: keras.optimizers.Optimizer) -> None:
    """Let nothing but the wrapper scale the loss, as Keras' own wrapper does to what it wraps."""
    for optimizer in _inner_optimizers(inner_optimizer):
        if optimizer.loss_scale_factor is not None:
            _logger.warning(
                "loss_scale_factor=%r of the inner optimizer is turned off, for the loss would be scaled twice: leave "
                "it out, and write tfmp.LossScaleOptimizer(optimizer, %r) for a fixed scale.",
                optimizer.loss_scale_factor,
                optimizer.loss_scale_factor,
            )
            optimizer.loss_scale_factor = None
