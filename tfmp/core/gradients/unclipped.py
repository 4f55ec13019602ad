"""Remembers from which gradients others were clipped, for steps whose norm before clipping somebody wants to know."""

import weakref
from collections.abc import Iterator
from typing import TypeAlias

import tensorflow as tf

from tfmp.core import lists
from tfmp.types import Gradient

#: By the identity of the tensor with a gradient's values: a weak reference to this tensor, and the gradient from which
#: it was clipped; None if it was not clipped.
_Known: TypeAlias = dict[int, tuple["weakref.ref[tf.Tensor]", Gradient]]

# State of the module, because `tfmp.clip_by_norm` and its like are free functions: they get gradients alone, and know
# no step that could keep this. An entry goes with its tensor.
_IN_EAGER_CODE: _Known = {}
_IN_GRAPH = ("tfmp", "unclipped")


def keep_unclipped(grad: Gradient) -> None:
    """Let what is clipped from a gradient be known as such; in eager code the gradient then lives as long as that."""
    _remember(grad, None)


def note_clipped(clipped: Gradient, grad: Gradient) -> None:
    """Remember that a gradient was clipped from another one, if the other one is known."""
    known = _of(grad)
    if known is not None:
        _remember(clipped, grad if known[1] is None else known[1])


def unclipped(grad: Gradient) -> Gradient:
    """Return the gradient from which one was clipped, if that is known; otherwise the gradient itself."""
    known = _of(grad)
    return grad if known is None or known[1] is None else known[1]


def _remember(grad: Gradient, before: Gradient) -> None:
    values = lists.values(grad)
    if values is not None:
        known, number = _known_here(), id(values)
        known[number] = weakref.ref(values, lambda _: known.pop(number, None)), before


def _of(grad: Gradient) -> tuple["weakref.ref[tf.Tensor]", Gradient] | None:
    number = id(lists.values(grad))
    return next((known[number] for known in _known_around() if number in known), None)


def _known_here() -> _Known:
    if tf.executing_eagerly():
        return _IN_EAGER_CODE
    # In the graph itself, which refers to its tensors, and is deleted together with them.
    kept: list[_Known] = tf.compat.v1.get_collection_ref(_IN_GRAPH)
    if not kept:
        kept[:] = [{}]
    return kept[0]


def _known_around() -> Iterator[_Known]:
    # The graph of a function, which can be a branch, may clip gradients of the graphs around it, and of eager code.
    graph = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
    while graph is not None:
        yield from graph.get_collection(_IN_GRAPH)
        graph = getattr(graph, "outer_graph", None)
    yield _IN_EAGER_CODE
