"""What tfmp needs of layers that Keras has no public way to ask or do, for Keras 3 (3.5 to 3.15) and Keras 2.

* The layers inside a layer: `layers` exists for models only.
* The type that functional models of Keras 3 cast the inputs of layers to before 3.10, by operations of their own.
* Variables that are cast where they are read: Keras 2 decides that when it makes a variable.
"""

import functools
import importlib
from collections.abc import Callable
from types import ModuleType
from typing import Any, TypeAlias

import tensorflow as tf

from tfmp.which_keras import is_keras2

#: The half-precision types, as Keras names them.
HALF = ("float16", "bfloat16")

#: A layer or model of any Keras.
_Layer: TypeAlias = Any


def layers_of(model: _Layer) -> list[_Layer]:
    """Return a model and all layers in it, each once.

    Args:
        model: The model.
    """
    return list({id(layer): layer for layer in model._flatten_layers()}.values())


def layers_directly_in(layer: _Layer) -> list[_Layer]:
    """Return the layers that a layer holds, without those that these hold.

    Args:
        layer: The layer.
    """
    return list(layer._flatten_layers(include_self=False, recursive=False))


def own_weights(keras: ModuleType, layer: _Layer) -> list[Any]:
    """Return the weights of a layer, without those of the layers in it. A model need not be built.

    Args:
        keras: The package that the layer is of.
        layer: The layer.
    """
    if is_keras2(keras):
        return [*layer._trainable_weights, *layer._non_trainable_weights]
    return [*layer._trainable_variables, *layer._non_trainable_variables]


def half_casts(model: _Layer) -> list[Any]:
    """Return the operations of a functional model that cast the inputs of its layers to half precision.

    Keras 3 has them before 3.10. The layers cast their inputs themselves as well.

    Args:
        model: A model or layer of Keras 3.
    """
    # A sequential model has a functional one for that.
    operations = getattr(getattr(model, "_functional", None) or model, "operations", ())
    return [each for each in operations if type(each).__name__ == "Cast" and each.dtype in HALF]


def widen_inputs(keras: ModuleType, model: _Layer) -> None:
    """Let a functional model take float32 inputs, where it was built such that it casts them to half precision.

    A sequential model that is built by its first call under a mixed policy takes half-precision inputs from then on,
    whatever its layers compute in. The layers cast their inputs themselves.

    Args:
        keras: The package that the model is of.
        model: The model; a layer that is no model is left as it is.
    """
    for cast in half_casts(model):
        cast.dtype = "float32"
    is_sequential = isinstance(model, keras.Sequential) and not is_keras2(keras)
    # A sequential model of Keras 3 that is not built has no inputs yet, and raises an error if it is asked for them.
    functional = model._functional if is_sequential else model
    for tensor in getattr(functional, "inputs", None) or ():
        if tf.as_dtype(tensor.dtype).name not in HALF:
            continue
        if is_keras2(keras):
            spec = tensor._type_spec
            tensor._type_spec = tf.TensorSpec(spec.shape, tf.float32, spec.name)
            tensor.node.layer._set_dtype_policy(keras.mixed_precision.Policy("float32"))
        else:
            tensor._dtype = tensor._keras_history.operation._dtype = "float32"


def is_function_of_tensorflow(layer: _Layer) -> bool:
    """Return whether a layer is what Keras 2 makes of a function of TensorFlow that is called on a layer's result.

    Such a layer computes in the type that it is given.

    Args:
        layer: The layer.
    """
    return type(layer).__module__.endswith("tf_op_layer")


def attributes_with_cast_variables(keras: ModuleType, layer: _Layer) -> dict[str, Any]:
    """Return what attributes of a layer must hold for Keras 2 to cast the variables in them where the layer reads them.

    A layer that was made under a mixed policy has variables that cast themselves. A layer that was made under float32
    has plain ones: in attributes, and in lists, tuples and dictionaries among these.

    Args:
        keras: The package that the layer is of.
        layer: The layer.

    Returns:
        The new values of the attributes that hold plain variables, by name.
    """
    module = importlib.import_module(f"{keras.__name__}.src.mixed_precision.autocast_variable")
    # They read their variables in float32, and cast the result themselves.
    uncast = (keras.layers.BatchNormalization, keras.layers.LayerNormalization, keras.layers.Embedding)
    if isinstance(layer, uncast):
        return {}
    own = {id(weight) for weight in own_weights(keras, layer)}

    def casting(value: Any) -> Any:  # noqa: ANN401 - whatever stands in an attribute
        is_plain = id(value) in own and not isinstance(value, module.AutoCastVariable)
        return module.create_autocast_variable(value) if is_plain and value.dtype.is_floating else value

    # Keras' own lists, such as those of all weights, and what TensorFlow tracks stay as they are.
    attributes = {
        name: value
        for name, value in layer.__dict__.items()
        if name not in _attributes_of_keras(keras) and not name.startswith(("_self_", "_obj_"))
    }
    return {name: _mapped(casting, value) for name, value in attributes.items() if _holds(own, value)}


@functools.cache
def _attributes_of_keras(keras: ModuleType) -> frozenset[str]:
    return frozenset(vars(keras.layers.Layer()))


def _holds(ids: set[int], value: Any) -> bool:  # noqa: ANN401 - whatever stands in an attribute
    if isinstance(value, dict):
        value = list(value.values())
    return any(_holds(ids, each) for each in value) if isinstance(value, list | tuple) else id(value) in ids


def _mapped(function: Callable[[Any], Any], value: Any) -> Any:  # noqa: ANN401 - whatever stands in an attribute
    if isinstance(value, dict):
        return {key: _mapped(function, each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        mapped = [_mapped(function, each) for each in value]
        if isinstance(value, list):
            return mapped
        # Keras wraps named tuples; the class in the wrapper makes them.
        return value.__class__._make(mapped) if hasattr(value, "_make") else tuple(mapped)
    return function(value)
