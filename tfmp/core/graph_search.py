"""Finds the ops of a graph that an op depends on."""

from collections import deque
from collections.abc import Collection, Sequence

import tensorflow as tf

#: The largest number of ops that a search visits.
_MOST_OPS = 50_000


def with_ancestors(ops: Sequence[tf.Operation], excluded: Collection[str] = ()) -> list[tf.Operation] | None:
    """Return ops of a graph and all ops of that graph that they depend on.

    Args:
        ops: The ops to begin with.
        excluded: The names of ops that must not be among them.

    Returns:
        The ops, those nearest to the given ones first; None if there are more than 50,000, or if one of the `excluded`
        ones is among them.

    Examples:
        >>> with tf.Graph().as_default():
        ...     x = tf.constant(2.0, name="x")
        ...     [op.type for op in with_ancestors([tf.square(x + 1.0).op])]
        ['Square', 'AddV2', 'Const', 'Const']
    """
    queue, seen = deque(ops), set(ops)
    ancestors = []
    while queue:
        op = queue.popleft()
        if op.name in excluded or len(seen) > _MOST_OPS:
            return None
        ancestors.append(op)
        inputs = [tensor.op for tensor in op.inputs if tensor.op not in seen]
        seen.update(inputs)
        queue.extend(dict.fromkeys(inputs))
    return ancestors


def calls_functions(op: tf.Operation) -> bool:
    """Return whether an op calls functions, such as branches of a conditional, whose ops a search does not visit."""
    return any(attribute.type in {"func", "list(func)"} for attribute in op.op_def.attr)
