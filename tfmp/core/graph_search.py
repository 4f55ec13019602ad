"""Finds the ops of a graph that an op depends on."""

import itertools
from collections.abc import Callable, Iterable, Iterator

import tensorflow as tf

#: The largest number of ops that a search should visit.
_MOST_OPS = 50_000


def ancestors(
    ops: Iterable[tf.Operation],
    *,
    along_control: bool = False,
    ends_at: Callable[[tf.Operation], bool] = lambda op: False,
) -> Iterator[tf.Operation]:
    """Yield ops of a graph and all ops that they depend on, those nearest to the given ones first.

    Control inputs are followed only if `along_control` is True, and no inputs of an op that the search `ends_at`.
    """
    queue = list(dict.fromkeys(ops))
    seen = set(queue)
    # The list grows while it is read.
    for op in queue:
        yield op
        if not ends_at(op):
            inputs = [*(tensor.op for tensor in op.inputs), *(op.control_inputs if along_control else ())]
            queue += [each for each in dict.fromkeys(inputs) if each not in seen]
            seen.update(inputs)


def with_ancestors(ops: Iterable[tf.Operation]) -> list[tf.Operation] | None:
    """Return what `ancestors` yields, or None if there are more than 50,000 ops."""
    found = list(itertools.islice(ancestors(ops), _MOST_OPS + 1))
    return found if len(found) <= _MOST_OPS else None


def calls_functions(op: tf.Operation) -> bool:
    """Return whether an op calls functions, such as branches of a conditional, whose ops a search does not visit."""
    return any(attribute.type in {"func", "list(func)"} for attribute in op.op_def.attr)
