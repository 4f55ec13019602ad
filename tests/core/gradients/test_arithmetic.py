import math

import numpy as np
import pytest
import tensorflow as tf
from gradient_forms import MODES, gradient, in_every_form, in_every_mode, of_every_type
from hypothesis import given
from hypothesis import strategies as st

from tfmp.core.gradients import arithmetic, finiteness
from tfmp.types import Gradient


def _numbers(grad: Gradient) -> list[float]:
    return (grad.values if isinstance(grad, tf.IndexedSlices) else grad).numpy().tolist()


@of_every_type
def test_scaled_loss_is_at_least_float32(dtype: tf.DType) -> None:
    scaled = arithmetic.scale(tf.constant(3.0, dtype), tf.constant(2.0**20))
    assert scaled.dtype == (tf.float64 if dtype == tf.float64 else tf.float32)
    assert float(scaled) == 3 * 2.0**20


def test_integer_loss_is_refused() -> None:
    with pytest.raises(TypeError, match="floating-point type, got int32"):
        arithmetic.scale(tf.constant(3), tf.constant(8.0))


@in_every_form
@of_every_type
def test_unscaled_gradient_has_true_magnitude_and_keeps_its_form(dtype: tf.DType, form: str) -> None:
    grad = gradient([8.0, -16.0], dtype, form)
    (unscaled,) = arithmetic.unscale([grad], tf.constant(2.0**25))
    assert type(unscaled) is type(grad)
    assert unscaled.dtype == (tf.float64 if dtype == tf.float64 else tf.float32)
    assert _numbers(unscaled) == [2.0**-22, -(2.0**-21)]


@given(
    st.lists(st.floats(-1e4, 1e4, width=32, allow_subnormal=False), min_size=1, max_size=5),
    st.integers(0, 60),
)
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


@in_every_mode
@pytest.mark.parametrize("exponent", [0, -64, -65, -127, -149])
@pytest.mark.parametrize("dtype", [tf.float32, tf.float64])
def test_any_gradient_is_shrunk_exactly_by_a_power_of_two(dtype: tf.DType, exponent: int, mode: str) -> None:
    grad = tf.constant([2.0**127, -(2.0**100), 1.1 * 2.0**127, 1.7 * 2.0**101], dtype)
    shrunk = MODES[mode](arithmetic.shrink)(grad, tf.constant(2.0**exponent, tf.float64))
    assert shrunk.dtype == dtype
    assert shrunk.numpy().tolist() == [value * 2.0**exponent for value in grad.numpy().tolist()]


@pytest.mark.parametrize("exponent", [0, -1, -64])
def test_gradient_does_not_become_0_by_a_factor_that_is_not_small(exponent: int) -> None:
    smallest = 2.0 ** (-126 - exponent)
    assert float(arithmetic.shrink(tf.constant(smallest), tf.constant(2.0**exponent, tf.float64))) == 2.0**-126


def test_gradient_that_is_not_shrunk_is_not_copied_in_eager_code() -> None:
    grad, one = tf.constant([1.0, 2.0]), tf.constant(1.0, tf.float64)
    assert arithmetic.shrink(grad, one) is grad
    assert tf.function(arithmetic.shrink)(grad, one) is not grad


def test_cast_to_a_narrower_type_can_overflow_and_densify_sums_rows_with_the_same_index() -> None:
    assert not bool(finiteness.all_finite([arithmetic.cast(tf.constant([1e6]), tf.float16)]))
    slices = tf.IndexedSlices(tf.constant([[1.0], [2.0]]), tf.constant([2, 2]), tf.constant([3, 1]))
    assert arithmetic.densify(slices).numpy().tolist() == [[0.0], [0.0], [3.0]]
    # None stays None in all functions.
    assert arithmetic.unscale([None], tf.constant(8.0)) == [None]
    assert (arithmetic.cast(None, tf.float16), arithmetic.densify(None)) == (None, None)


def _slices() -> tf.IndexedSlices:
    return tf.IndexedSlices(tf.constant([[2.0], [3.0]]), tf.constant([2, 0]), tf.constant([4, 1]))


def test_forms_tell_which_gradients_are_there_and_which_are_sparse() -> None:
    forms = arithmetic.forms([tf.constant(1.0), None, _slices()])
    assert forms.dtype == tf.bool
    assert forms.numpy().tolist() == [[True, False], [False, False], [True, True]]
    assert (arithmetic.forms([]).dtype, arithmetic.forms([]).shape) == (tf.bool, [0, 2])
    assert [arithmetic.is_sparse(grad) for grad in (tf.constant(1.0), None, _slices())] == [False, False, True]


def test_functions_are_applied_to_the_parts_of_each_form() -> None:
    slices, shape = _slices(), [4, 1]
    mapped = arithmetic.map_parts(tf.negative, tf.square, lambda indices: indices + 1, slices)
    assert (mapped.values.numpy().tolist(), mapped.indices.numpy().tolist()) == ([[4], [9]], [3, 1])
    assert mapped.dense_shape.numpy().tolist() == shape
    assert float(arithmetic.map_parts(tf.negative, tf.square, tf.identity, tf.constant(3.0))) == -3
    assert arithmetic.map_parts(tf.negative, tf.square, tf.identity, None) is None
    mapped = arithmetic.map_values(tf.square, slices)
    assert (mapped.values.numpy().tolist(), mapped.indices.numpy().tolist()) == ([[4], [9]], [2, 0])
    assert mapped.dense_shape.numpy().tolist() == shape
    assert float(arithmetic.map_values(tf.square, np.float32(3))) == 9


def test_gradients_are_told_apart_by_the_tensors_of_their_values() -> None:
    dense, slices = tf.constant(2.0), _slices()
    same_rows = tf.IndexedSlices(slices.values, tf.constant([1, 1]))
    assert arithmetic.without([dense, None, same_rows], [slices, None]) == [dense]
    (left,) = arithmetic.without([dense, None, slices], [dense])
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
