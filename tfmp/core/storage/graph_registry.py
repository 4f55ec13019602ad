"""Stores what belongs to a graph in that graph, so that it is deleted together with the graph.

A manager may be made in one graph and used in another: Estimator builds a new graph for every call of `train`, while a
script may make its manager once, at the top.
"""

from collections.abc import Callable
from typing import Generic, TypeVar

import tensorflow as tf

Kept = TypeVar("Kept")


class OncePerGraph(Generic[Kept]):
    """Makes an object once for each graph: outside control dependencies, conditionals and functions.

    With `make=list` it is a list in each graph, by which a monitor finds what is built there. In eager code nothing is
    kept, so that such a list is empty.
    """

    def __init__(self, make: Callable[[], Kept]) -> None:
        self._make = make

    def get(self) -> Kept:
        """Return the current graph's object, making it on the first call; in eager code, make a new one."""
        with tf.init_scope():
            if tf.executing_eagerly():
                return self._make()
            kept = self._kept()
            if not kept:
                # A slice is assigned, so that the list never has two objects: while this thread makes the object, the
                # thread of another replica may make one too. The last one stays, and all threads return it later.
                kept[:] = [self._make()]
            return kept[0]

    def made(self) -> Kept | None:
        """Return the current graph's object if it was made; None if it was not, and in eager code."""
        with tf.init_scope():
            kept = [] if tf.executing_eagerly() else self._kept()
            return kept[0] if kept else None

    def _kept(self) -> list[Kept]:
        # The key of the collection is no string, because TensorFlow exports the collections whose keys are strings.
        kept: list[Kept] = tf.compat.v1.get_collection_ref(self)
        return kept
