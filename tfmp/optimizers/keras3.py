"""The front-end for Keras 3 optimizers, on the TensorFlow backend."""

from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

import keras
import numpy as np
import tensorflow as tf

from tfmp.core import numerics
from tfmp.core.managers import ExponentialUpdateLossScaleManager, FixedLossScaleManager, LossScaleManager
from tfmp.core.overflow import OverflowDetector
from tfmp.core.scaler import LossScaler
from tfmp.optimizers.base import LossScaleOptimizer, validated_detector, validated_manager
from tfmp.types import Gradient, Gradients

# What a saved model names. A manager of the user's own is registered by its author.
for _manager in (FixedLossScaleManager, ExponentialUpdateLossScaleManager):
    keras.saving.register_keras_serializable(package="tfmp")(_manager)


@keras.saving.register_keras_serializable(package="tfmp", name="LossScaleOptimizer")
class LossScaleOptimizerKeras3(LossScaleOptimizer, keras.optimizers.LossScaleOptimizer):
    """The `tfmp.LossScaleOptimizer` around a Keras 3 optimizer.

    `tfmp.LossScaleOptimizer(inner_optimizer, manager)` makes one. It takes the place of Keras' own, which decides by
    the first replica's gradients alone and lets an overflow on any other into the weights: `compile` leaves it as it is
    under `mixed_float16`, `fit` scales the loss by it.

    Args:
        inner_optimizer: The optimizer to wrap. Clipping, weight decay, EMA and gradient accumulation are its own, and
            see unscaled gradients.
        loss_scale_manager: Decides the scale. It keeps its state in the variables of this optimizer, which Keras saves;
            so every optimizer needs a manager of its own.
        is_distributed: As in `tfmp.LossScaleOptimizer`.
        overflow_detector: As there. It is not saved with a model.
        name: The optimizer's name.

    Raises:
        TypeError: An argument is not of the type asked for.
        ValueError: The inner optimizer scales losses itself; or Keras runs on another backend than TensorFlow.

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

    def __init__(
        self,
        inner_optimizer: keras.optimizers.Optimizer,
        loss_scale_manager: LossScaleManager,
        is_distributed: bool = False,
        *,
        overflow_detector: OverflowDetector | None = None,
        name: str | None = None,
    ) -> None:
        _validate(inner_optimizer)
        # Not the parent's constructor, which sets up a scale of its own. The parent's learning rate is never used.
        keras.optimizers.Optimizer.__init__(self, learning_rate=0.0, name=name)
        self.inner_optimizer = inner_optimizer
        self._loss_scale_manager = validated_manager(loss_scale_manager)
        self._is_distributed = is_distributed
        self._scaler = LossScaler(self._loss_scale_manager, validated_detector(overflow_detector), is_distributed)

    def build(self, var_list: Sequence[keras.Variable]) -> None:
        """Make the variables of the state and of the inner optimizer.

        Args:
            var_list: The variables to train.

        Raises:
            ValueError: The manager keeps its state in another optimizer already.
        """
        self._loss_scale_manager.store_in(self._add_state_variable)
        self.inner_optimizer.build(var_list)
        keras.optimizers.Optimizer.build(self, var_list)

    def scale_loss(self, loss: tf.Tensor) -> tf.Tensor:
        """Multiply a loss by the loss scale, in float32 or float64.

        Args:
            loss: The loss, of a floating-point type.

        Returns:
            The scaled loss, to be differentiated.
        """
        return self._scaler.scale(loss)

    def apply(self, grads: Iterable[Gradient], trainable_variables: Iterable[keras.Variable] | None = None) -> None:
        """Unscale the gradients, and apply them if they are finite on every replica.

        Args:
            grads: The gradients of a scaled loss, one for each variable; None is left out.
            trainable_variables: The variables; by default those that the optimizer was built with.

        Raises:
            ValueError: Every gradient is None; or there are no variables.
            RuntimeError: A strategy is active, and the call is not made on its replicas.
            NotImplementedError: The active strategy is not supported.
        """
        grads = list(grads)
        if not grads:
            # As in Keras: a model without weights trains nothing.
            return
        variables = self._built_with(trainable_variables)
        if all(grad is None for grad in grads):
            raise ValueError("every gradient is None: the loss depends on none of the trainable variables.")
        unscaled = self._unscaled(grads, variables)

        def apply_fn(grads: Gradients) -> tf.Operation:
            self.inner_optimizer.apply(list(grads), variables)
            return tf.no_op()

        self._scaler.step(unscaled, apply_fn)

    def stateless_apply(self, *args: Any, **kwargs: Any) -> NoReturn:  # noqa: ANN401 - whatever it is given
        """Refuse: it is for backends without variables."""
        raise NotImplementedError("stateless_apply is not for the TensorFlow backend: call apply.")

    def exclude_from_weight_decay(
        self, var_list: Sequence[keras.Variable] | None = None, var_names: Sequence[str] | None = None
    ) -> None:
        """Exclude variables from the inner optimizer's weight decay.

        Args:
            var_list: Variables to exclude.
            var_names: Parts of names to exclude.
        """
        self.inner_optimizer.exclude_from_weight_decay(var_list, var_names)

    def get_config(self) -> dict[str, Any]:
        """Return what `from_config` makes the optimizer of again."""
        serialize = keras.saving.serialize_keras_object
        return {
            "name": self.name,
            "inner_optimizer": serialize(self.inner_optimizer),
            "loss_scale_manager": serialize(self._loss_scale_manager),
            "is_distributed": self._is_distributed,
        }

    @classmethod
    def from_config(
        cls, config: dict[str, Any], custom_objects: dict[str, Any] | None = None
    ) -> "LossScaleOptimizerKeras3":
        """Make an optimizer from what `get_config` returned.

        Args:
            config: The configuration.
            custom_objects: Classes that are not registered, by their names.
        """
        parts = {
            name: keras.saving.deserialize_keras_object(config[name], custom_objects=custom_objects)
            for name in ("inner_optimizer", "loss_scale_manager")
        }
        return cls(**{**config, **parts})

    def _built_with(self, trainable_variables: Iterable[keras.Variable] | None) -> list[keras.Variable]:
        variables = None if trainable_variables is None else list(trainable_variables)
        if not self.built:
            if variables is None:
                raise ValueError("the optimizer is not built yet: pass trainable_variables, or call build with them.")
            with keras.name_scope(self.name):
                self.build(variables)
        return self._trainable_variables if variables is None else variables

    def _unscaled(self, grads: Gradients, variables: Sequence[keras.Variable]) -> list[Gradient]:
        return [
            # The "gradient" of such a variable is its next value (float8 scales), and was never scaled.
            grad
            if getattr(variable, "overwrite_with_gradient", False)
            # An unscaled gradient can overflow the type of its variable: then the step must be skipped.
            else numerics.cast(unscaled, tf.as_dtype(variable.dtype))
            for grad, unscaled, variable in zip(grads, self._scaler.unscale(grads), variables, strict=True)
        ]

    def _add_state_variable(self, name: str, initial_value: np.generic) -> tf.Variable:
        variable = self.add_variable(
            shape=(),
            dtype=initial_value.dtype.name,
            initializer=keras.initializers.Constant(initial_value.item()),
            # Every replica computes the same state.
            aggregation="only_first_replica",
            name=name,
        )
        return variable.value


def _validate(inner_optimizer: keras.optimizers.Optimizer) -> None:
    if keras.backend.backend() != "tensorflow":
        raise ValueError(
            f"tfmp works with the TensorFlow backend of Keras, got {keras.backend.backend()!r}: set "
            "KERAS_BACKEND=tensorflow before Keras is imported."
        )
    if isinstance(inner_optimizer, keras.optimizers.LossScaleOptimizer):
        raise ValueError("inner_optimizer is a LossScaleOptimizer already: wrap the optimizer inside it.")
    if not isinstance(inner_optimizer, keras.optimizers.Optimizer):
        raise TypeError(
            f"inner_optimizer must be a keras.optimizers.Optimizer, got {inner_optimizer!r} of type "
            f"{type(inner_optimizer).__name__}."
        )
    if inner_optimizer.loss_scale_factor is not None:
        raise ValueError(
            f"inner_optimizer has loss_scale_factor={inner_optimizer.loss_scale_factor!r}: the loss would be scaled "
            "twice. Leave it out, and pass tfmp.FixedLossScaleManager(factor) for a fixed scale."
        )
