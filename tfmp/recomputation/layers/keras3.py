"""Recompute for layers and models of Keras 3."""

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import keras
import tensorflow as tf

from tfmp.any_keras.internals import mask_of, set_mask
from tfmp.core.tensorflow_internals import gradients_may_be_recorded, unrecorded
from tfmp.recomputation.gradient import recomputed_results
from tfmp.recomputation.layers import layer as front_door
from tfmp.recomputation.layers.arguments import masked, with_training
from tfmp.recomputation.layers.keras3_scope import NotingScope
from tfmp.recomputation.stateful_ops import refuse_state
from tfmp.recomputation.structure import is_differentiable

#: What a layer takes and returns: nests of tensors, and anything else.
_Any: TypeAlias = Any


@keras.saving.register_keras_serializable(package="tfmp", name="Recompute")
class Recompute(front_door.Recompute, keras.layers.Wrapper):
    """`tfmp.Recompute` for Keras 3.

    The layer is called as a pure function of its inputs and of the values of its variables, in a
    `keras.StatelessScope`. The second call gets the values that the variables had before the first one. The updates of
    the first call, such as moving statistics and the next seeds, are assigned afterwards; those of the second call are
    dropped. This holds for every variable of Keras that the call uses, whether the layer owns it or not.
    """

    _signature: inspect.Signature

    def __init__(self, layer: keras.layers.Layer, *, name: str | None = None, trainable: bool = True) -> None:
        # Before the constructor of the base class, which asks for the signature of `call`; and not by Keras' own
        # `__setattr__`, which that constructor prepares.
        object.__setattr__(self, "_signature", with_training(inspect.signature(layer.call)))
        # Nothing is cast here, neither inputs nor the values of variables: the layer does that itself.
        keras.layers.Wrapper.__init__(
            self, layer, name=name or layer.name, trainable=trainable, dtype="float32", autocast=False
        )
        self.supports_masking = layer.supports_masking
        # The values of `training` with which eager code has called the layer.
        self._inspected: frozenset[str] = frozenset()

    def get_config(self) -> dict[str, Any]:
        """Return the arguments of the constructor, for Keras to save."""
        config = super().get_config()
        return {key: config[key] for key in ("layer", "name", "trainable")}

    def __call__(self, *args: _Any, **kwargs: _Any) -> _Any:
        """Call the layer; on the first call, build it."""
        if not self.layer.built:
            self._build(args, kwargs)
        return super().__call__(*args, **kwargs)

    def _build(self, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        """Build the layer by a call, as Keras does too if a layer has no `build`.

        This is done outside of the name scope of this layer, so that the paths of the variables are the same as without
        recomputation.
        """
        if any(isinstance(each, keras.KerasTensor) for each in keras.tree.flatten([args, kwargs])):
            self._call_symbolically(args, kwargs)
        else:
            # This call changes no state, because the scope drops the updates.
            with keras.StatelessScope():
                self.layer(*args, **kwargs)

    @property
    def call(self) -> Callable[..., Any]:
        """The function that Keras calls; its signature is that of the layer's `call`."""
        bound: Any = functools.partial(self._call_layer)
        bound.__signature__ = self._signature
        return bound

    def _call_layer(self, *args: _Any, **kwargs: _Any) -> _Any:
        if tf.executing_eagerly() and not gradients_may_be_recorded():
            return self.layer(*args, **kwargs)
        call = _LayerCall(self.layer, args, kwargs)
        if tf.executing_eagerly() and (kind := repr(kwargs.get("training"))) not in self._inspected:
            call.refuse_state_of_trace()
            self._inspected |= {kind}
        return call.run(self)

    @property
    def stateful(self) -> bool:
        """Whether the layer is a recurrent one that goes on with the states of the last batch."""
        return bool(getattr(self.layer, "stateful", False))

    def reset_state(self) -> None:
        """Set the states of a stateful recurrent layer back."""
        if self.stateful:
            self.layer.reset_state()

    def reset_states(self) -> None:
        """Set the states of a stateful recurrent layer back, by the name that the method has in Keras 2."""
        self.reset_state()

    def compute_output_spec(self, *args: _Any, **kwargs: _Any) -> _Any:
        """Return what the layer returns for symbolic tensors."""
        # Not the `compute_output_spec` of the layer: it knows nothing of what Keras does around a call, such as casting
        # the inputs and the variables. Masks of the results belong to the symbolic tensors of that call: Keras computes
        # them again for those of the user's model.
        return keras.tree.map_structure(_symbolic, self._call_symbolically(args, kwargs))

    def _call_symbolically(self, args: Sequence[Any], kwargs: dict[str, Any]) -> _Any:
        # New symbolic tensors, so that the call is not taken for a part of the user's model.
        args, kwargs = keras.tree.map_structure(_symbolic_with_mask, (args, kwargs))
        if not _takes_training(self.layer):
            kwargs.pop("training", None)
        return self.layer(*args, **kwargs)

    def compute_output_shape(self, *args: _Any, **kwargs: _Any) -> _Any:
        """Return the shape of what the layer returns."""
        return self.layer.compute_output_shape(*args, **kwargs)

    # Two internal methods: TensorFlow has no public way to name the children of an object in a checkpoint. This layer
    # stands for the layer inside, so that a tf.train.Checkpoint of a model fits it with recomputation and without.

    def _trackable_children(self, save_type: str = "checkpoint", **kwargs: _Any) -> dict[str, Any]:
        owner: Any = self.layer if save_type == "checkpoint" else super()
        children: dict[str, Any] = owner._trackable_children(save_type, **kwargs)
        return children

    def _lookup_dependency(self, name: str, *args: _Any) -> _Any:
        # In the constructor there is no layer yet.
        owner: Any = vars(self).get("layer", super())
        return owner._lookup_dependency(name, *args)

    def compute_mask(self, inputs: _Any, previous_mask: _Any) -> _Any:
        """Return the mask of the layer's results."""
        return self.layer.compute_mask(inputs, previous_mask)


class _LayerResults(NamedTuple):
    """What a call of the layer returned and changed."""

    #: The flat results; some may be None, or of an integer type.
    outputs: Sequence[Any]
    #: The results as the layer returned them, for their structure.
    structure: Any
    #: What the layer added by `add_loss`.
    losses: Sequence[tf.Tensor]
    #: The variables that were assigned to, each with its new value.
    updates: Sequence[tuple[keras.Variable, tf.Tensor]]
    #: The variables that were used and are not the layer's own.
    borrowed: Sequence[keras.Variable]

    @property
    def tensors(self) -> list[tf.Tensor]:
        return [*filter(is_differentiable, self.outputs), *self.losses]

    def with_tensors(self, values: Sequence[tf.Tensor]) -> "_LayerResults":
        remaining = iter(values)
        outputs = [masked(next(remaining), output) if is_differentiable(output) else output for output in self.outputs]
        return self._replace(outputs=outputs, losses=list(remaining))


class _LayerCall:
    """One call of a layer, which can be repeated."""

    def __init__(self, layer: keras.layers.Layer, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        self._layer = layer
        self._arguments = (args, kwargs)
        self._flat = tf.nest.flatten(self._arguments)
        variables = {id(variable): variable for variable in [*layer.variables, *layer.metrics_variables]}.values()
        # Not `trainable_variables`, which is empty if `layer.trainable` is False: Keras trains all variables of a model
        # that are trainable themselves.
        self._trained = [variable for variable in variables if variable.trainable]
        self._values_before = [(variable, _value(variable)) for variable in variables if not variable.trainable]

    def run(self, wrapper: keras.layers.Layer) -> _Any:
        """Call the layer, apply its updates, and return its results. The wrapper counts the losses that are added."""

        def second_call(tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
            return self._call_with(tensors).tensors

        num_before = len(_ops_of_graph())
        results, values = recomputed_results(self._call_with, second_call, self._inputs())
        refuse_state(_ops_of_graph()[num_before:], f"the layer {self._layer.name!r}")
        self._refuse_changed_weights(results)
        results = results.with_tensors(values)
        # Nothing is assigned yet. Gradients of a variable that is trained are those of the variable itself.
        self._values_before += [(variable, _value(variable)) for variable in results.borrowed if not variable.trainable]
        for variable, value in results.updates:
            variable.assign(value)
        for loss in results.losses:
            wrapper.add_loss(loss)
        return tf.nest.pack_sequence_as(results.structure, results.outputs)

    def _refuse_changed_weights(self, results: _LayerResults) -> None:
        changed = [variable.path for variable, _ in results.updates if variable.trainable]
        if changed:
            raise ValueError(
                f"the layer {self._layer.name!r} cannot be recomputed: its call assigns to weights that are trained "
                f"({', '.join(changed)}), so that the second call would start from other weights. "
                "Leave the layer that does so outside of tfmp.Recompute."
            )

    def refuse_state_of_trace(self) -> None:
        """Trace the call only to look at its ops, which eager code does not show.

        State that is not in a variable of Keras is refused, and so is a layer that cannot be traced.
        """
        inputs = self._inputs()
        try:
            traced = tf.function(lambda: self._call_with(inputs).tensors).get_concrete_function()
        except Exception as error:
            raise ValueError(
                f"the layer {self._layer.name!r} cannot be recomputed, because tf.function cannot trace it, so that "
                f"nobody knows whether it computes the same twice: {error}"
            ) from error
        refuse_state(traced.graph.get_operations(), f"the layer {self._layer.name!r}")

    def _inputs(self) -> list[tf.Tensor]:
        weights = (tf.convert_to_tensor(variable.value) for variable in self._trained)
        return [*weights, *filter(is_differentiable, self._flat)]

    def _call_with(self, tensors: Sequence[tf.Tensor]) -> _LayerResults:
        weights, inputs = tensors[: len(self._trained)], iter(tensors[len(self._trained) :])
        flat = [masked(next(inputs), argument) if is_differentiable(argument) else argument for argument in self._flat]
        args, kwargs = tf.nest.pack_sequence_as(self._arguments, flat)
        state = [*zip(self._trained, weights, strict=True), *self._values_before]
        with NotingScope(state) as scope:
            structure = _call_with_training(self._layer, args, kwargs)
        return _LayerResults(
            tf.nest.flatten(structure), structure, scope.losses, scope.updates, list(scope.borrowed.values())
        )


class _TrainingContext(keras.layers.Layer):
    """Makes a call in which Keras hands `training` down to the layers that take it."""

    def call(self, function: Callable[[], object], training: bool | None = None) -> object:
        """Return what the function returns."""
        return function()


def _call_with_training(layer: keras.layers.Layer, args: Sequence[Any], kwargs: dict[str, Any]) -> _Any:
    if _takes_training(layer):
        return layer(*args, **kwargs)
    training = kwargs.pop("training", None)
    context = _TrainingContext(name="training", dtype="float32", autocast=False)
    return context(function=lambda: layer(*args, **kwargs), training=training)


def _takes_training(layer: keras.layers.Layer) -> bool:
    return "training" in inspect.signature(layer.call).parameters


def _symbolic(value: _Any) -> _Any:
    if not isinstance(value, keras.KerasTensor):
        return value
    # Older versions of Keras do not know ragged tensors.
    kind = {name: True for name in ("sparse", "ragged") if getattr(value, name, False)}
    return keras.KerasTensor(value.shape, value.dtype, **kind)


def _symbolic_with_mask(value: _Any) -> _Any:
    mask = mask_of(value)
    symbolic = _symbolic(value)
    if mask is not None:
        set_mask(symbolic, _symbolic(mask))
    return symbolic


def _value(variable: keras.Variable) -> tf.Tensor:
    # A constant of the call. TensorFlow's tapes watch also weights that Keras does not train.
    with unrecorded():
        return tf.convert_to_tensor(variable.value)


def _ops_of_graph() -> list[tf.Operation]:
    return [] if tf.executing_eagerly() else tf.compat.v1.get_default_graph().get_operations()
