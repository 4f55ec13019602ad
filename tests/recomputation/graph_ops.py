"""What tests of recomputation look for among the ops of a graph."""

from collections.abc import Callable
from typing import Any

import tensorflow as tf


def needed_for(op: tf.Operation) -> list[tf.Operation]:
    """Return the op and all that run before it."""
    found, waiting = {}, [op]
    while waiting:
        each = waiting.pop()
        if each.name not in found:
            found[each.name] = each
            waiting += [*(tensor.op for tensor in each.inputs), *each.control_inputs]
    return list(found.values())


def read_for(grad: tf.Tensor) -> set[str]:
    """Return the names of the ops that read variables before a gradient is known."""
    return {op.name for op in needed_for(grad.op) if op.type == "ReadVariableOp"}


def ops_of_a_gradient(
    block: Callable[[tf.Tensor], tf.Tensor], x: tf.TensorSpec, *, in_graph: bool = False
) -> tuple[list[tf.Operation], list[tf.Operation]]:
    """Return the ops that a call of a block adds to a function, or graph, and those that its gradient for `x` adds."""
    marks: list[int] = []

    def gradient(x: tf.Tensor) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = block(x)
            loss = tf.sin(y)
        marks.append(len(tf.compat.v1.get_default_graph().get_operations()))
        return tape.gradient(loss, x)

    if in_graph:
        with tf.Graph().as_default() as graph:
            gradient(tf.compat.v1.placeholder(x.dtype, x.shape))
    else:
        graph = tf.function(gradient).get_concrete_function(x).graph
    operations = graph.get_operations()
    return operations[: marks[-1]], operations[marks[-1] :]
