"""The private names of Keras that tfmp uses, each behind a function that says what it is for.

They were read in Keras 3.5.0 and 3.15.1 ("Keras 3" below stands for 3.5 to 3.15), and in Keras 2.15.0 and tf_keras
2.16.0 and 2.21.0 ("Keras 2"), which do not change any more. Where no other reason is given, nothing public tells the
same. Private methods that a class of tfmp overrides are in that class. `tests/test_private_names.py` lists these, and
fails if another module uses a private name.

No Keras is imported here: most functions take the package that an object is of.
"""

import contextlib
import importlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from types import ModuleType
from typing import Any, TypeAlias

import tensorflow as tf

from tfmp.any_keras.which import is_keras2, is_optimizer_of_keras3
from tfmp.core.dtypes import HALF_TYPES_BY_NAME
from tfmp.core.tensorflow_internals import TRACKING_PREFIX

#: A layer or model of any Keras.
_Layer: TypeAlias = Any
#: An optimizer of any Keras.
_Optimizer: TypeAlias = Any

# Layers and models.


def layer_and_all_within(layer: _Layer) -> Iterator[_Layer]:
    """Yield a layer and the layers in it, some perhaps more than once: `Layer._flatten_layers` of Keras 3 and 2."""
    found: Iterator[_Layer] = layer._flatten_layers()
    return found


def layers_directly_in(layer: _Layer) -> list[_Layer]:
    """Return the layers that a layer holds, without those in them: `Layer._flatten_layers` of Keras 3 and 2."""
    return list(layer._flatten_layers(include_self=False, recursive=False))


def functional_class(keras: ModuleType) -> Any:  # noqa: ANN401 - Keras has no types
    """Return the class of functional models: `Functional` in `keras.src.models` of Keras 3, `keras.src.engine` of 2."""
    module = "engine" if is_keras2(keras) else "models"
    return importlib.import_module(f"{keras.__name__}.src.{module}.functional").Functional


def functional_of(keras: ModuleType, model: _Layer) -> Any:  # noqa: ANN401 - Keras has no types
    """Return a functional model, or `_functional` of a built `Sequential` of Keras 3; None for any other layer."""
    found = model._functional if isinstance(model, keras.Sequential) and not is_keras2(keras) else model
    return found if isinstance(found, functional_class(keras)) else None


def is_graph_of_layers(sequential: _Layer) -> bool:
    """Return whether a model is called as a functional model: `Sequential._graph_initialized` of Keras 2."""
    return bool(sequential._graph_initialized)


def nodes_by_depth(model: _Layer) -> dict[int, list[Any]]:
    """Return the calls of which a functional model consists, by their distance from its results.

    `Functional._nodes_by_depth` of Keras 2. In Keras 3, `Functional.operations` is public.
    """
    nodes: dict[int, list[Any]] = model._nodes_by_depth
    return nodes


def symbolic_inputs(keras: ModuleType, model: _Layer) -> list[Any]:
    """Return the symbolic inputs of a functional model; any other layer has none.

    `Functional._nested_inputs` of Keras 2: a class of the user's may set the public `inputs` to something else. Keras 3
    gives `inputs`. A sequential model of Keras 2 that is not built has none yet.
    """
    found = getattr(functional_of(keras, model), "_nested_inputs" if is_keras2(keras) else "inputs", None)
    return [] if found is None else list(tf.nest.flatten(found))


def half_casts(keras: ModuleType, model: _Layer) -> list[Any]:
    """Return the operations of a functional model that cast the inputs of its layers to half precision.

    `Cast` of `keras.src.ops` of Keras 3, before 3.10. The layers cast their inputs themselves as well.
    """
    functional = None if is_keras2(keras) else functional_of(keras, model)
    operations = () if functional is None else functional.operations
    return [each for each in operations if type(each).__name__ == "Cast" and each.dtype in HALF_TYPES_BY_NAME]


def is_function_of_tensorflow(keras: ModuleType, layer: _Layer) -> bool:
    """Return whether a layer is what Keras 2 makes of a function of TensorFlow that is called on a layer's result.

    `tf_op_layer` of `keras.src.layers` of Keras 2. Such a layer computes in the type that it is given.
    """
    return type(layer).__module__ == f"{keras.__name__}.src.layers.core.tf_op_layer"


def is_layer_of_tf1(layer: _Layer) -> bool:
    """Return whether a layer is one of `tf.compat.v1.layers`, which takes the type of its inputs.

    `legacy_tf_layers` of Keras 2. The public names of the classes load Keras, and are gone in TensorFlow 2.16.
    """
    return any("legacy_tf_layers" in each.__module__ for each in type(layer).__mro__)


def layer_class_of_graphs(keras: ModuleType) -> Any:  # noqa: ANN401 - Keras has no types
    """Return the class that Keras 2 makes the base class of layers in graphs of TensorFlow 1.

    `Layer` in `keras.src.engine.base_layer_v1` of Keras 2. In public it is `keras.layers.Layer` only while a layer is
    made in a graph.
    """
    return importlib.import_module(f"{keras.__name__}.src.engine.base_layer_v1").Layer


def is_compiled(keras: ModuleType, model: _Layer) -> bool:
    """Return whether a layer is a compiled model: `Model._is_compiled` of Keras 2, the public `compiled` of Keras 3."""
    return isinstance(model, keras.Model) and bool(model._is_compiled if is_keras2(keras) else model.compiled)


def compiled_with(model: _Layer) -> Mapping[str, Any] | None:
    """Return the arguments that a model was compiled with, as they were given; None if it was not compiled.

    `Model._compile_config` of Keras 3 and 2. The public `get_compile_config` loses functions that Keras cannot write.
    """
    config = getattr(model, "_compile_config", None)
    return None if config is None else config.config


def own_weights(keras: ModuleType, layer: _Layer) -> list[Any]:
    """Return the weights of a layer, without those of the layers in it. A model need not be built.

    `Layer._trainable_variables` of Keras 3 and `Layer._trainable_weights` of Keras 2, and those that are not trainable.
    The public lists have the weights of inner layers too.
    """
    if is_keras2(keras):
        return [*layer._trainable_weights, *layer._non_trainable_weights]
    return [*layer._trainable_variables, *layer._non_trainable_variables]


def set_trainable_of_itself(layer: _Layer, trainable: bool) -> None:
    """Set whether a layer alone is trained: `Layer._trainable` of Keras 3 and 2. In public, its layers are set too."""
    layer._trainable = trainable


def has_random_generator(keras: ModuleType, layer: _Layer) -> bool:
    """Return whether a layer, or any cell of a recurrent layer, has what random numbers are drawn with.

    `Layer._seed_generators` of Keras 3, and `_random_generator` of the layers of Keras 2 that draw.
    """
    if is_keras2(keras):
        generators = (importlib.import_module(f"{keras.__name__}.src.backend").RandomGenerator, tf.random.Generator)
        return isinstance(getattr(layer, "_random_generator", None), generators)
    return isinstance(layer, keras.layers.Layer) and bool(layer._seed_generators)


def added_losses(layer: _Layer) -> list[tf.Tensor]:
    """Return the list in which a layer keeps the losses that its own calls added; it may be changed.

    `Layer._eager_losses` of Keras 2. The public `losses` also has those of inner layers and of regularized weights.
    """
    losses: list[tf.Tensor] = layer._eager_losses
    return losses


#: What the constructor of a model of Keras 3 (3.5 to 3.15) sets first. What a class sets before it calls the
#: constructor comes before it among the attributes.
SET_BY_CONSTRUCTOR = "_inbound_nodes"

#: What `compile` of Keras 3 sets, and the constructor of a model before it, but in the oldest versions. If it is set by
#: hand, Keras counts it among the metrics of the user.
SET_BY_COMPILE = {"_compile_loss", "_compile_metrics", "_loss_tracker"}


# Types.


def dtype_policy(layer: _Layer) -> Any:  # noqa: ANN401 - Keras has no types
    """Return the policy of a layer: `Layer._dtype_policy` of Keras 3 and 2.

    A class of the user's may mean something else by the public `dtype_policy`.
    """
    return layer._dtype_policy


def put_dtype_policy(keras: ModuleType, layer: _Layer, policy: object) -> None:
    """Give a layer a policy, and do nothing else.

    `Layer._dtype_policy` of Keras 3, and `Layer._set_dtype_policy` of Keras 2. The public setter of Keras 3 may fail in
    a class of the user's, and changes a map of policies in place; Keras 2 has none.
    """
    if is_keras2(keras):
        layer._set_dtype_policy(policy)
    else:
        layer.__dict__["_dtype_policy"] = policy


def policy_with_variables_in(keras: ModuleType, name: str, variable_dtype: str) -> Any:  # noqa: ANN401 - Keras has no types
    """Return a policy with variables of another type than its name: `DTypePolicy._variable_dtype` of Keras 3."""
    policy = keras.DTypePolicy(name)
    policy._variable_dtype = variable_dtype
    return policy


def widen_symbolic(keras: ModuleType, tensor: Any, undo: contextlib.ExitStack) -> None:  # noqa: ANN401 - Keras has no types
    """Let a symbolic input of a functional model, and what made it, be of float32; `undo` gets what takes it back.

    `KerasTensor._dtype` and `_keras_history` of Keras 3, and `_type_spec` of Keras 2.
    """

    def change(owner: object, name: str, value: object) -> None:
        undo.callback(setattr, owner, name, getattr(owner, name))
        setattr(owner, name, value)

    if is_keras2(keras):
        spec, layer = tensor._type_spec, tensor.node.layer
        change(tensor, "_type_spec", tf.TensorSpec(spec.shape, tf.float32, spec.name))
        undo.callback(layer._set_dtype_policy, layer._dtype_policy)
        layer._set_dtype_policy(keras.mixed_precision.Policy("float32"))
    else:
        change(tensor._keras_history.operation, "_dtype", "float32")
        change(tensor, "_dtype", "float32")


def cast_where_read(keras: ModuleType, variable: Any) -> Any:  # noqa: ANN401 - Keras has no types
    """Return a variable as one that is cast to the type of a layer where the layer reads it.

    `create_autocast_variable` of `keras.src.mixed_precision` of Keras 2, which decides that when a layer makes a
    variable.
    """
    module = importlib.import_module(f"{keras.__name__}.src.mixed_precision.autocast_variable")
    return variable if isinstance(variable, module.AutoCastVariable) else module.create_autocast_variable(variable)


#: How the attributes of a layer of Keras 2 begin that hold what TensorFlow and Keras track.
TRACKING_PREFIXES = (TRACKING_PREFIX, "_obj_")


# Masks and losses.


def mask_of(tensor: Any) -> tf.Tensor | None:  # noqa: ANN401 - a tensor or a variable of any kind
    """Return the mask that Keras gave a tensor: `_keras_mask` of the tensors of Keras 3 and 2."""
    return getattr(tensor, "_keras_mask", None)


def set_mask(tensor: tf.Tensor, mask: tf.Tensor) -> None:
    """Give a tensor a mask, as Keras does; see `mask_of`."""
    tensor._keras_mask = mask


def loss_of_function(keras: ModuleType, function: Callable[..., Any]) -> Any:  # noqa: ANN401 - Keras has no types
    """Return the loss that `compile` makes of a function: `LossFunctionWrapper` of Keras 3 and 2, no public name."""
    return keras.losses.MeanSquaredError.__bases__[0](function)


# Optimizers.


@contextlib.contextmanager
def view_of(optimizer: _Optimizer, **attributes: Any) -> Iterator[_Optimizer]:  # noqa: ANN401 - whatever they hold
    """Yield a view of an optimizer of Keras 3 or 2, which shares all its variables, with other values of attributes.

    What the view's methods set, such as a counter of steps in Python, is set on the optimizer when the context ends; by
    an error too, as if the optimizer's own methods had run.
    """
    # copy.copy would serialize the optimizer and make new variables.
    view = object.__new__(type(optimizer))
    shared = dict(vars(optimizer))
    vars(view).update(shared, **attributes)
    try:
        yield view
    finally:
        for name, value in vars(view).items():
            if name not in attributes and (name not in shared or shared[name] is not value):
                optimizer.__dict__[name] = value


@contextlib.contextmanager
def not_counting(optimizer: _Optimizer) -> Iterator[_Optimizer]:
    """Yield a view of an optimizer whose updates do not count as steps: `Optimizer._iterations` of Keras 3 and 2.

    In public, an optimizer cannot be told to update only some of the variables in a step.
    """
    with (
        view_of(optimizer.iterations, assign_add=lambda *_, **__: None) as iterations,
        view_of(optimizer, _iterations=iterations) as view,
    ):
        yield view


def learning_rate_or_schedule(optimizer: _Optimizer) -> Any:  # noqa: ANN401 - a variable of any kind, or a schedule
    """Return the learning rate of an optimizer: a variable, or the schedule itself.

    `Optimizer._learning_rate` of Keras 3 and 2. The public `learning_rate` has a schedule's value at this step.
    """
    return optimizer._learning_rate


def built_with(optimizer: _Optimizer) -> Collection[Any]:
    """Return what an optimizer was built with: `_trainable_variables` of Keras 3, keys in `_index_dict` of Keras 2."""
    built: Collection[Any] = (
        optimizer._trainable_variables if is_optimizer_of_keras3(optimizer) else optimizer._index_dict
    )
    return built


def refuse_unknown(optimizer: _Optimizer, variables: Sequence[Any]) -> None:
    """Raise Keras' own error if an optimizer was built without one of the variables.

    `Optimizer._check_variables_are_known` of Keras 3, a ValueError; `Optimizer._index_dict` and `_var_key` of Keras 2,
    and `_update_step`, which raises a KeyError for such a variable before it looks at the gradient. In public, an
    optimizer raises them only where it updates the variables.

    An optimizer of Keras 2 has no `_index_dict`, and refuses nothing, if its `build` does not call that of Keras.
    """
    if is_optimizer_of_keras3(optimizer):
        if optimizer.built:
            optimizer._check_variables_are_known(variables)
        return
    for variable in variables if hasattr(optimizer, "_index_dict") else ():
        if optimizer._var_key(variable) not in optimizer._index_dict:
            optimizer._update_step(None, variable)


def index_of(optimizer: _Optimizer, variable: Any) -> int:  # noqa: ANN401 - of TensorFlow or Keras
    """Return the place of a variable among those that an optimizer was built with.

    `Optimizer._get_variable_index` of Keras 3, `Optimizer._index_dict` and `_var_key` of Keras 2.
    """
    if is_optimizer_of_keras3(optimizer):
        return int(optimizer._get_variable_index(variable))
    return int(optimizer._index_dict[optimizer._var_key(variable)])


def decays(optimizer: _Optimizer, variable: Any) -> bool:  # noqa: ANN401 - of TensorFlow or Keras
    """Return whether an optimizer decays a variable, if any: `Optimizer._use_weight_decay` of Keras 3 and 2."""
    return bool(optimizer._use_weight_decay(variable))


def class_of_legacy_wrappers(keras: ModuleType) -> Any:  # noqa: ANN401 - Keras has no types
    """Return the class of Keras' own wrapper around legacy optimizers.

    `LossScaleOptimizer` in `keras.src.mixed_precision` of Keras 2. The public class of this name is its base.
    """
    return importlib.import_module(f"{keras.__name__}.src.mixed_precision.loss_scale_optimizer").LossScaleOptimizer


def initialize_with_session(keras: ModuleType, variables: Iterable[tf.Variable]) -> None:
    """Let the session in which Keras trains initialize variables of its graph, as it does those that it made.

    `keras.__internal__.backend.track_variable` of Keras 2.
    """
    for variable in variables:
        keras.__internal__.backend.track_variable(variable)
