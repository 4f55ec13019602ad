"""Recompute for some layers of a model that exists."""

import re
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import tensorflow as tf

from tfmp.any_keras.internals import nodes_by_depth
from tfmp.any_keras.which import is_keras2, keras_of
from tfmp.core import lists
from tfmp.recomputation.layers.layer import Recompute
from tfmp.recomputation.layers.same_class import with_class_of


def recompute_layers(model: Any, *patterns: str | re.Pattern[str]) -> Any:  # noqa: ANN401 - a model of any Keras
    r"""Return a model that is like another one, but recomputes the activations of some layers.

    The new model shares its layers and weights, and its optimizer if it is compiled, with the given one: load, train,
    save or export either of them. The given model itself still keeps all activations.

    Args:
        model: A functional or Sequential model of Keras; it may have been loaded, and may be of a class of your own.
        *patterns: Regular expressions. A layer is recomputed if one of them matches its whole path: its name, for a
            layer of an inner model after the names of the models that contain it, such as "encoder/layer_3". If a model
            is recomputed, its layers are not wrapped again.

    Returns:
        The new model, in which each matching layer is inside a `tfmp.Recompute` of the same name. It is an instance of
        the class of the given one, and has its attributes.

    Raises:
        TypeError: `model` is not a Keras model, or cannot be rebuilt: it is subclassed and not functional, or has a
            `call` of its own; or a pattern is not a regular expression.
        ValueError: There is no pattern, or one matches no layer.

    Examples:
        >>> import keras
        >>> layers = [keras.layers.Dense(4, "relu", name=f"hidden_{index}") for index in range(3)]
        >>> model = keras.Sequential([keras.Input([4]), *layers, keras.layers.Dense(1, name="head")])
        >>> model = recompute_layers(model, r"hidden_\d")
        >>> [type(layer).__name__ for layer in model.layers]
        ['Recompute', 'Recompute', 'Recompute', 'Dense']

    Provisional: a minor version may change it.
    """
    keras = _keras_of(model)
    wanted = [re.compile(pattern) for pattern in lists.names("patterns", patterns, "regular expressions")]
    paths = list(layers_by_path(keras, model))
    if not wanted:
        raise ValueError(f"pass a pattern for the layers to recompute; the model's layers are {', '.join(paths)}.")
    for pattern in wanted:
        if not any(pattern.fullmatch(path) for path in paths):
            raise ValueError(f"{pattern.pattern!r} matches none of the model's layers: {', '.join(paths)}.")
    chosen = {path for path in paths if any(pattern.fullmatch(path) for pattern in wanted)}
    return _rebuilt(keras, model, "", chosen)


def _rebuilt(keras: ModuleType, model: Any, prefix: str, chosen: set[str]) -> Any:  # noqa: ANN401
    replaced: dict[int, Any] = {}

    def replacement(layer: Any) -> Any:  # noqa: ANN401 - of any Keras
        path = f"{prefix}{layer.name}"
        if path in chosen:
            return Recompute(layer)
        if any(each.startswith(f"{path}/") for each in chosen):
            return _rebuilt(keras, layer, f"{path}/", chosen)
        return layer

    def once(layer: Any) -> Any:  # noqa: ANN401 - of any Keras
        # A layer that a model calls twice stays one layer.
        if id(layer) not in replaced:
            replaced[id(layer)] = replacement(layer)
        return replaced[id(layer)]

    rebuilt = _plain(keras, model, once)
    models = {key: each for key, each in replaced.items() if not isinstance(each, Recompute)}
    paths = sorted(path.removeprefix(prefix) for path in chosen if path.startswith(prefix))
    return with_class_of(keras, model, rebuilt, models, paths)


def _plain(keras: ModuleType, model: Any, replacement: Callable[[Any], Any]) -> Any:  # noqa: ANN401 - of any Keras
    """Return a plain functional or Sequential model, which is not compiled, with other layers."""
    if isinstance(model, keras.Sequential):
        return keras.models.clone_model(_not_compiled(keras, model), clone_function=replacement)
    if is_keras2(keras):
        return _functional_of_keras2(keras, model, replacement)
    bare = keras.Model(model.input, model.output, name=model.name)
    return keras.models.clone_model(bare, clone_function=replacement)


def _not_compiled(keras: ModuleType, model: Any) -> Any:  # noqa: ANN401 - of any Keras
    # A Sequential model that is not built has no inputs yet.
    return keras.Sequential([*(getattr(model, "inputs", None) or ()), *model.layers], name=model.name)


def _functional_of_keras2(keras: ModuleType, model: Any, replacement: Callable[[Any], Any]) -> Any:  # noqa: ANN401
    """Return a functional model that calls other layers in the same way: those that `replacement` returns for its own.

    `clone_model` of Keras 2 is for layers of the same kind: it cannot put a layer in the place of an inner model, whose
    calls it counts differently.
    """
    nodes = nodes_by_depth(model)
    if min(nodes) < 0:
        raise ValueError(
            f"the model {model.name!r} was given losses or metrics of symbolic tensors (model.add_loss, "
            "model.add_metric), and cannot be rebuilt: wrap its layers in tfmp.Recompute where they are made."
        )
    made: dict[int, Any] = {}
    for depth in sorted(nodes, reverse=True):
        for node in nodes[depth]:
            results = _new_input(node.layer) if node.is_input else _called_like(node, replacement(node.layer), made)
            made |= zip(map(id, tf.nest.flatten(node.outputs)), tf.nest.flatten(results), strict=True)
    ends = [tf.nest.map_structure(lambda tensor: made[id(tensor)], each) for each in (model.input, model.output)]
    return keras.Model(*ends, name=model.name)


def _new_input(layer: Any) -> Any:  # noqa: ANN401
    return type(layer).from_config(layer.get_config()).output


def _called_like(node: Any, layer: Any, made: dict[int, Any]) -> Any:  # noqa: ANN401
    """Call a layer as a node of the graph did, with tensors of the new model."""
    # `map_arguments` takes a tensor from its list each time that the call uses it.
    tensors = {str(id(tensor)): [made[id(tensor)]] * len(node.keras_inputs) for tensor in node.keras_inputs}
    args, kwargs = node.map_arguments(tensors)
    return layer(*args, **kwargs)


def layers_by_path(keras: ModuleType, model: Any) -> dict[str, Any]:  # noqa: ANN401 - of any Keras
    """Return the layers of a model and of the models in it that can be rebuilt, by their paths."""
    layers: dict[str, Any] = {}
    for path, layer in _layers_of(keras, model):
        # In Keras 2, a layer that only an attribute holds comes after those of the graph, and may have the same name.
        layers.setdefault(path, layer)
    return layers


def _layers_of(keras: ModuleType, model: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:  # noqa: ANN401
    """Yield the layers of a model and of the models in it that can be rebuilt, each with its path."""
    for layer in model.layers:
        if isinstance(layer, keras.layers.InputLayer):
            continue
        path = f"{prefix}{layer.name}"
        yield path, layer
        if not isinstance(layer, Recompute) and _can_be_rebuilt(keras, layer):
            yield from _layers_of(keras, layer, f"{path}/")


def _can_be_rebuilt(keras: ModuleType, model: Any) -> bool:  # noqa: ANN401
    if not isinstance(model, keras.Model):
        return False
    # Of the models that are not Sequential, only functional ones know their outputs.
    return isinstance(model, keras.Sequential) or bool(getattr(model, "outputs", None))


def _keras_of(model: Any) -> ModuleType:  # noqa: ANN401
    keras = keras_of(model, "Model")
    if keras is None:
        raise TypeError(f"model must be a model of Keras, got {model!r} of type {type(model).__name__}.")
    if not _can_be_rebuilt(keras, model):
        raise TypeError(
            f"the model {model.name!r} is a {type(model).__name__}, which is subclassed and cannot be rebuilt: "
            "wrap its layers in tfmp.Recompute where it makes them."
        )
    return keras
