"""Finds the ops of a graph that an op depends on."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence

import tensorflow as tf

#: The largest number of ops that a search should visit.
_MOST_OPS = 50_000


def ancestors(
    ops: Iterable[tf.Operation],
    *,
    along_control: bool = False,
    ends_at: Callable[[tf.Operation], bool] = lambda op: False,
) -> Iterator[tf.Operation]:
    """Yield ops of a graph and all ops of that graph that they depend on, those nearest to the given ones first.

    Control inputs are followed only if `along_control` is True. The inputs of an op that the search `ends_at` are not
    followed.
    """
    queue = deque(dict.fromkeys(ops))
    seen = set(queue)
    while queue:
        op = queue.popleft()
        yield op
        if ends_at(op):
            continue
        inputs = [*(tensor.op for tensor in op.inputs), *(op.control_inputs if along_control else ())]
        new = dict.fromkeys(each for each in inputs if each not in seen)
        seen.update(new)
        queue.extend(new)


def with_ancestors(ops: Sequence[tf.Operation]) -> list[tf.Operation] | None:
    """Return what `ancestors` yields, or None if there are more than 50,000 ops.

    Examples:
        >>> with tf.Graph().as_default():
        ...     x = tf.constant(2.0, name="x")
        ...     [op.type for op in with_ancestors([tf.square(x + 1.0).op])]
        ['Square', 'AddV2', 'Const', 'Const']
    """
    found: list[tf.Operation] = []
    for op in ancestors(ops):
        if len(found) == _MOST_OPS:
            return None
        found.append(op)
    return found


def calls_functions(op: tf.Operation) -> bool:
    """Return whether an op calls functions, such as branches of a conditional, whose ops a search does not visit."""
    return any(attribute.type in {"func", "list(func)"} for attribute in op.op_def.attr)
