"""What tests of recomputation look for among the ops of a graph."""

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
