"""What the check needs of Keras that Keras has no public way to ask or do, for Keras 3 (3.5 to 3.15) and Keras 2.

* The layers inside a layer: `layers` exists for models only.
* The type in which a layer computes: Keras 3 has a public setter, which for a `DTypePolicyMap` changes the map of all
  layers; Keras 2 has none, and makes the variables of a float32 layer such that they are never cast.
* Whether a layer draws random numbers.
* A function between a layer and its callers: `call` of one object can only be replaced in the object itself.

Everything that is changed is put back when the check ends.
"""

import contextlib
import importlib
from collections.abc import Callable, Iterable, Iterator
from types import ModuleType
from typing import Any, TypeAlias

import tensorflow as tf

from tfmp.which_keras import is_keras2

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


def draws_random_numbers(layer: _Layer) -> bool:
    """Return whether a layer, or the cell of a recurrent layer, draws random numbers itself.

    Args:
        layer: The layer.
    """
    if getattr(layer, "_seed_generators", None) or getattr(layer, "_random_generator", None):
        return True
    cell = getattr(layer, "cell", None)
    cells = getattr(cell, "cells", [] if cell is None else [cell])
    return any(draws_random_numbers(each) for each in cells)


@contextlib.contextmanager
def called_through(layer: _Layer, around: Callable[..., Any]) -> Iterator[None]:
    """Put a function between a layer and its callers.

    Args:
        layer: The layer.
        around: Takes the layer's own `call` and what it is called with; returns what the layer is to return.
    """
    # Not by `setattr`, with which Keras tracks what it is given. A class whose `call` is a property (tfmp.Recompute)
    # does not look here, so its calls are not seen.
    call, own = layer.call, layer.__dict__
    own["call"] = tf.autograph.experimental.do_not_convert(lambda *args, **kwargs: around(call, *args, **kwargs))
    try:
        yield
    finally:
        del own["call"]


@contextlib.contextmanager
def computing_in(keras: ModuleType, layer: _Layer, policy: str) -> Iterator[None]:
    """Let a layer compute in another type.

    Args:
        keras: The package that the layer is of.
        layer: The layer.
        policy: "float32" or "mixed_float16".
    """
    if is_keras2(keras):
        own = layer._dtype_policy
        layer._set_dtype_policy(keras.mixed_precision.Policy(policy))
        try:
            with _variables_cast(keras, layer):
                yield
        finally:
            layer._set_dtype_policy(own)
        return
    own = layer._dtype_policy
    layer._dtype_policy = keras.DTypePolicy(policy)
    try:
        yield
    finally:
        layer._dtype_policy = own


@contextlib.contextmanager
def _variables_cast(keras: ModuleType, layer: _Layer) -> Iterator[None]:
    """Let Keras 2 cast the variables that a layer reads, as it does for layers made under a mixed policy.

    These layers make variables that cast themselves. A layer that was made under float32 has plain variables instead,
    which are replaced in its attributes, and in lists among these, by ones that cast themselves.
    """
    module = importlib.import_module(f"{keras.__name__}.src.mixed_precision.autocast_variable")
    # They read their variables in float32, and cast the result themselves.
    uncast = (keras.layers.BatchNormalization, keras.layers.LayerNormalization, keras.layers.Embedding)
    attributes, replaced = layer.__dict__, dict[str, Any]()
    if not isinstance(layer, uncast):
        own = {id(weight) for weight in layer.trainable_weights}

        def casting(value: Any) -> Any:  # noqa: ANN401 - whatever stands in an attribute
            is_plain = id(value) in own and not isinstance(value, module.AutoCastVariable)
            return module.create_autocast_variable(value) if is_plain and value.dtype.is_floating else value

        for name, value in list(attributes.items()):
            # Names that begin so are Keras' own lists, such as those of all weights.
            if name.startswith("_") and not isinstance(value, tf.Variable):
                continue
            cast = [*map(casting, value)] if isinstance(value, list) else casting(value)
            if cast is not value and not (isinstance(value, list) and all(map(_is, cast, value))):
                replaced[name] = value
                attributes[name] = cast
    try:
        yield
    finally:
        attributes.update(replaced)


def _is(one: object, other: object) -> bool:
    return one is other


@contextlib.contextmanager
def state_unchanged(keras: ModuleType, model: _Layer) -> Iterator[None]:
    """Keep moving statistics and seeds as they are.

    Args:
        keras: The package that the model is of.
        model: The model.
    """
    if not is_keras2(keras):
        with keras.StatelessScope(collect_losses=True):
            yield
        return
    with _values_unchanged(model.non_trainable_variables):
        yield


def compiled_loss(keras: ModuleType, model: _Layer, **kwargs: Any) -> tf.Tensor | None:  # noqa: ANN401 - what Keras takes
    """Return the loss that a model is compiled with, without a change of its metrics.

    Args:
        keras: The package that the model is of.
        model: The model.
        **kwargs: What `compute_loss` of the model takes.
    """
    if not is_keras2(keras):
        return model.compute_loss(**kwargs)
    # Keras 2 updates metrics when it computes the loss, and divides the loss by the number of replicas, whose gradients
    # it will sum.
    with on_first_replica(keras, model):
        with _values_unchanged([variable for metric in model.metrics for variable in metric.variables]):
            loss = model.compute_loss(**kwargs)
        return None if loss is None else loss * tf.distribute.get_strategy().num_replicas_in_sync


def on_first_replica(keras: ModuleType, model: _Layer) -> contextlib.AbstractContextManager[object]:
    """Return a context in which TensorFlow differentiates by the variables of a model made for several replicas.

    Only Keras 2 needs it: its variables are those of TensorFlow, which can be differentiated by on a replica only, as
    its metrics can be updated on a replica only.

    Args:
        keras: The package that the model is of.
        model: The model.
    """
    strategy = getattr(model, "distribute_strategy", None) if is_keras2(keras) else None
    if strategy is None or strategy.num_replicas_in_sync == 1:
        return contextlib.nullcontext()
    return tf.distribute.ReplicaContext(strategy, 0)


@contextlib.contextmanager
def _values_unchanged(variables: Iterable[tf.Variable]) -> Iterator[None]:
    values = [(variable, tf.identity(variable)) for variable in {id(each): each for each in variables}.values()]
    try:
        yield
    finally:
        for variable, value in values:
            variable.assign(value)
