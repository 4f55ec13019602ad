"""A functional model of Keras 2 again, with other layers."""

from collections.abc import Callable
from types import ModuleType
from typing import Any

import tensorflow as tf


def rebuilt_functional(keras: ModuleType, model: Any, replacement: Callable[[Any], Any]) -> Any:  # noqa: ANN401 - of either package
    """Return a functional model that calls other layers in the same way: those that `replacement` returns for its own.

    `clone_model` of Keras 2 is for layers of the same kind: it cannot put a layer in the place of an inner model, whose
    calls it counts differently.
    """
    # Private, but the only way to learn how the layers are connected. Keras 2 does not change any more.
    nodes_by_depth = model._nodes_by_depth
    if min(nodes_by_depth) < 0:
        raise ValueError(
            f"the model {model.name!r} was given losses or metrics of symbolic tensors (model.add_loss, "
            "model.add_metric), and cannot be rebuilt: wrap its layers in tfmp.Recompute where they are made."
        )
    made: dict[int, Any] = {}
    for depth in sorted(nodes_by_depth, reverse=True):
        for node in nodes_by_depth[depth]:
            results = _new_input(node.layer) if node.is_input else _called(replacement(node.layer), node, made)
            made |= zip(map(id, tf.nest.flatten(node.outputs)), tf.nest.flatten(results), strict=True)
    ends = [tf.nest.map_structure(lambda tensor: made[id(tensor)], each) for each in (model.input, model.output)]
    return keras.Model(*ends, name=model.name)


def _new_input(layer: Any) -> Any:  # noqa: ANN401 - of either package
    return type(layer).from_config(layer.get_config()).output


def _called(layer: Any, node: Any, made: dict[int, Any]) -> Any:  # noqa: ANN401 - of either package
    """Call a layer as a node of the graph did, with tensors of the new model."""
    # `map_arguments` takes a tensor from its list each time that the call uses it.
    tensors = {str(id(tensor)): [made[id(tensor)]] * len(node.keras_inputs) for tensor in node.keras_inputs}
    args, kwargs = node.map_arguments(tensors)
    return layer(*args, **kwargs)
