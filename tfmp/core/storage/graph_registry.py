"""Stores objects in the graph to which they belong: objects made once for each graph, and lists of what it contains.

A manager may be made in one graph and used in another: Estimator builds a new graph for every call of `train`, while a
script may make its manager once, at the top. Objects that belong to one graph are therefore stored in a collection of
that graph, and are deleted together with the graph. The key of the collection is never a string, because TensorFlow
exports the collections whose keys are strings.
"""

from collections.abc import Callable, Hashable
from typing import Any, Generic, TypeVar

import tensorflow as tf

from tfmp.core.storage import graph_variables

Kept = TypeVar("Kept")


class OncePerGraph(Generic[Kept]):
    """Makes an object once for each graph and stores it there.

    `make` is called in the graph, outside control dependencies, conditionals and functions.

    Examples:
        >>> answer = OncePerGraph(lambda: tf.constant(42.0))
        >>> with tf.Graph().as_default():
        ...     answer.get() is answer.get()
        True
    """

    def __init__(self, make: Callable[[], Kept]) -> None:
        self._make = make

    def get(self) -> Kept:
        """Return the current graph's object, making it on the first call; in eager code, make a new one."""
        with tf.init_scope():
            if tf.executing_eagerly():
                return self._make()
            kept = _kept_in_graph(self)
            if not kept:
                # A slice is assigned, so that the list never has two objects: while this thread makes the object, the
                # thread of another replica may make one too. The last one stays, and all threads return it later.
                kept[:] = [self._make()]
            return kept[0]

    def made(self) -> Kept | None:
        """Return the current graph's object if it was made; None if it was not, and in eager code."""
        with tf.init_scope():
            kept = [] if tf.executing_eagerly() else _kept_in_graph(self)
            return kept[0] if kept else None

    def read(self) -> Kept:
        """Return the graph's object at the top level of a graph; under control dependencies or conditionals, a new one.

        This is for tensors that read variables. At the top level, a training loop may ask for them in every iteration
        without adding ops to the graph, and also after the graph was finalized.
        """
        return self.get() if graph_variables.at_top_level_of_graph() else self._make()


class GraphList(Generic[Kept]):
    """A named list in each graph of objects that were built there, so that a monitor finds them without the optimizer.

    In eager code there is no list, because nothing needs one.
    """

    def __init__(self, name: str) -> None:
        self._key = ("tfmp", name)

    def append(self, item: Kept) -> None:
        """Add an object to the current graph's list; in eager code, do nothing."""
        with tf.init_scope():
            if not tf.executing_eagerly():
                _kept_in_graph(self._key).append(item)

    def items(self) -> list[Kept]:
        """Return the objects in the current graph's list, in the order in which they were added."""
        return list(_kept_in_graph(self._key))


def _kept_in_graph(key: Hashable) -> list[Any]:
    return tf.compat.v1.get_collection_ref(key)
