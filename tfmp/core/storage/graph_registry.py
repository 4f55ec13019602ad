"""Keeps what belongs to a graph in that graph: objects made once for it, and lists of what was built in it.

A manager may be made in one graph and used in another: Estimator builds a graph of its own for every call of `train`,
and a manager may stand at the top of a script. So what belongs to a graph lives in a collection of that graph, and goes
when the graph goes. The collection's key is never a string, because TensorFlow exports collections whose key is one.
"""

from collections.abc import Callable, Hashable
from typing import Any, Generic, TypeVar

import tensorflow as tf

from tfmp.core.storage import graph_variables

Kept = TypeVar("Kept")


class OncePerGraph(Generic[Kept]):
    """Makes an object once for each graph, outside any control context, and keeps it there.

    Args:
        make: Called in the graph, with no control dependency and in no conditional.

    Example:
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
                # By slice: while this thread makes the object, the thread of another replica may come here and make
                # one too. The last one stays, and is the one that all of them return.
                kept[:] = [self._make()]
            return kept[0]

    def read(self) -> Kept:
        """Return the graph's object at the top level of a graph; under control dependencies or conditionals, a new one.

        For tensors that are read often: a training loop that asks again and again does not grow the graph, and may ask
        when the graph is final.
        """
        return self.get() if graph_variables.at_top_level_of_graph() else self._make()


class GraphList(Generic[Kept]):
    """A list for each graph of what was built in it, for monitors that are given no optimizer.

    Eager code needs no list, and has none.

    Args:
        name: Tells the lists of one graph apart.

    Example:
        >>> losses = GraphList("example")
        >>> with tf.Graph().as_default():
        ...     losses.append("a loss")
        ...     losses.items()
        ['a loss']
    """

    def __init__(self, name: str) -> None:
        self._key = ("tfmp", name)

    def append(self, item: Kept) -> None:
        """Add an object to the current graph's list; in eager code, do nothing.

        Args:
            item: The object.
        """
        with tf.init_scope():
            if not tf.executing_eagerly():
                _kept_in_graph(self._key).append(item)

    def items(self) -> list[Kept]:
        """Return what the current graph's list holds, in the order of building."""
        return list(_kept_in_graph(self._key))


def _kept_in_graph(key: Hashable) -> list[Any]:
    return tf.compat.v1.get_collection_ref(key)
