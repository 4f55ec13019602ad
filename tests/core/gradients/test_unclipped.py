"""Gradients before they were clipped, for steps whose norm somebody wants to know."""

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import tensorflow as tf

import tfmp
from tfmp.core.gradients.unclipped import keep_unclipped, unclipped


def _rows() -> tf.IndexedSlices:
    return tf.IndexedSlices(tf.constant([[3.0]]), tf.constant([1]), tf.constant([2, 1]))


def _dense() -> tf.Tensor:
    return tf.constant([3.0, 4.0])


@pytest.mark.parametrize("make", [_dense, _rows])
@pytest.mark.parametrize("wrapped", [lambda function: function, tf.function], ids=["eager", "function"])
def test_gradient_before_clipping_is_known_only_if_it_is_kept(make: Callable[[], Any], wrapped: Any) -> None:
    @wrapped
    def check() -> None:
        grad = make()
        clipped, _ = tfmp.clip_by_global_norm([grad], 1.0)
        assert unclipped(clipped[0]) is clipped[0]
        keep_unclipped(grad)
        assert unclipped(grad) is grad
        twice = tfmp.clip_by_value(tfmp.clip_by_norm([grad], 1.0), -0.5, 0.5)
        assert unclipped(twice[0]) is grad

    check()


@pytest.mark.graph
def test_gradient_before_clipping_is_known_in_a_graph(session: tf.compat.v1.Session) -> None:
    grad = tf.compat.v1.placeholder(tf.float32, [2])
    keep_unclipped(grad)
    (clipped,) = tfmp.clip_by_norm([grad], 1.0)
    assert unclipped(clipped) is grad


def test_none_is_its_own_gradient() -> None:
    keep_unclipped(None)
    assert unclipped(None) is None


def test_gradient_lives_as_long_as_what_was_clipped_from_it() -> None:
    grad = _dense()
    keep_unclipped(grad)
    (clipped,) = tfmp.clip_by_norm([grad], 1.0)
    gone = weakref.ref(grad)
    del grad
    assert unclipped(clipped) is gone()
    del clipped
    assert gone() is None


def test_graph_in_which_gradients_were_clipped_is_deleted() -> None:
    with tf.Graph().as_default() as graph:
        grad = _dense()
        keep_unclipped(grad)
        tfmp.clip_by_norm([grad], 1.0)
    gone = weakref.ref(graph)
    del graph, grad
    gc.collect()
    assert gone() is None


def test_nothing_is_set_on_tensors() -> None:
    grad = _dense()
    before = dict(vars(grad))
    keep_unclipped(grad)
    (clipped,) = tfmp.clip_by_norm([grad], 1.0)
    assert (vars(grad), vars(clipped)) == (before, {})
