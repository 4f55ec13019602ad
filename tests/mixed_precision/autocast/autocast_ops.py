"""The types of the ops of a graph, and the types that the documented rule predicts for them."""

from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf
from tensorflow.python.framework import op_def_registry

import tfmp

#: An op and the floating-point types that it computes in: one for most ops, two for fused batch normalization.
OpType = tuple[str, tuple[str, ...]]

_FLOATS = ("float16", "bfloat16", "float32", "float64")

#: Casts are what autocast adds, and constants take the types of those that use them.
_LEFT_OUT = ("Cast", "Const")


def types_of_ops(graph: tf.Graph) -> list[OpType]:
    """Return the ops of a graph and of its functions with the floating-point types that they compute in."""
    found = []
    for node in _nodes(graph):
        attributes = [attribute for attribute in _groups(node.op) if attribute in node.attr]
        types = [tf.as_dtype(node.attr[attribute].type).name for attribute in attributes]
        floats = tuple(name for name in types if name in _FLOATS)
        if floats and node.op not in _LEFT_OUT:
            found.append((node.op, floats))
    return found


def op_counts(graph: tf.Graph) -> dict[str, int]:
    """Return how often each op stands in a graph and its functions."""
    ops = [node.op for node in _nodes(graph)]
    return {op: ops.count(op) for op in ops}


def traced(function: Callable[..., Any], *args: Any) -> tf.Graph:
    """Return the graph of a function."""
    return tf.function(function, autograph=False).get_concrete_function(*args).graph


def predicted_types(graph: tf.Graph, dtype: str) -> list[OpType]:
    """Return which types the ops of a graph that was made without autocast would compute in with it.

    The rule, as `tfmp.mixed_precision.autocast_lists` has it: what is on the list `allow` computes in half precision,
    and what is on `deny` in float32. What is on `infer` or `clear` computes in the widest type of its inputs, where a
    weight or a scalar does not make it wider, and neither does what is computed from `gates` alone. Others compute in
    float32 if a result is a floating-point number and they have no state, else in the type that they are given. float64
    stays.
    """
    lists = tfmp.mixed_precision.autocast_lists(dtype)
    now: dict[str, str] = {}
    gates: set[str] = set()

    def computed_in(op: tf.Operation, attribute: str, values: list[tf.Tensor]) -> str | None:
        given = {now[value.name] for value in values}
        if not given <= set(_FLOATS):
            return None
        results = [(result.type_attr, result.type and tf.as_dtype(result.type).name) for result in op.op_def.output_arg]
        returns_floats = any(each == attribute or dtype in _FLOATS for each, dtype in results)
        is_unlisted = not any(op.type in ops for ops in lists)
        if "float64" in given:
            wanted = "float64"
        elif op.type in lists.allow and dtype in _allowed(op.type, attribute):
            wanted = dtype
        elif op.type in lists.deny | lists.gates or (is_unlisted and returns_floats and not op.op_def.is_stateful):
            wanted = "float32"
        else:
            large = [value for value in values if value.shape.rank != 0]
            activations = [value for value in large if not _is_read(value)]
            deciding = [value for value in activations if value.name not in gates] or activations or large or values
            types = {now[value.name] for value in deciding}
            wanted = types.pop() if len(types) == 1 else "float32"
        return wanted if wanted in _allowed(op.type, attribute) else "float32"

    found = []
    for op in graph.get_operations():
        computed = {attribute: computed_in(op, attribute, values) for attribute, values in _inputs_by_type(op).items()}
        for result, tensor in _results(op):
            now[tensor.name] = computed.get(result.type_attr) or tensor.dtype.base_dtype.name
        large = [value for value in op.inputs if value.shape.rank != 0 and now.get(value.name) in _FLOATS]
        is_gate = [value.name in gates for value in large]
        is_of_gates = any(is_gate) and all(each or _is_read(one) for each, one in zip(is_gate, large, strict=True))
        is_gate_of_half = op.type in lists.gates and now[op.inputs[0].name] == dtype
        if is_gate_of_half or (is_of_gates and op.type in lists.infer | lists.clear | lists.gates):
            gates.update(tensor.name for tensor in op.outputs)
        if op.type == "IdentityN":
            now.update({tensor.name: now[value.name] for value, tensor in zip(op.inputs, op.outputs, strict=True)})
        floats = tuple(each for each in computed.values() if each is not None)
        if floats and op.type not in _LEFT_OUT:
            found.append((op.type, floats))
    return found


def _nodes(graph: tf.Graph) -> Iterator[Any]:
    graph_def = graph.as_graph_def()
    yield from graph_def.node
    for function in graph_def.library.function:
        yield from function.node_def


def _groups(op: str) -> list[str]:
    op_def = op_def_registry.get(op)
    found = [] if op_def is None else [given.type_attr for given in op_def.input_arg if given.type_attr]
    return list(dict.fromkeys(found))


def _allowed(op: str, attribute: str) -> list[str]:
    (types,) = (each.allowed_values.list.type for each in op_def_registry.get(op).attr if each.name == attribute)
    return [tf.as_dtype(number).name for number in types] or list(_FLOATS)


def _inputs_by_type(op: tf.Operation) -> dict[str, list[tf.Tensor]]:
    values = list(op.inputs)
    found: dict[str, list[tf.Tensor]] = {}
    for given in op.op_def.input_arg:
        count = _count(op, given)
        if given.type_attr:
            found.setdefault(given.type_attr, []).extend(values[:count])
        values = values[count:]
    return {attribute: group for attribute, group in found.items() if group}


def _results(op: tf.Operation) -> Iterator[tuple[Any, tf.Tensor]]:
    tensors = list(op.outputs)
    for result in op.op_def.output_arg:
        count = _count(op, result)
        yield from ((result, tensor) for tensor in tensors[:count])
        tensors = tensors[count:]


def _count(op: tf.Operation, argument: Any) -> int:
    if argument.number_attr:
        return int(op.get_attr(argument.number_attr))
    return len(op.get_attr(argument.type_list_attr)) if argument.type_list_attr else 1


def _is_read(value: tf.Tensor) -> bool:
    op = value.op.inputs[0].op if value.op.type == "Identity" else value.op
    return op.type == "ReadVariableOp"
