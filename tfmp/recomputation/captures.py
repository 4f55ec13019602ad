"""The tensors that a function uses and that are not its arguments."""

from collections.abc import Iterable, Sequence

import tensorflow as tf

from tfmp.core.tensorflow_internals import is_watched
from tfmp.recomputation.structure import is_differentiable


def captured_tensors(
    graph: tf.Graph, operations: Iterable[tf.Operation], inputs: Sequence[tf.Tensor], outputs: Sequence[tf.Tensor]
) -> list[tf.Tensor]:
    """Return the floating-point tensors that a function used beside its inputs, as the function itself knows them.

    `operations` are the ops that the function added to the graph.

    Examples:
        >>> with tf.Graph().as_default() as graph:
        ...     a, b = tf.constant(1.0), tf.constant(2.0)
        ...     product = a * b
        ...     captured_tensors(graph, [product.op], [a], [product]) == [b]
        True
    """
    names = {op.name for op in operations}
    # The graph of a function has copies of tensors from outside.
    originals = {copy.name: original for original, copy in getattr(graph, "captures", ())}
    captured = {}
    for tensor in (*(tensor for op in operations for tensor in op.inputs), *outputs):
        if not is_differentiable(tensor):
            continue
        original = originals.get(tensor.name, tensor) if _is_of(graph, tensor) else tensor
        if original is not tensor or not _is_of(graph, tensor) or tensor.op.name not in names:
            captured[original.ref()] = original
    arguments = {(originals.get(tensor.name, tensor) if _is_of(graph, tensor) else tensor).ref() for tensor in inputs}
    return [tensor for reference, tensor in captured.items() if reference not in arguments]


def refuse_watched(captured: Iterable[tf.Tensor | tf.Variable]) -> None:
    """Refuse captured tensors and variables that a tape watches, where their gradients would be lost."""
    for each in captured:
        if is_watched(getattr(each, "handle", each)):
            kind = "variable" if isinstance(each, tf.Variable) else "tensor"
            raise ValueError(
                f"what is recomputed uses a {kind} ({each.dtype.name}, shape {each.shape}) that is not among its "
                "arguments, and a tape watches it: its gradient would be None. Pass it as an argument."
            )


def _is_of(graph: tf.Graph, tensor: tf.Tensor) -> bool:
    return getattr(tensor, "graph", None) is graph
