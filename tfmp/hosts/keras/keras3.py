"""The front-end for Keras 3 optimizers, on the TensorFlow backend."""

import logging
from collections.abc import Iterable, Sequence
from types import MappingProxyType
from typing import Any, NoReturn

import keras
import tensorflow as tf

from tfmp.any_keras.internals import built_with
from tfmp.core import lists, settings
from tfmp.core.accumulation import AccumulationSettings
from tfmp.core.adapter import is_overwritten, names_of
from tfmp.core.distribute.horovod_detection import running_horovod
from tfmp.core.managers import ExponentialUpdateLossScaleManager
from tfmp.core.tracing import outside_of_functions, without_autograph
from tfmp.hosts.base import of_inner
from tfmp.hosts.keras.adapters import Keras3Adapter
from tfmp.hosts.keras.arguments import warn_of_methods_never_called
from tfmp.hosts.keras.base import Initializer, LossScaleOptimizerKeras
from tfmp.hosts.keras.files import StateInFiles, register_own_classes
from tfmp.hosts.keras.program import with_inner
from tfmp.types import Gradient, Gradients, GradsAndVars, Loss

_logger = logging.getLogger("tfmp")

register_own_classes(keras)


#: The weights of Keras' float8 layers that hold the sizes of scaled gradients; only their names tell them from others.
_FLOAT8_SIZES_OF_GRADIENTS = ("outputs_grad_scale", "outputs_grad_amax_history")


class _StateInFiles(StateInFiles, keras.losses.Loss):
    pass


@keras.saving.register_keras_serializable(package="tfmp", name="LossScaleOptimizer")
class LossScaleOptimizerKeras3(LossScaleOptimizerKeras, keras.optimizers.LossScaleOptimizer):
    """The `tfmp.LossScaleOptimizer` around a Keras 3 optimizer, where the arguments are documented.

    What differs for Keras 3:

    * Under a `tf.distribute` strategy this class checks the gradients of all replicas, and Keras' own wrapper those of
      the first. The update is never compiled by itself there.
    * The gradient accumulation of the inner optimizer cannot be combined with `accumulation_steps` greater than 1.
    * `dynamic` must be True, the only value that Keras' own wrapper takes too.

    Examples:
        >>> import keras, tfmp
        >>> w, opt = keras.Variable([1.0, 2.0]), tfmp.LossScaleOptimizer(keras.optimizers.SGD(0.5), initial_scale=1024)
        >>> for factor in (1.0, float("inf")):
        ...     with tf.GradientTape() as tape:
        ...         loss = opt.scale_loss(tf.reduce_sum(w.value) * factor)
        ...     opt.apply(tape.gradient(loss, [w.value]), [w])
        ...     print(w.numpy(), float(opt.loss_scale), int(opt.iterations))
        [0.5 1.5] 1024.0 1
        [0.5 1.5] 512.0 1

    Source: `keras.optimizers.LossScaleOptimizer`, whose interface this class keeps.
    """

    _keras = keras
    _unscales_by_default = True
    _state_in_files = _StateInFiles
    _saved_by_keras = ("iteration", "learning_rate", "step_counter", "dynamic_scale")
    _settings_of_every_optimizer = MappingProxyType(
        {
            **LossScaleOptimizerKeras._settings_of_every_optimizer,
            "gradient_accumulation_steps": None,
            "loss_scale_factor": None,
        }
    )

    def __init__(
        self,
        *arguments: Any,  # noqa: ANN401 - as of the base class
        dynamic: bool = True,
        name: str | None = None,
        **settings: Any,  # noqa: ANN401 - as of the base class
    ) -> None:
        _validate(dynamic)
        # The constructor of Keras' own wrapper would make variables for a scale. This learning rate is never used.
        keras.optimizers.Optimizer.__init__(self, learning_rate=0.0, name=name)
        super().__init__(*arguments, **settings)
        warn_of_methods_never_called(self.inner_optimizer, ("minimize", "compute_gradients", "scale_loss"))
        # This changes the user's optimizer, as Keras' own wrapper does; last, in case the constructor raises an error.
        _turn_loss_scale_factor_off(self.inner_optimizer)

    def _wrap(self, inner_optimizer: keras.optimizers.Optimizer, accumulation: AccumulationSettings) -> None:
        _refuse_accumulating_twice(inner_optimizer, accumulation)
        self.inner_optimizer = inner_optimizer

    @property
    def iterations(self) -> keras.Variable:
        """The inner optimizer's count of applied steps."""
        # Before Keras 3.9, Keras' own wrapper has a count of its own.
        return self.inner_optimizer.iterations

    #: The optimizers inside a `MultiOptimizer` that is wrapped; Keras' callbacks set their learning rates.
    optimizers = of_inner("optimizers")

    @property
    def dynamic_scale(self) -> keras.Variable | tf.Tensor:
        """As in Keras' own wrapper: the variable that holds the loss scale, whose `assign` sets the scale.

        If the manager's scale cannot be set, this is a tensor, and setting it raises a `NotImplementedError`.
        """
        holds = isinstance(self._loss_scale_manager, ExponentialUpdateLossScaleManager)
        return self._loss_scale_state.by_name()["loss_scale"] if holds else self.loss_scale

    @dynamic_scale.setter
    def dynamic_scale(self, loss_scale: float | tf.Tensor) -> None:
        self._loss_scale_manager.set_loss_scale(loss_scale)

    @property
    def step_counter(self) -> keras.Variable:
        """As in Keras' own wrapper: the variable that counts the finite steps since the scale changed, if one does."""
        counted = self._loss_scale_state.by_name().get("good_steps")
        if counted is None:
            raise AttributeError(
                f"a {type(self._loss_scale_manager).__name__} does not count the finite steps since the scale changed: "
                "read applied_steps, or the loss-scale manager."
            )
        return counted

    def _build_optimizers(self, variables: Sequence[keras.Variable]) -> None:
        super()._build_optimizers(variables)
        keras.optimizers.Optimizer.build(self, variables)

    def compute_gradients(
        self, loss: Loss, var_list: Iterable[keras.Variable], tape: tf.GradientTape | None = None
    ) -> list[tuple[Gradient, keras.Variable]]:
        """As in `tfmp.LossScaleOptimizer`; a method that Keras 3's own optimizers do not have."""
        variables = lists.variables("var_list", var_list)
        grads = self._scaled_gradients(loss, variables, tape)
        lists.refuse_complex(grads, names_of(variables))
        return list(zip(self.get_unscaled_gradients(grads), variables, strict=True))

    def minimize(self, loss: Loss, var_list: Iterable[keras.Variable], tape: tf.GradientTape | None = None) -> None:
        """As in `tfmp.LossScaleOptimizer`; a method that Keras 3's own optimizers do not have."""
        variables = lists.variables("var_list", var_list)
        self.apply_gradients(zip(self._scaled_gradients(loss, variables, tape), variables, strict=True))

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
        """Not available: the manager decides the loss scale. Read `loss_scale`."""
        # Not None: AutoTrackable calls no setter with the value that is there, and the one below must refuse None too.
        raise AttributeError("a tfmp.LossScaleOptimizer has no loss_scale_factor: read its loss_scale.")

    @loss_scale_factor.setter
    def loss_scale_factor(self, factor: float | None) -> None:
        # The base class sets this before there is an inner optimizer; from Keras 3.10 on, Keras' own wrapper too.
        if "inner_optimizer" in vars(self):
            raise ValueError(
                "a tfmp.LossScaleOptimizer takes no loss_scale_factor, and Keras' own LossScaleOptimizer cannot wrap "
                "it: the loss would be scaled twice. Use it as it is."
            )

    @without_autograph
    def apply(self, grads: Iterable[Gradient], trainable_variables: Iterable[keras.Variable] | None = None) -> None:
        """As in `tfmp.LossScaleOptimizer`.

        Raises:
            ValueError: Also if `get_unscaled_gradients` was called for a model in float8, whose scales it would divide.
            NotImplementedError: Also if is_distributed=True and Horovod runs several processes.
        """
        self._apply("apply", lists.gradients(grads), trainable_variables)

    def _apply(self, method: str, grads: Gradients, trainable_variables: Iterable[keras.Variable] | None) -> None:
        """Apply gradients by the method of the inner optimizer that the user would call without a wrapper."""
        if not grads:
            # As in Keras: a model may have no weights.
            return
        variables = self._built_with(trainable_variables)
        self._scaler.warn_if_not_averaged()
        horovod = running_horovod()
        if self._is_distributed and horovod is not None and horovod.size() > 1:
            raise NotImplementedError(
                "Horovod is supported for optimizers of Keras 2.15 and TF1, not for those of Keras 3: distribute the "
                "training by tf.distribute.MultiWorkerMirroredStrategy."
            )
        lists.refuse_other_number(grads, variables)
        lists.refuse_complex(grads, names_of(variables))
        if self._loop.last_call == "get_unscaled_gradients":
            _refuse_divided_next_values(variables)
        lists.refuse_all_none(grads)
        programs, facts = self._programs.of(self.inner_optimizer), self._scaler.facts()
        adapter = Keras3Adapter(
            self.inner_optimizer, variables, leaves_out_none=False, programs=programs, method=method
        )
        self._take_step_of_loop(adapter, grads, facts)
        self._adjust_float8_scales(variables, before=facts.loss_scale)

    def _adjust_float8_scales(self, variables: Iterable[keras.Variable], before: tf.Tensor) -> None:
        """Change the sizes of scaled gradients as the loss scale has changed: Keras learns them two steps too late."""
        scales = [each for each in variables if is_overwritten(each) and each.name in _FLOAT8_SIZES_OF_GRADIENTS]
        if scales:
            ratio = tf.cast(self.loss_scale, tf.float32) / tf.cast(before, tf.float32)
            for scale in scales:
                scale.assign(scale * ratio)

    @without_autograph
    def apply_gradients(self, grads_and_vars: GradsAndVars) -> keras.Variable:
        """As in `tfmp.LossScaleOptimizer`: `apply`, with gradients and variables in pairs."""
        pairs = lists.pairs(grads_and_vars)
        grads, variables = [grad for grad, _ in pairs], [variable for _, variable in pairs]
        if type(self).apply is LossScaleOptimizerKeras3.apply:
            self._apply("apply_gradients", grads, variables)
        else:
            # A subclass overrides `apply`, which Keras' own `apply_gradients` calls.
            self.apply(grads, variables)
        return self.iterations

    def stateless_apply(self, *args: Any, **kwargs: Any) -> NoReturn:  # noqa: ANN401 - whatever it is given
        """Not available: `stateless_apply` is for backends without variables. Call `apply`."""
        raise NotImplementedError("stateless_apply is not for the TensorFlow backend: call apply.")

    def _built_with(self, trainable_variables: Iterable[keras.Variable] | None) -> list[keras.Variable]:
        given = trainable_variables
        variables = None if given is None else lists.variables("trainable_variables", given)
        if not self.built:
            if variables is None:
                raise ValueError("the optimizer is not built yet: pass trainable_variables, or call build with them.")

            def build() -> None:
                with keras.name_scope(self.name):
                    self.build(variables)

            outside_of_functions(build)
        return list(built_with(self)) if variables is None else variables

    def _add(
        self, name: str, shape: Sequence[int], dtype: str, initializer: Initializer, aggregation: str
    ) -> tf.Variable:
        return self.add_variable(shape, initializer, dtype, aggregation=aggregation, name=name).value


def _validate(dynamic: bool) -> None:
    if keras.backend.backend() != "tensorflow":
        raise ValueError(
            f"tfmp works with the TensorFlow backend of Keras, got {keras.backend.backend()!r}: set "
            "KERAS_BACKEND=tensorflow before Keras is imported."
        )
    if not settings.flag("dynamic", dynamic):
        raise ValueError(
            "dynamic=False is an argument of Keras 2's wrapper: write tfmp.LossScaleOptimizer(optimizer, "
            "tfmp.FixedLossScaleManager(scale)) for a fixed scale. (Without a wrapper, set `loss_scale_factor` of the "
            "optimizer.)"
        )


def _refuse_accumulating_twice(inner_optimizer: keras.optimizers.Optimizer, accumulation: AccumulationSettings) -> None:
    own_steps = [steps for optimizer in with_inner(inner_optimizer) if (steps := optimizer.gradient_accumulation_steps)]
    if own_steps and accumulation.accumulation_steps > 1:
        raise ValueError(
            f"inner_optimizer has gradient_accumulation_steps={own_steps[0]!r}, and accumulation_steps="
            f"{accumulation.accumulation_steps!r}: gradients would be accumulated twice. Leave out the former."
        )


def _refuse_divided_next_values(variables: Iterable[keras.Variable]) -> None:
    """Raise `ValueError` if a variable is a scale of float8; for gradients that the user has unscaled."""
    names = names_of(filter(is_overwritten, variables))
    if names:
        raise ValueError(
            f"the gradients of {', '.join(names)} are the next values of these scales of float8, and "
            "get_unscaled_gradients divided them by the loss scale: call scale_loss, and pass its gradients on as they "
            "are. The inner optimizer can clip them."
        )


def _turn_loss_scale_factor_off(inner_optimizer: keras.optimizers.Optimizer) -> None:
    """Set `loss_scale_factor` of the inner optimizer to None, with a warning: only the wrapper scales."""
    for optimizer in with_inner(inner_optimizer):
        if optimizer.loss_scale_factor is not None:
            _logger.warning(
                "loss_scale_factor=%r of the inner optimizer is turned off, because the loss would be scaled twice: "
                "leave it out, and write tfmp.LossScaleOptimizer(optimizer, tfmp.FixedLossScaleManager(%r)) for a "
                "fixed scale.",
                optimizer.loss_scale_factor,
                optimizer.loss_scale_factor,
            )
            optimizer.loss_scale_factor = None
