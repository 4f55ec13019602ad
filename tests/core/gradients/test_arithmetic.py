import numpy as np
import pytest
import tensorflow as tf
from gradient_forms import FORMS, TYPES, gradient
from hypothesis import given
from hypothesis import strategies as st

from tfmp.core.gradients import arithmetic, reductions
from tfmp.types import Gradient


def _numbers(grad: Gradient) -> list[float]:
    return (grad.values if isinstance(grad, tf.IndexedSlices) else grad).numpy().tolist()


@pytest.mark.parametrize("dtype", TYPES)
def test_scaled_loss_is_at_least_float32(dtype: tf.DType) -> None:
    scaled = arithmetic.scale(tf.constant(3.0, dtype), tf.constant(2.0**20))
    assert scaled.dtype == (tf.float64 if dtype == tf.float64 else tf.float32)
    assert float(scaled) == 3 * 2.0**20


def test_integer_loss_is_refused() -> None:
    with pytest.raises(TypeError, match="floating-point type, got int32"):
        arithmetic.scale(tf.constant(3), tf.constant(8.0))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", TYPES)
def test_unscaled_gradient_has_true_magnitude_and_keeps_its_form(dtype: tf.DType, form: str) -> None:
    grad = gradient([8.0, -16.0], dtype, form)
    (unscaled,) = arithmetic.unscale([grad], tf.constant(2.0**25))
    assert type(unscaled) is type(grad)
    assert unscaled.dtype == (tf.float64 if dtype == tf.float64 else tf.float32)
    assert _numbers(unscaled) == [2.0**-22, -(2.0**-21)]


def test_none_stays_none_in_all_functions() -> None:
    assert arithmetic.unscale([None], tf.constant(8.0)) == [None]
    assert arithmetic.cast(None, tf.float16) is None
    assert arithmetic.densify(None) is None


@given(
    st.lists(st.floats(-1e4, 1e4, width=32, allow_subnormal=False), min_size=1, max_size=5),
    st.integers(0, 60),
)
def test_power_of_two_scale_is_exactly_undone(values: list[float], exponent: int) -> None:
    values = [value for value in values if abs(value) > 2.0**-60] or [1.0]
    scale = tf.constant(2.0**exponent)
    (unscaled,) = arithmetic.unscale([arithmetic.scale(tf.constant(values), scale)], scale)
    assert unscaled.numpy().tolist() == np.float32(values).tolist()


@pytest.mark.parametrize("count", [0, 1, 2, 3, 8, 9])
def test_rows_are_padded_to_a_power_of_two(count: int) -> None:
    slices = tf.IndexedSlices(tf.ones([count, 2]), tf.fill([count], 3), tf.constant([4, 2]))
    padded = arithmetic.pad_rows(slices)
    assert padded.indices.shape[0] == 2 ** max(count - 1, 0).bit_length()
    assert padded.values.shape[0] == padded.indices.shape[0]
    assert np.array_equal(arithmetic.densify(padded), arithmetic.densify(slices))


def test_cast_to_a_narrower_type_can_overflow() -> None:
    assert not bool(reductions.all_finite([arithmetic.cast(tf.constant([1e6]), tf.float16)]))


def test_densify_sums_rows_with_the_same_index() -> None:
    slices = tf.IndexedSlices(tf.constant([[1.0], [2.0]]), tf.constant([2, 2]), tf.constant([3, 1]))
    assert arithmetic.densify(slices).numpy().tolist() == [[0.0], [0.0], [3.0]]
