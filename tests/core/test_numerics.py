import math

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st

from tfmp.core import numerics
from tfmp.types import Gradient

_TYPES = [tf.float16, tf.bfloat16, tf.float32, tf.float64]
_FORMS = ["dense", "indexed"]


def _grad(values: list[float], dtype: tf.DType = tf.float32, form: str = "dense") -> Gradient:
    tensor = tf.constant(values, dtype)
    return tensor if form == "dense" else tf.IndexedSlices(tensor, tf.range(len(values)), tf.constant([9]))


def _numbers(grad: Gradient) -> list[float]:
    return (grad.values if isinstance(grad, tf.IndexedSlices) else grad).numpy().tolist()


@pytest.mark.parametrize("dtype", _TYPES)
def test_scaled_loss_is_at_least_float32(dtype: tf.DType) -> None:
    scaled = numerics.scale(tf.constant(3.0, dtype), tf.constant(2.0**20))
    assert scaled.dtype == (tf.float64 if dtype == tf.float64 else tf.float32)
    assert float(scaled) == 3 * 2.0**20


def test_integer_loss_is_refused_by_type() -> None:
    with pytest.raises(TypeError, match="floating-point type, got int32"):
        numerics.scale(tf.constant(3), tf.constant(8.0))


@pytest.mark.parametrize("form", _FORMS)
@pytest.mark.parametrize("dtype", _TYPES)
def test_unscaled_gradient_has_true_magnitude_and_keeps_its_form(dtype: tf.DType, form: str) -> None:
    grad = _grad([8.0, -16.0], dtype, form)
    (unscaled,) = numerics.unscale([grad], tf.constant(2.0**25))
    assert type(unscaled) is type(grad)
    assert unscaled.dtype == (tf.float64 if dtype == tf.float64 else tf.float32)
    assert _numbers(unscaled) == [2.0**-22, -(2.0**-21)]


def test_none_passes_through_everything() -> None:
    assert numerics.unscale([None], tf.constant(8.0)) == [None]
    assert numerics.cast(None, tf.float16) is None
    assert numerics.densify(None) is None
    assert bool(numerics.all_finite([None]))
    assert float(numerics.max_abs([None])) == 0
    assert float(numerics.global_norm([None])) == 0


@given(
    st.lists(st.floats(-1e4, 1e4, width=32, allow_subnormal=False), min_size=1, max_size=5),
    st.integers(0, 60),
)
def test_power_of_two_scale_is_exactly_undone(values: list[float], exponent: int) -> None:
    values = [value for value in values if abs(value) > 2.0**-60] or [1.0]
    scale = tf.constant(2.0**exponent)
    (unscaled,) = numerics.unscale([numerics.scale(tf.constant(values), scale)], scale)
    assert unscaled.numpy().tolist() == np.float32(values).tolist()


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("form", _FORMS)
@pytest.mark.parametrize("dtype", _TYPES)
def test_single_bad_value_anywhere_is_seen(dtype: tf.DType, form: str, bad: float) -> None:
    good = _grad([1.0, 2.0], dtype)
    assert bool(numerics.all_finite([good, None, _grad([0.0, 60000.0], dtype, form)]))
    assert not bool(numerics.all_finite([good, None, _grad([0.0, bad], dtype, form)]))


def test_cast_to_a_narrower_type_can_overflow() -> None:
    assert not bool(numerics.all_finite([numerics.cast(tf.constant([1e6]), tf.float16)]))


@pytest.mark.parametrize("form", _FORMS)
def test_magnitudes_are_taken_over_all_gradients(form: str) -> None:
    grads = [_grad([3.0, 0.0], tf.float16, form), None, tf.zeros([0]), tf.constant([[-4.0]])]
    assert float(numerics.max_abs(grads)) == 4
    assert float(numerics.global_norm(grads)) == 5


def test_nan_and_infinity_show_in_the_largest_magnitude() -> None:
    assert math.isnan(float(numerics.max_abs([tf.constant([1.0, math.nan, 2.0]), tf.constant([5.0])])))
    assert float(numerics.max_abs([tf.constant([1.0, -math.inf])])) == math.inf


def test_float16_norm_does_not_overflow_in_its_squares() -> None:
    assert float(numerics.global_norm([tf.constant([30000.0, 40000.0], tf.float16)])) == pytest.approx(50000, rel=1e-3)


def test_densify_sums_rows_named_twice() -> None:
    slices = tf.IndexedSlices(tf.constant([[1.0], [2.0]]), tf.constant([2, 2]), tf.constant([3, 1]))
    assert numerics.densify(slices).numpy().tolist() == [[0.0], [0.0], [3.0]]
