import gc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tfmp.core.gradients.unscaled_gradients import UnscaledGradients, is_computed_from_scaled, is_zero


def _sparse(value: float) -> tf.IndexedSlices:
    return tf.IndexedSlices(tf.constant([value]), tf.constant([0]), tf.constant([2]))


def _rows(grad: tf.IndexedSlices) -> tf.IndexedSlices:
    return tf.IndexedSlices(grad.values, grad.indices, grad.dense_shape)


def test_tensors_are_known_by_identity_and_sparse_gradients_by_their_values() -> None:
    dense, sparse, result = tf.constant(8.0), _sparse(8.0), _sparse(1.0)
    unscaled = UnscaledGradients()
    unscaled.add([dense, None, sparse], [dense / 8, None, result])
    given = [dense, sparse, _rows(sparse), sparse.values]
    others = [None, tf.constant(8.0), _sparse(8.0), result, 8.0]
    assert [unscaled.got(grad) for grad in [*given, *others]] == [True] * 4 + [False] * 5
    assert [unscaled.returned(grad) for grad in [result, _rows(result), sparse, None]] == [True, True, False, False]
    assert unscaled.count == 2


def test_what_was_made_before_the_first_result_precedes_all() -> None:
    first, second, unscaled = tf.constant(8.0), tf.constant(16.0), UnscaledGradients()
    assert not unscaled.precede(first)
    results = [first / 8]
    unscaled.add([first], results)
    between = tf.constant(24.0)
    unscaled.add([second], [second / 8])
    assert unscaled.count == 2
    known = [first, second, *results, between, tf.minimum(results[0], 0.5), None, 8.0, tf.Variable(1.0)]
    assert [unscaled.precede(grad) for grad in known] == [True, True] + [False] * 6


def test_tensors_of_a_function_have_their_order_too() -> None:
    found = []

    @tf.function
    def trace(scaled: tf.Tensor) -> None:
        unscaled, rest = UnscaledGradients(), scaled * 2
        result = scaled / 8
        unscaled.add([scaled], [result])
        found.extend((unscaled.got(scaled), *map(unscaled.precede, (scaled, rest, result, result * 2))))

    trace(tf.constant(8.0))
    assert found == [True, True, True, False, False]


def test_graph_tells_what_is_computed_from_scaled_gradients_and_not_from_results() -> None:
    found = []

    @tf.function
    def trace(first: tf.Tensor, second: tf.Tensor) -> None:
        parts = UnscaledGradients(), UnscaledGradients()
        older, results = first * 2, [first / 8]
        parts[0].add([first], results)
        lazy = second * 2
        results.append(lazy / 8)
        parts[1].add([lazy], results[1:])
        both = tf.linalg.global_norm([first, *results])
        sparse = tf.IndexedSlices(tf.minimum(lazy, 0.5), tf.constant([0]))
        within = tf.cond(tf.constant(True), lambda: tf.minimum(lazy, 0.5), lambda: lazy)
        known = [tf.minimum(first, 0.5), tf.minimum(lazy, 0.5), sparse, within, first, older * 2]
        known += [results[0], tf.minimum(results[1], 0.5), results[0] * both, tf.constant(1.0), None, tf.Variable]
        found.extend(is_computed_from_scaled(grad, parts) for grad in known)

    trace(tf.constant([8.0]), tf.constant([8.0]))
    assert found == [True] * 4 + [False] * 8
    unscaled = UnscaledGradients()
    unscaled.add([tf.constant(8.0)], [tf.constant(1.0)])
    assert not is_computed_from_scaled(tf.constant(1.0), [unscaled])


@pytest.mark.parametrize("make", [tf.Variable, np.array], ids=["variable", "array"])
def test_gradient_whose_values_can_be_replaced_is_refused(make: Callable[[list[float]], Any]) -> None:
    unscaled, kept = UnscaledGradients(), make([8.0])
    unscaled.add([kept], [tf.constant([1.0])])
    assert not unscaled.got(make([8.0]))
    with pytest.raises(RuntimeError, match=r"^a gradient is a \w+ that .* or copy its values first: tf.identity"):
        unscaled.got(kept)


def test_no_tensor_is_kept_alive() -> None:
    unscaled, given = UnscaledGradients(), [tf.constant(8.0)]
    unscaled.add(given, [tf.constant(1.0)])
    assert (len(unscaled._given), len(unscaled._returned)) == (1, 0)
    given.clear()
    gc.collect()
    assert len(unscaled._given) == 0


def test_zeros_are_known_by_their_values_or_in_a_graph_by_their_op() -> None:
    assert [is_zero(grad) for grad in [tf.zeros([2]), _sparse(0.0), tf.constant([0.0, 1.0]), np.zeros(2), None]] == [
        *[True] * 2,
        *[False] * 3,
    ]
    with tf.Graph().as_default():
        fed = tf.compat.v1.placeholder(tf.float32, [None])
        assert [is_zero(grad) for grad in [tf.zeros_like(fed), fed, fed * 0]] == [True, False, False]
