"""Which variables a call of a Keras 2 layer changes, so that a second call can start from the same values."""

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import tensorflow as tf

from tfmp.core.tensorflow_internals import new_function_graph
from tfmp.recomputation.stateful_ops import refuse_state

#: The handle of a variable, and the type of its value.
ChangedVariable: TypeAlias = tuple[tf.Tensor, tf.DType]

_READS = frozenset({"ReadVariableOp", "ResourceGather", "ResourceGatherNd", "VariableShape", "VarIsInitializedOp"})


class ChangedVariables:
    """What the calls of one layer change, found by tracing each kind of call into a graph that is thrown away.

    The trace also makes the layer's weights, if that was not done before.
    """

    def __init__(self, layer_name: str) -> None:
        self._layer_name = layer_name
        self._known: dict[tuple[object, ...], list[ChangedVariable]] = {}

    def __reduce__(self) -> Any:  # noqa: ANN401 - what pickle wants
        # A copy belongs to a copy of the layer, which has other variables.
        return type(self), (self._layer_name,)

    def of(self, call: Callable[[], object], arguments: Sequence[Any], training: object) -> list[ChangedVariable]:
        """Return the variables that a call changes, on this replica; `arguments` are its flat arguments.

        A call is refused if it does something that a second call would repeat, or do differently.
        """
        kind = (_replica(), *map(_kind, arguments))
        if kind not in self._known:
            self._known[kind] = self._traced(call, training)
        return self._known[kind]

    def _traced(self, call: Callable[[], object], training: object) -> list[ChangedVariable]:
        scope = tf.get_current_name_scope()
        # Keras traces its symbolic calls into such a graph too. A `tf.function` would own the variables that the layer
        # makes.
        graph = new_function_graph("changed_variables")
        with graph.as_default(), tf.name_scope(scope and f"{scope}/"):
            call()
        handles = {
            id(inside): outside for outside, inside in graph.captures if getattr(outside, "dtype", None) == tf.resource
        }
        changed: dict[int, ChangedVariable] = {}
        others = []
        for op in graph.get_operations():
            used = [handles[id(tensor)] for tensor in op.inputs if id(tensor) in handles]
            if op.type in _READS or not used or not _changes_one_variable(op):
                others.append(op)
            else:
                changed[id(used[0])] = used[0], _dtype_of_variable(op)
        self._refuse(others, training)
        return list(changed.values())

    def _refuse(self, operations: Sequence[tf.Operation], training: object) -> None:
        try:
            refuse_state(operations, f"the layer {self._layer_name!r}, called with training={training},")
        except ValueError as error:
            raise ValueError(
                f"{error} Of Keras' own layers, those that draw random numbers can be recomputed if "
                "keras.backend.experimental.enable_tf_random_generator() is called before they are made. Otherwise "
                "leave them outside of tfmp.Recompute."
            ) from None


def _replica() -> object:
    """Return the number of this replica: each one has variables of its own."""
    context = tf.distribute.get_replica_context()
    return None if context is None else _number(context.replica_id_in_sync_group)


def _number(value: object) -> object:
    static = tf.get_static_value(value)
    return None if static is None else int(static)


def _kind(argument: Any) -> object:  # noqa: ANN401 - anything that a layer takes
    """Return what a layer's Python code may depend on."""
    if tf.is_tensor(argument):
        return argument.dtype, argument.shape.rank
    return argument if isinstance(argument, bool | int | str | None) else type(argument)


def _changes_one_variable(op: tf.Operation) -> bool:
    return op.type.startswith(("Assign", "Resource", "Rng", "Stateful")) and op.type != "StatefulPartitionedCall"


def _dtype_of_variable(op: tf.Operation) -> tf.DType:
    if op.type.startswith(("Rng", "Stateful")):
        # The state of a tf.random.Generator.
        return tf.int64
    return op.get_attr("dtype" if op.type.startswith(("Assign", "ResourceScatter")) else "T")
