"""The search for the ops that an op depends on."""

import pytest
import tensorflow as tf

from tfmp.core import graph_search
from tfmp.core.graph_search import with_ancestors

pytestmark = pytest.mark.graph


def test_ops_are_found_once_nearest_first() -> None:
    with tf.Graph().as_default():
        start = tf.constant(2.0, name="start")
        square = tf.square(start, name="square")
        tf.add(square, 1.0, name="other")
        found = with_ancestors([tf.add(square, start, name="sum").op])
    assert [op.name for op in found or []] == ["sum", "square", "start"]


def test_excluded_ops_and_large_graphs_end_the_search(monkeypatch: pytest.MonkeyPatch) -> None:
    with tf.Graph().as_default():
        total = tf.add(tf.square(tf.constant(2.0), name="square"), 1.0)
    assert with_ancestors([total.op], excluded={"square"}) is None
    monkeypatch.setattr(graph_search, "_MOST_OPS", 3)
    assert with_ancestors([total.op]) is None
