"""The base class of Recompute for layers and models of Keras 2: those of Keras 2.15 and of the package tf_keras."""

import functools
import inspect
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from tfmp.any_keras.internals import added_losses, layer_and_all_within, mask_of, set_mask
from tfmp.core.tensorflow_internals import converted_as_here, gradients_may_be_recorded
from tfmp.core.tracing import without_autograph
from tfmp.recomputation.gradient import recomputed_results
from tfmp.recomputation.layers import layer as front_door
from tfmp.recomputation.layers.arguments import masked, with_training
from tfmp.recomputation.layers.changed_variables import ChangedVariable, ChangedVariables
from tfmp.recomputation.trace import Trace


class RecomputeKeras2(front_door.Recompute):
    """`tfmp.Recompute` for Keras 2.

    `tfmp.Recompute(layer)` returns an object of a subclass, which adds the `Wrapper` of `keras` or of `tf_keras`.

    Variables that a call of the layer changes, such as moving statistics, metrics, and the state of a
    `tf.random.Generator`, get back the values that they had before the first call while the second one runs. Afterwards
    they go on with the values of the first call. Random numbers of ops that keep their own state cannot be drawn again:
    such a layer is refused when it is first called in a way that draws them. A `dynamic` layer is refused when it is
    wrapped.
    """

    # The package of the subclass.
    _keras: Any
    # Keras reads this private attribute: the results of a call have their masks already. Otherwise Keras would call
    # `compute_mask`, which for a model computes the whole model again.
    _compute_output_and_mask_jointly = True

    def __init__(self, layer: Any, *, name: str | None = None, trainable: bool = True) -> None:  # noqa: ANN401 - of either package
        if layer.dynamic:
            raise ValueError(f"the layer {layer.name!r} is dynamic, and cannot be traced to find out what it changes.")
        name = name or layer.name
        # Nothing is cast here, neither inputs nor variables: the layer does that itself.
        self._keras.layers.Wrapper.__init__(
            self, layer, name=name, trainable=trainable, dtype="float32", autocast=False
        )
        self.supports_masking = layer.supports_masking
        self.stateful = layer.stateful
        self._changed = ChangedVariables(name)

    def get_config(self) -> dict[str, Any]:
        """Return the arguments of the constructor, for Keras to save."""
        config = self._keras.layers.Wrapper.get_config(self)
        return {key: config[key] for key in ("layer", "name", "trainable")}

    def build(self, input_shape: object = None) -> None:
        """Do nothing: the layer is built when it is called, under the names that it has without recomputation."""
        self.built = True

    @property
    def weights(self) -> list[tf.Variable]:
        """The layer's weights, in its own order."""
        return self.layer.weights

    @property
    def call(self) -> Callable[..., Any]:
        """The function that Keras calls; its signature is that of the layer's `call`."""
        replaced = vars(self).get("_replaced_call")
        if replaced is not None:
            return replaced
        # Here the code of this package is not converted by AutoGraph, but the layer is, if it would be outside of here.
        function = without_autograph(functools.partial(self._call_layer, converted_as_here(self.layer)))
        function.__signature__ = with_training(inspect.signature(self.layer.call))  # type: ignore[attr-defined]
        function.is_of_recompute = True  # type: ignore[attr-defined]
        return function

    @call.setter
    def call(self, function: Callable[..., Any]) -> None:
        # While Keras writes a SavedModel, it replaces the function of each layer, and then sets what was there before.
        vars(self)["_replaced_call"] = None if hasattr(function, "is_of_recompute") else function

    def _call_layer(self, converted: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        with _outside_of(self.name):
            if tf.executing_eagerly() and not gradients_may_be_recorded():
                return self.layer(*args, **kwargs)
            layer_call = _LayerCall(self.layer, converted, args, kwargs)
            # A frozen layer may do something else: BatchNormalization then leaves its statistics alone.
            frozen = [inner.trainable for inner in layer_and_all_within(self.layer)]
            changed = self._changed.of(
                layer_call.run_in_trace, [*layer_call.flat, *frozen], self._training(args, kwargs)
            )
            return layer_call.run(changed)

    def _training(self, args: Sequence[Any], kwargs: dict[str, Any]) -> object:
        return inspect.signature(self.call).bind(*args, **kwargs).arguments.get("training")

    def reset_states(self) -> None:
        """Set the states of a stateful recurrent layer back, which `Model.reset_states` asks for."""
        self.layer.reset_states()

    def compute_output_shape(self, input_shape: Any) -> Any:  # noqa: ANN401 - shapes may be nested
        """Return the shape of what the layer returns."""
        return self.layer.compute_output_shape(input_shape)

    def compute_mask(self, inputs: Any, mask: Any = None) -> Any:  # noqa: ANN401 - inputs may be nested
        """Return the mask of the layer's results."""
        return self.layer.compute_mask(inputs, mask)

    # Internal methods: TensorFlow has no public way to name the children of an object in a checkpoint. This layer
    # stands for the layer inside, so that a tf.train.Checkpoint of a model fits it with recomputation and without.

    def _trackable_children(self, save_type: str = "checkpoint", **kwargs: Any) -> dict[str, Any]:  # noqa: ANN401
        if save_type == "checkpoint":
            return self.layer._trackable_children(save_type, **kwargs)
        return super()._trackable_children(save_type, **kwargs)  # type: ignore[misc] # of the subclass's base

    def _lookup_dependency(self, name: str, *args: Any) -> Any:  # noqa: ANN401
        # In the constructor there is no layer yet. A SavedModel has this layer's own children.
        layer = vars(self).get("layer")
        dependency = layer and layer._lookup_dependency(name, *args)
        return dependency or super()._lookup_dependency(name, *args)  # type: ignore[misc]


class _LayerCall:
    """One call of a layer, which can be repeated.

    In graphs `converted` is called: the layer, converted by AutoGraph if the code outside is. The keyword arguments
    have `training`, if the layer's own layers take it.
    """

    def __init__(
        self,
        layer: Any,  # noqa: ANN401 - of either package
        converted: Callable[..., Any],
        args: Sequence[Any],
        kwargs: dict[str, Any],
    ) -> None:
        self._layer = layer
        self._converted = converted
        self._arguments = (args, kwargs)
        self._scope = tf.get_current_name_scope()
        self.flat = tf.nest.flatten(self._arguments, expand_composites=True)

    def run_in_trace(self) -> None:
        """Call the layer for its effects on a graph only."""
        self._call_with(list(filter(_is_float, self.flat)))

    def run(self, changed: Sequence[ChangedVariable]) -> Any:  # noqa: ANN401 - what the layer returns
        """Call the layer, and return its results."""
        before = _read(changed)

        def second_call(inputs: Sequence[tf.Tensor]) -> list[tf.Tensor]:
            current = _read(changed)
            _assign(changed, before)
            tensors = self._call_with(inputs).tensors
            _assign(changed, current)
            return tensors

        inputs = list(filter(_is_float, self.flat))
        if tf.executing_eagerly():
            trace = Trace(self._call_and_note_masks, inputs)
            results, replaced = recomputed_results(
                functools.partial(_run_trace, trace), second_call, inputs, trace.captured()
            )
        else:
            results, replaced = recomputed_results(self._call_with, second_call, inputs)
        values = iter(replaced)
        outputs = _replaced(results.outputs, values)
        for inner in layer_and_all_within(self._layer):
            # Where the model looks for them. The layer itself has put the tensors there that have no gradients.
            added_losses(inner).extend(next(values) for _ in results.losses.get(id(inner), []))
        return outputs

    def _call_with(self, inputs: Sequence[tf.Tensor]) -> "_LayerResults":
        """Call the layer with other floating-point tensors, without adding losses to the model."""
        args, kwargs = _replaced(self._arguments, iter(inputs))
        layer = self._layer if tf.executing_eagerly() else self._converted
        before = _take_losses(self._layer)
        with tf.name_scope(self._scope and f"{self._scope}/"):
            outputs = layer(*args, **kwargs)
        added = _take_losses(self._layer)
        for inner in layer_and_all_within(self._layer):
            added_losses(inner).extend(before.get(id(inner), []))
        return _LayerResults(outputs, added)

    def _call_and_note_masks(self, inputs: Sequence[tf.Tensor]) -> "tuple[_LayerResults, list[tf.Tensor | None]]":
        results = self._call_with(inputs)
        return results, list(map(mask_of, results.flat_outputs))


def _run_trace(trace: Trace, inputs: Sequence[tf.Tensor]) -> "_LayerResults":
    results, masks = trace.run(inputs)
    for tensor, mask in zip(results.flat_outputs, masks, strict=True):
        if mask is not None:
            set_mask(tensor, mask)
    return results


class _LayerResults(NamedTuple):
    """What a call of the layer returned and added."""

    #: Some may be None, or of an integer type.
    outputs: Any
    #: What the layers in the layer added by `add_loss`, by the `id` of each, in their order.
    losses: dict[int, list[tf.Tensor]]

    @property
    def flat_outputs(self) -> list[Any]:
        return tf.nest.flatten(self.outputs, expand_composites=True)

    @property
    def tensors(self) -> list[tf.Tensor]:
        return [*filter(_is_float, self.flat_outputs), *itertools.chain.from_iterable(self.losses.values())]


def _take_losses(layer: Any) -> dict[int, list[tf.Tensor]]:  # noqa: ANN401 - of either package
    taken = {id(inner): list(added_losses(inner)) for inner in layer_and_all_within(layer)}
    for inner in layer_and_all_within(layer):
        added_losses(inner).clear()
    return taken


def _read(variables: Sequence[ChangedVariable]) -> list[tf.Tensor]:
    return [tf.raw_ops.ReadVariableOp(resource=handle, dtype=dtype) for handle, dtype in variables]


def _assign(variables: Sequence[ChangedVariable], values: Sequence[tf.Tensor]) -> None:
    for (handle, _), value in zip(variables, values, strict=True):
        tf.raw_ops.AssignVariableOp(resource=handle, value=value)


def _replaced(structure: Any, values: Iterator[tf.Tensor]) -> Any:  # noqa: ANN401 - anything that a layer takes
    """Return a structure with other values of its floating-point tensors, which keep their masks."""
    flat = tf.nest.flatten(structure, expand_composites=True)
    replaced = [masked(next(values), each) if _is_float(each) else each for each in flat]
    return tf.nest.pack_sequence_as(structure, replaced, expand_composites=True)


def _outside_of(name: str) -> Any:  # noqa: ANN401 - a context manager of TensorFlow
    """Return the name scope that contains the one of a name, so that a layer's variables have their usual names."""
    outer = tf.get_current_name_scope().removesuffix(name).removesuffix("/")
    return tf.name_scope(outer and f"{outer}/")


def _is_float(value: object) -> bool:
    return isinstance(value, tf.Tensor | tf.Variable) and value.dtype.is_floating
