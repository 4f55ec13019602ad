"""What the check changes in Keras for a run, and puts back when the run ends, for Keras 3 and Keras 2.

* The type in which a layer computes. In Keras 2, a float32 layer gets variables that cast themselves.
* The `call` of a layer, which can only be replaced in the object itself.
* Moving statistics, seeds and metrics.
* In Keras 3, the type of the losses that layers add, which are a property of their class.
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator
from types import ModuleType
from typing import Any, TypeAlias

import tensorflow as tf

from tfmp.any_keras.internals import (
    dtype_policy,
    half_casts,
    has_random_generator,
    loss_of_function,
    policy_with_variables_in,
    put_dtype_policy,
)
from tfmp.any_keras.which import is_keras2
from tfmp.mixed_precision.keras_layers import attributes_with_cast_variables, in_float32

#: A layer or model of any Keras.
_Layer: TypeAlias = Any


def draws_random_numbers(keras: ModuleType, layer: _Layer) -> bool:
    """Return whether a layer, or the cell of a recurrent layer, draws random numbers itself."""
    cells: list[Any] = []
    if isinstance(layer, keras.layers.RNN):
        cells = [layer.cell]
    elif isinstance(layer, keras.layers.StackedRNNCells):
        cells = list(layer.cells)
    return has_random_generator(keras, layer) or any(draws_random_numbers(keras, each) for each in cells)


@contextlib.contextmanager
def called_through(layer: _Layer, around: Callable[..., Any]) -> Iterator[None]:
    """Put a function between a layer and its callers; it takes the layer's `call`, then what that is called with."""
    # Not by `setattr`, with which Keras tracks what it is given. A class whose `call` is a property (tfmp.Recompute)
    # does not look here, so its calls are not seen.
    call, own = layer.call, layer.__dict__
    # The layers that Keras 2 makes of functions of TensorFlow have a `call` of their own.
    before = {name: value for name, value in own.items() if name == "call"}
    own["call"] = tf.autograph.experimental.do_not_convert(lambda *args, **kwargs: around(call, *args, **kwargs))
    try:
        yield
    finally:
        del own["call"]
        own.update(before)


@contextlib.contextmanager
def adding_losses_in_float32(keras: ModuleType) -> Iterator[None]:
    """Let Keras 3 add losses that layers compute in half precision; Keras 2 does so by itself."""
    if is_keras2(keras):
        yield
        return
    layer = keras.layers.Layer
    own = layer.losses
    layer.losses = in_float32(own)
    try:
        yield
    finally:
        layer.losses = own


@contextlib.contextmanager
def computing_in(keras: ModuleType, layer: _Layer, policy: str) -> Iterator[None]:
    """Let a layer compute by another policy, "float32" or "mixed_float16"."""
    own = dtype_policy(layer)
    if is_keras2(keras):
        changed = attributes_with_cast_variables(keras, layer)
        before = {name: layer.__dict__[name] for name in changed}
        put_dtype_policy(keras, layer, keras.mixed_precision.Policy(policy))
        layer.__dict__.update(changed)
        try:
            yield
        finally:
            layer.__dict__.update(before)
            put_dtype_policy(keras, layer, own)
        return
    # Keras casts variables if the policy says that their type is another one than that of the computation.
    new = policy_with_variables_in(keras, policy, layer.variable_dtype)
    casts = half_casts(keras, layer)
    types_of_casts = [each.dtype for each in casts]
    # Not by the public setter, which for a `DTypePolicyMap` changes the map of all layers.
    put_dtype_policy(keras, layer, new)
    try:
        for each in casts:
            each.dtype = "float32"
        yield
    finally:
        put_dtype_policy(keras, layer, own)
        for each, dtype in zip(casts, types_of_casts, strict=True):
            each.dtype = dtype


@contextlib.contextmanager
def state_unchanged(keras: ModuleType, model: _Layer) -> Iterator[list[Any]]:
    """Keep moving statistics and seeds as they are; yield what to differentiate by, one for each trained variable."""
    if is_keras2(keras):
        with _values_unchanged(model.non_trainable_variables):
            yield list(model.trainable_variables)
        return
    # All variables get a value in the scope: without one, Keras finds None in it for the regularizers of weights.
    values = {id(each): tf.convert_to_tensor(each.value) for each in model.variables}
    state = [(each, values[id(each)]) for each in model.variables]
    with keras.StatelessScope(state, collect_losses=True):
        yield [values[id(each)] for each in model.trainable_variables]


def loss_of_name(keras: ModuleType, name: str) -> Callable[..., tf.Tensor]:
    """Return the loss that `compile` makes of a name, which computes in float32 and takes the weights of examples."""
    found = keras.losses.get(name)
    return found if isinstance(found, keras.losses.Loss) else loss_of_function(keras, found)


def compiled_loss(keras: ModuleType, model: _Layer, **kwargs: Any) -> tf.Tensor | None:  # noqa: ANN401 - what Keras takes
    """Return the loss that a model is compiled with, without a change of its metrics; None if it has no loss."""
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
    """
    is_model_of_keras2 = is_keras2(keras) and isinstance(model, keras.Model)
    if not is_model_of_keras2 or model.distribute_strategy.num_replicas_in_sync == 1:
        return contextlib.nullcontext()
    return tf.distribute.ReplicaContext(model.distribute_strategy, 0)


@contextlib.contextmanager
def _values_unchanged(variables: Iterable[tf.Variable]) -> Iterator[None]:
    values = [(variable, tf.identity(variable)) for variable in {id(each): each for each in variables}.values()]
    try:
        yield
    finally:
        for variable, value in values:
            variable.assign(value)
