"""Which layers are in a layer of Keras 3 or Keras 2, and in which types they compute.

Nothing is read from a layer by the name of a public attribute, such as `inputs` or `compute_dtype`, unless the
attribute is of a class of Keras: in a layer of the user's, it may mean anything.
"""

import contextlib
import functools
from types import ModuleType
from typing import Any, TypeAlias

import tensorflow as tf

from tfmp.any_keras.internals import (
    TRACKING_PREFIXES,
    cast_where_read,
    functional_class,
    half_casts,
    is_graph_of_layers,
    layer_and_all_within,
    layers_directly_in,
    nodes_by_depth,
    own_weights,
    symbolic_inputs,
    widen_symbolic,
)
from tfmp.any_keras.which import is_keras2
from tfmp.core.dtypes import HALF_TYPES_BY_NAME
from tfmp.core.gradients import arithmetic

#: A layer or model of any Keras.
_Layer: TypeAlias = Any


def layers_of(model: _Layer) -> list[_Layer]:
    """Return a model and all layers in it, each once."""
    return list({id(layer): layer for layer in layer_and_all_within(model)}.values())


def paths_within(keras: ModuleType, model: _Layer) -> dict[int, list[str]]:
    """Return, by the ids of the layers in a model, the names of the layers around each, and its own."""
    paths: dict[int, list[str]] = {}

    def walk(layer: _Layer, outer: list[str]) -> None:
        for inner in layers_directly_in(layer):
            if id(inner) not in paths and inner is not model and not isinstance(inner, keras.layers.InputLayer):
                paths[id(inner)] = [*outer, inner.name]
                walk(inner, paths[id(inner)])

    walk(model, [])
    return paths


def called_layers_of(keras: ModuleType, model: _Layer) -> list[_Layer]:
    """Return a model and the layers in it that its calls may reach, each once.

    A functional model calls the layers of its graph, and not what it only holds in an attribute, such as the
    preprocessor of keras-hub's tasks. Any other layer may call all layers that it holds.
    """
    found = {id(model): model}
    waiting = [model]
    while waiting:
        layer = waiting.pop()
        graph = _graph_of(keras, layer)
        called = None if graph is None else set(map(id, graph))
        for inner in layers_directly_in(layer):
            if id(inner) not in found and (called is None or id(inner) in called):
                found[id(inner)] = inner
                waiting.append(inner)
    # In the order of all layers.
    return [layer for layer in layers_of(model) if id(layer) in found]


def _graph_of(keras: ModuleType, layer: _Layer) -> list[Any] | None:
    """Return the operations that a functional model calls; None for a layer that has a `call` of its own."""
    call, functional = None if "call" in vars(layer) else type(layer).call, functional_class(keras)
    if not is_keras2(keras):
        return list(layer.operations) if call is functional.call else None
    is_graph = call is functional.call or (call is keras.Sequential.call and is_graph_of_layers(layer))
    return [node.layer for nodes in nodes_by_depth(layer).values() for node in nodes] if is_graph else None


def compute_dtype(keras: ModuleType, layer: _Layer) -> str:
    """Return the name of the type that Keras computes a layer in."""
    return str(_read_as_keras_does(keras, layer, "compute_dtype"))


def variable_dtype(keras: ModuleType, layer: _Layer) -> str:
    """Return the name of the type that Keras stores the weights of a layer in."""
    return str(_read_as_keras_does(keras, layer, "variable_dtype"))


def _read_as_keras_does(keras: ModuleType, layer: _Layer, name: str) -> Any:  # noqa: ANN401 - what the property has
    """Return a property of a layer as the first class of Keras has it, from which the class of the layer is derived."""
    of_keras = (vars(each) for each in type(layer).__mro__ if each.__module__.split(".")[0] == keras.__name__)
    return next(attributes[name] for attributes in of_keras if name in attributes).__get__(layer)


#: Modules of TensorFlow Model Optimization with layers that round to few values, in float32 only.
_ROUNDING = ("quantize_wrapper", "quantize_layer", "cluster_wrapper")


def in_float32(losses: Any) -> property:  # noqa: ANN401 - a property, which is no type
    """Return `Layer.losses` of Keras 3 such that losses in half precision are cast to float32.

    Keras 3 adds them to the loss of the outputs, which is in float32, and fails if they are of another type. Keras 2
    casts them.
    """

    def widened(self: _Layer) -> list[tf.Tensor]:
        # A regularizer of the user's may return a number.
        return [arithmetic.widen(loss) if tf.is_tensor(loss) else loss for loss in losses.fget(self)]

    return property(widened, doc=losses.__doc__)


def is_quantized(keras: ModuleType, layer: _Layer) -> bool:
    """Return whether a layer computes in the types of a quantization, or simulates that in float32."""
    names = [each.__module__.split(".") for each in type(layer).__mro__]
    is_simulated = any(name[0] == "tensorflow_model_optimization" and name[-1] in _ROUNDING for name in names)
    # In Keras 2 the name means nothing.
    return is_simulated or (not is_keras2(keras) and bool(_read_as_keras_does(keras, layer, "quantization_mode")))


def widen_inputs(keras: ModuleType, model: _Layer, undo: contextlib.ExitStack) -> None:
    """Let a functional model take float32 inputs, where it was built such that it casts them to half precision.

    A sequential model that is built by its first call under a mixed policy takes half-precision inputs from then on,
    whatever its layers compute in. The layers cast their inputs themselves. Any other layer is left as it is. `undo`
    gets what takes the changes back.
    """
    for cast in half_casts(keras, model):
        undo.callback(setattr, cast, "dtype", cast.dtype)
        cast.dtype = "float32"
    for tensor in symbolic_inputs(keras, model):
        if tf.as_dtype(tensor.dtype).name in HALF_TYPES_BY_NAME:
            widen_symbolic(keras, tensor, undo)


def attributes_with_cast_variables(keras: ModuleType, layer: _Layer) -> dict[str, Any]:
    """Return what attributes of a layer must hold for Keras 2 to cast the variables in them where the layer reads them.

    A layer that was made under a mixed policy has variables that cast themselves. A layer that was made under float32
    has plain ones: in attributes, and in lists, tuples and dictionaries among these. Only these attributes are
    returned, by name.
    """
    # They read their variables in float32, and cast the result themselves.
    uncast = (keras.layers.BatchNormalization, keras.layers.LayerNormalization, keras.layers.Embedding)
    if isinstance(layer, uncast):
        return {}
    own = {id(weight) for weight in own_weights(keras, layer)}

    def casting(value: Any) -> Any:  # noqa: ANN401 - whatever stands in an attribute
        return cast_where_read(keras, value) if id(value) in own and value.dtype.is_floating else value

    # Keras' own lists, such as those of all weights, and what TensorFlow tracks stay as they are.
    attributes = {
        name: value
        for name, value in layer.__dict__.items()
        if name not in _attributes_of_keras(keras) and not name.startswith(TRACKING_PREFIXES)
    }
    return {name: tf.nest.map_structure(casting, value) for name, value in attributes.items() if _holds(own, value)}


@functools.cache
def _attributes_of_keras(keras: ModuleType) -> frozenset[str]:
    return frozenset(vars(keras.layers.Layer()))


def _holds(ids: set[int], value: Any) -> bool:  # noqa: ANN401 - whatever stands in an attribute
    if isinstance(value, dict):
        value = list(value.values())
    return any(_holds(ids, each) for each in value) if isinstance(value, list | tuple) else id(value) in ids
