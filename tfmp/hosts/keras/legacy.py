"""The base class of the front-ends for legacy optimizers, and what makes the front-ends for each Keras 2."""

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import ModuleType
from typing import Any, NoReturn, TypeAlias

import numpy as np
import tensorflow as tf

from tfmp.any_keras.internals import class_of_legacy_wrappers, initialize_with_session
from tfmp.core import lists
from tfmp.core.accumulation import AccumulationSettings
from tfmp.core.adapter import names_of
from tfmp.core.tracing import without_autograph
from tfmp.hosts.base import LossScaleOptimizer, of_inner
from tfmp.hosts.keras.adapters import LegacyAdapter
from tfmp.hosts.keras.arguments import parts_of_config
from tfmp.hosts.keras.base import split
from tfmp.hosts.keras.checkpoints import ScaleOfKeras
from tfmp.hosts.keras.files import StateInFiles, register_own_classes
from tfmp.hosts.keras.keras2 import LossScaleOptimizerKeras2, OfKeras2
from tfmp.types import Gradient, GradsAndVars, Loss

#: The variables to train, or a function that returns them.
_VarList: TypeAlias = Any
#: What a legacy optimizer is asked for, and only the inner one has.
_OF_INNER = (
    *("lr", "clipnorm", "global_clipnorm", "clipvalue", "weights", "variables", "get_weights"),
    *("get_slot_names", "get_slot", "add_slot", "_get_hyper", "_set_hyper", "_aggregate_gradients"),
    # TensorFlow's checkpoints restore slots by these private methods, and Keras' own code calls the third.
    *("_restore_slot_variable", "_create_or_restore_slot_variable", "_create_all_weights"),
)
#: The methods by which classes of Keras decide what attributes an object has.
_ATTRIBUTES = ("__getattribute__", "__setattr__", "__dir__")


class LossScaleOptimizerLegacy(OfKeras2):
    """The `tfmp.LossScaleOptimizer` around a legacy optimizer of Keras 2, where the arguments are documented.

    A subclass adds the base classes of `keras` or of `tf_keras`. It works eagerly, in a `tf.function`, and in the
    graphs that Estimator builds. What differs for legacy optimizers:

    * Hyperparameters are those of the inner optimizer: `opt.beta_1 = 0.5` sets its `beta_1`.
    * `weights`, `get_weights` and files in Keras' formats hold the inner optimizer alone, as with Keras' own wrapper. A
      `tf.train.Checkpoint` also holds the loss scale.

    Source: `tf.keras.mixed_precision.LossScaleOptimizer`, whose interface this class keeps.
    """

    _is_legacy = True
    # Tells Keras that `apply_gradients` has the argument `experimental_aggregate_gradients`.
    _HAS_AGGREGATE_GRAD = True
    # This comes from TensorFlow.
    _track_trackable: Callable[..., Any]

    def _wrap(self, inner_optimizer: Any, accumulation: AccumulationSettings) -> None:  # noqa: ANN401
        del accumulation
        # In a checkpoint, the wrapper is what the inner optimizer is.
        tf.__internal__.tracking.DelegatingTrackableMixin.__init__(self, inner_optimizer)
        self._inner_optimizer = inner_optimizer

    def _set_up(self, *arguments: Any) -> None:  # noqa: ANN401 - as of the base class
        super()._set_up(*arguments)
        in_checkpoints = {
            # Keras' own wrapper saves this. It is restored before the manager, whose own state then decides.
            "loss_scale": ScaleOfKeras(self._loss_scale_manager),
            "loss_scale_manager": self._loss_scale_manager,
            "accumulation": self._accumulators.saved,
            "overflow_counts": self._scaler.overflow_counts,
            "norms": self._scaler.norms,
            **({} if self.spike_detector is None else {"spike_detector": self.spike_detector}),
        }
        for name, part in in_checkpoints.items():
            self._track_trackable(part, name, overwrite=True)

    @property
    def _hyper(self) -> dict[str, Any]:
        # Keras looks for any missing attribute here, also before there is an inner optimizer.
        inner = vars(self).get("_inner_optimizer")
        return {} if inner is None else inner._hyper

    def set_weights(self, weights: Iterable[np.ndarray]) -> None:
        """Set the values of the inner optimizer's variables."""
        self.inner_optimizer.set_weights(list(weights))

    def _create_hypers(self) -> NoReturn:
        # Only an optimizer around the wrapper calls this, such as Addons' Lookahead, which updates single variables.
        inner = f"{type(self.inner_optimizer).__name__}(...)"
        raise ValueError(
            "tfmp.LossScaleOptimizer must be the outermost wrapper, because the optimizer around it updates each "
            "variable without asking whether the step is skipped: write, for example, "
            f"tfmp.LossScaleOptimizer(Lookahead({inner})), not Lookahead(tfmp.LossScaleOptimizer({inner}))."
        )

    def _compute_gradients(
        self, loss: Loss, var_list: _VarList, grad_loss: tf.Tensor | None = None, tape: tf.GradientTape | None = None
    ) -> list[tuple[Gradient, tf.Variable]]:
        tape = tape or tf.GradientTape()
        with tape:
            scaled = self.get_scaled_loss(loss)
        return self._unscaled(self.inner_optimizer._compute_gradients(scaled, var_list, grad_loss, tape=tape))

    def compute_gradients(
        self, loss: Loss, var_list: _VarList, tape: tf.GradientTape | None = None
    ) -> list[tuple[Gradient, tf.Variable]]:
        """As in `tfmp.LossScaleOptimizer`; legacy optimizers themselves have this method under a private name."""
        return self._compute_gradients(loss, var_list, tape=tape)

    def minimize(
        self,
        loss: Loss,
        var_list: _VarList,
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

    @without_autograph
    def apply_gradients(
        self,
        grads_and_vars: GradsAndVars,
        name: str | None = None,
        experimental_aggregate_gradients: bool = True,
        **kwargs: Any,  # noqa: ANN401 - of the inner optimizer
    ) -> Any:  # noqa: ANN401 - an op, or `iterations`
        """As in `tfmp.LossScaleOptimizer`; the inner optimizer sums the gradients over the replicas.

        Args:
            grads_and_vars: Pairs of a gradient and its variable.
            name: The name scope of the inner optimizer's ops.
            experimental_aggregate_gradients: False if the gradients are already summed, and averaged over workers.
            **kwargs: Further arguments of the inner optimizer's `apply_gradients`.
        """
        pairs = lists.pairs(grads_and_vars)
        if not pairs:
            # As in Keras: a model may have no weights.
            return self.iterations
        grads, variables = split(pairs)
        lists.refuse_all_none(grads, names_of(variables))
        facts = self._scaler.facts()
        is_reduced = not experimental_aggregate_gradients
        is_averaged = self._is_averaged(is_reduced)
        adapter = LegacyAdapter(
            self.inner_optimizer,
            variables,
            kwargs if name is None else {"name": name, **kwargs},
            average=None if is_averaged else self._average_over_workers(variables, facts.distribution),
            is_summed=is_reduced,
            counts_skipped_steps=self._iterations_include_skipped_steps,
        )
        adapter.prepare([variable for grad, variable in pairs if grad is not None])
        done = self._take_step_of_loop(adapter, grads, facts)
        # Where Keras trains in a graph, it initializes the variables that it made, and those that it is told of.
        initialize_with_session(self._keras, self._state_in_graph())
        return self.iterations if tf.executing_eagerly() else done

    def _settings_to_show(self) -> list[str]:
        # Keras shows this in its error if the model is of the other package.
        kind, *others = super()._settings_to_show()
        return [f"{kind} of {self._keras.__name__}", *others]

    @classmethod
    def from_config(
        cls, config: Mapping[str, Any], custom_objects: Mapping[str, Any] | None = None
    ) -> "LossScaleOptimizer":
        """As in `tfmp.LossScaleOptimizer`."""
        parts = parts_of_config(cls._keras, config, custom_objects, legacy=True)
        inner = parts["inner_optimizer"]
        if isinstance(inner, cls._keras.optimizers.Optimizer):
            # `model_to_estimator` makes a legacy optimizer of one that is not.
            parts["inner_optimizer"] = cls._keras.__internal__.optimizers.convert_to_legacy_optimizer(inner)
            parts.pop("name", None)
        return super().from_config(parts)

    @classmethod
    def _from_keras(cls, optimizer: Any) -> "LossScaleOptimizer":  # noqa: ANN401 - of either package
        # Keras' own wrapper marks the optimizer in it, and will not be used any more.
        optimizer.inner_optimizer._is_wrapped_by_loss_scale_optimizer = False
        return super()._from_keras(optimizer)


for _name in _OF_INNER:
    setattr(LossScaleOptimizerLegacy, _name, of_inner(_name))


def front_ends_of(keras: ModuleType, module: str, suffix: str) -> tuple[type[LossScaleOptimizer], ...]:
    """Make the two front-ends for a package that Keras 2 comes in, and register them there, so that saved models load.

    The second is for legacy optimizers. Saved models hold the names of the classes, and of the `module` of both.
    """
    register_own_classes(keras)
    public = keras.mixed_precision.LossScaleOptimizer
    own = {"__module__": module, "_keras": keras}
    state_in_files = type("_StateInFiles", (StateInFiles, keras.losses.Loss), {})
    bases = (LossScaleOptimizerKeras2, keras.optimizers.Optimizer, public)
    front_end = type(f"LossScaleOptimizer{suffix}", bases, {**own, "_state_in_files": state_in_files})
    # In a graph, Keras wraps every optimizer that is not of its own wrapper's class, whose methods for attributes look
    # at the optimizer that its own constructor wraps: so they are replaced.
    own |= {each: getattr(keras.optimizers.legacy.Optimizer, each) for each in _ATTRIBUTES}
    of_legacy = (LossScaleOptimizerLegacy, class_of_legacy_wrappers(keras))
    legacy = type(public)(f"LossScaleOptimizerLegacy{suffix}", of_legacy, own)
    # The name that `model_to_estimator` looks up, for the legacy front-end that it makes of the other one.
    keras.utils.get_custom_objects()[front_end.__name__.lower()] = legacy
    register = functools.partial(keras.saving.register_keras_serializable, "tfmp")
    return register("LossScaleOptimizer")(front_end), register("LegacyLossScaleOptimizer")(legacy)
