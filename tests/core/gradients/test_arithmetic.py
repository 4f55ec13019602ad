"""Scaling and unscaling, the forms of gradients, and which gradients a user has unscaled."""

import functools
import math
import weakref

import numpy as np
import pytest
import tensorflow as tf
from gradient_forms import gradient, in_every_form, of_every_type
from hypothesis import given
from hypothesis import strategies as st

from tfmp.core.gradients import arithmetic
from tfmp.core.gradients.unscaled_gradients import UnscaledGradients, is_computed_from_scaled, is_zero


@of_every_type
def test_scaled_loss_is_at_least_float32(dtype: tf.DType) -> None:
    scaled = arithmetic.scale(tf.constant(3.0, dtype), tf.constant(2.0**20))
    assert scaled.dtype == (tf.float64 if dtype == tf.float64 else tf.float32)
    assert float(scaled) == 3 * 2.0**20


@in_every_form
@of_every_type
def test_unscaled_gradient_has_true_magnitude_and_keeps_its_form(dtype: tf.DType, form: str) -> None:
    grad = gradient([8.0, -16.0], dtype, form)
    unscaled, none = arithmetic.unscale([grad, None], tf.constant(2.0**25))
    assert (type(unscaled), none) == (type(grad), None)
    assert unscaled.dtype == (tf.float64 if dtype == tf.float64 else tf.float32)
    values = unscaled.values if form == "indexed" else unscaled
    assert values.numpy().tolist() == [2.0**-22, -(2.0**-21)]


@given(st.lists(st.floats(-1e4, 1e4, width=32, allow_subnormal=False), min_size=1, max_size=5), st.integers(0, 60))
def test_power_of_two_scale_is_exactly_undone(values: list[float], exponent: int) -> None:
    values = [value for value in values if abs(value) > 2.0**-60] or [1.0]
    scale = tf.constant(2.0**exponent)
    (unscaled,) = arithmetic.unscale([arithmetic.scale(tf.constant(values), scale)], scale)
    assert unscaled.numpy().tolist() == np.float32(values).tolist()


@pytest.mark.parametrize(("count", "padded_count"), [(0, 1), (1, 1), (2, 2), (3, 4), (8, 8), (9, 16)])
def test_rows_are_padded_to_a_power_of_two(count: int, padded_count: int) -> None:
    indices = tf.constant([3, 1, 2, 1, 0, 0, 2, 2, 1][:count], tf.int64)
    slices = tf.IndexedSlices(tf.ones([count, 2], tf.float16), indices, tf.constant([4, 2]))
    padded = arithmetic.pad_rows(slices)
    added = padded_count - count
    assert padded.values.dtype == tf.float16
    assert padded.values.numpy().tolist() == [[1, 1]] * count + [[0, 0]] * added
    # No row gets a gradient that had none.
    assert padded.indices.dtype == tf.int64
    assert padded.indices.numpy().tolist() == [*indices.numpy().tolist(), *[3 if count else 0] * added]
    assert padded.dense_shape is slices.dense_shape
    # Other forms have no rows.
    for grad in (None, tf.ones([3])):
        assert arithmetic.pad_rows(grad) is grad


def test_cast_to_a_narrower_type_can_overflow_and_densify_sums_rows_with_the_same_index() -> None:
    assert arithmetic.cast(tf.constant([1e6]), tf.float16).numpy().tolist() == [math.inf]
    slices = tf.IndexedSlices(tf.constant([[1.0], [2.0]]), tf.constant([2, 2]), tf.constant([3, 1]))
    assert arithmetic.densify(slices).numpy().tolist() == [[0.0], [0.0], [3.0]]
    # None stays None in all functions.
    assert (arithmetic.cast(None, tf.float16), arithmetic.densify(None)) == (None, None)


_sparse = functools.partial(gradient, form="indexed")


def test_forms_tell_which_gradients_are_there_and_which_are_sparse() -> None:
    grads = [tf.constant(1.0), None, _sparse([2.0, 3.0])]
    forms = arithmetic.forms(grads)
    assert forms.dtype == tf.bool
    assert forms.numpy().tolist() == [[True, False], [False, False], [True, True]]
    assert (arithmetic.forms([]).dtype, arithmetic.forms([]).shape) == (tf.bool, [0, 2])


def test_gradients_are_told_apart_by_the_tensors_of_their_values() -> None:
    dense, slices = tf.constant(2.0), _sparse([2.0, 3.0])
    same_rows = tf.IndexedSlices(slices.values, tf.constant([1, 1]))
    assert arithmetic.without([dense, None, same_rows], [slices, None]) == [dense, None, None]
    *others, left = arithmetic.without([dense, None, slices], [dense])
    assert others == [None, None]
    assert left is slices
    assert arithmetic.without([dense, None, tf.constant(2.0)], [])[0] is dense


@pytest.mark.parametrize(("jit_compile", "indices"), [(False, [0, 2]), (True, [0, 1, 2])])
@pytest.mark.parametrize("shape", [[3], [3, 2], [3, 2, 2]])
def test_rows_with_a_value_other_than_0_are_found(jit_compile: bool, indices: list[int], shape: list[int]) -> None:
    # Only the last value of the first row and the first of the last row are not 0.
    flat = np.zeros(shape, np.float32).reshape([3, -1])
    flat[0, -1], flat[2, 0] = math.nan, -1
    values = flat.reshape(shape)
    found = tf.function(arithmetic.rows_not_zero, jit_compile=jit_compile)(tf.constant(values))
    assert found.indices.numpy().tolist() == indices
    np.testing.assert_array_equal(found.values, values[indices])
    assert found.dense_shape.numpy().tolist() == shape


def _rows(grad: tf.IndexedSlices) -> tf.IndexedSlices:
    return tf.IndexedSlices(grad.values, grad.indices, grad.dense_shape)


def test_tensors_are_known_by_identity_and_sparse_gradients_by_their_values() -> None:
    dense, sparse, result = tf.constant(8.0), _sparse([8.0]), _sparse([1.0])
    unscaled = UnscaledGradients()
    assert not unscaled.precede(dense)
    unscaled.add([dense, None, sparse], [dense / 8, None, result])
    between = tf.constant(24.0)
    unscaled.add([between], [between / 8])
    assert unscaled.count == 3
    given = [dense, sparse, _rows(sparse), sparse.values, between]
    others = [None, tf.constant(8.0), _sparse([8.0]), result, 8.0]
    assert [unscaled.got(grad) for grad in [*given, *others]] == [True] * 5 + [False] * 5
    assert [unscaled.returned(grad) for grad in [result, _rows(result), sparse, None]] == [True, True, False, False]
    # What was made before the first result precedes all.
    later = [between, tf.minimum(result.values, 0.5), None, 8.0, tf.Variable(1.0)]
    assert [unscaled.precede(grad) for grad in [dense, sparse, *later]] == [True, True] + [False] * 5
    gone = weakref.ref(between)
    del between, given, later
    assert gone() is None


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


def test_zeros_are_known_by_their_values_or_in_a_graph_by_their_op() -> None:
    assert [is_zero(grad) for grad in [tf.zeros([2]), _sparse([0.0]), tf.constant([0.0, 1.0]), np.zeros(2), None]] == [
        *[True] * 2,
        *[False] * 3,
    ]
    with tf.Graph().as_default():
        fed = tf.compat.v1.placeholder(tf.float32, [None])
        assert [is_zero(grad) for grad in [tf.zeros_like(fed), fed, fed * 0]] == [True, False, False]
