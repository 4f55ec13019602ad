import math

import numpy as np
import pytest
import tensorflow as tf
from gradient_forms import FORMS, gradient

from tfmp.core.gradients import finiteness, norms


def test_list_without_gradients_has_norm_0() -> None:
    assert float(norms.max_abs([None])) == 0
    assert float(norms.global_norm([None])) == 0


def test_squares_are_those_of_each_large_gradient_and_of_the_small_ones_of_a_type() -> None:
    large, half = tf.fill([2**13], 2.0), tf.ones([2, 2**12], tf.float16)
    wide = tf.constant([10.0], tf.float64)
    grads = [tf.constant([[3.0]]), large, None, half, tf.constant([4.0, 2.0], tf.bfloat16), wide]
    squares = norms.halves_of_square_sums(grads)
    assert squares.dtype == tf.float64
    assert squares.numpy().tolist() == [2**14, 2**12, 4.5, 10, 50]
    # Only of those that the check of all values sums up one by one.
    assert finiteness.halves_of_large_square_sums(grads).numpy().tolist() == [2**14]
    assert finiteness.halves_of_large_square_sums([None]).shape == [0]
    assert norms.norm_of_each(grads).numpy() == pytest.approx([3, 2**7.5, 0, 2**6.5, 20**0.5, 10])


def test_global_norm_is_right_although_squares_overflow() -> None:
    assert float(norms.global_norm([tf.constant([3e25]), None, tf.constant([-4e25])])) == pytest.approx(5e25)
    assert float(norms.global_norm([tf.constant([3e38, 3e38])])) == pytest.approx(3e38 * 2**0.5)
    assert float(norms.global_norm([tf.constant([math.inf])])) == math.inf
    assert math.isnan(float(norms.global_norm([tf.constant([math.nan, 1.0])])))


@pytest.mark.parametrize("jit_compile", [False, True], ids=["function", "xla"])
def test_norms_are_right_in_functions_whether_squares_overflow_or_not(jit_compile: bool) -> None:
    grads = [tf.constant([3.0, -4.0]), None, tf.constant([3e25, 4e25]), tf.constant([[0.0, 6.0, 8.0]], tf.float16)]
    each = tf.function(norms.norm_of_each, jit_compile=jit_compile)
    np.testing.assert_allclose(each(grads), [5, 0, 5e25, 10], rtol=1e-6)
    norm = tf.function(norms.global_norm, jit_compile=jit_compile)
    assert [float(norm(part)) for part in (grads[:2], grads)] == pytest.approx([5, 5e25], rel=1e-6)


def test_norm_from_known_squares_is_the_same() -> None:
    grads = [tf.constant([3.0] * 2), tf.zeros([2**13]), tf.constant([[4.0]] * 2, tf.float16)]
    norm = float(norms.global_norm(grads, norms.halves_of_square_sums(grads)))
    assert norm == float(norms.global_norm(grads))
    assert norm == pytest.approx(50**0.5)


@pytest.mark.parametrize("form", FORMS)
def test_max_abs_and_norm_cover_all_gradients(form: str) -> None:
    grads = [gradient([3.0, 0.0], tf.float16, form), None, tf.zeros([0]), tf.constant([[-4.0]])]
    assert float(norms.max_abs(grads)) == 4
    assert float(norms.global_norm(grads)) == 5


def test_max_abs_is_nan_or_infinite_if_a_value_is() -> None:
    assert math.isnan(float(norms.max_abs([tf.constant([1.0, math.nan, 2.0]), tf.constant([5.0])])))
    assert float(norms.max_abs([tf.constant([1.0, -math.inf])])) == math.inf


def test_float16_norm_does_not_overflow_in_its_squares() -> None:
    assert float(norms.global_norm([tf.constant([30000.0, 40000.0], tf.float16)])) == pytest.approx(50000, rel=1e-3)


@pytest.mark.parametrize("factor", [1e25, 1.0, 1e-12, 1e-28, 0.0])
@pytest.mark.parametrize("jit_compile", [False, True])
def test_global_norm_is_right_however_large_or_small_values_are(factor: float, jit_compile: bool) -> None:
    rng = np.random.default_rng(0)
    arrays = [rng.normal(size=[40, 300]) * factor, rng.normal(size=[5]) * factor]
    grads = [tf.constant(array, tf.float32) for array in arrays]
    found = tf.function(lambda: norms.global_norm(grads), jit_compile=jit_compile)()
    expected = factor * np.sqrt(sum(np.sum((array / (factor or 1)) ** 2) for array in arrays))
    np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_global_norm_in_float64_is_right_beyond_float32() -> None:
    for value in (1e200, 1e-200):
        grads = [tf.constant([3 * value, 4 * value], tf.float64), tf.constant([1.0 if value > 1 else 0.0])]
        np.testing.assert_allclose(norms.global_norm(grads), 5 * value, rtol=1e-12)


@pytest.mark.parametrize("factor", [1e30, 1.0, 1e-30])
@pytest.mark.parametrize("jit_compile", [False, True])
def test_large_norms_are_right_and_small_ones_may_be_0(factor: float, jit_compile: bool) -> None:
    rng = np.random.default_rng(0)
    arrays = [rng.normal(size=shape) * factor for shape in ([40, 300], [5], [100, 100], [7, 3])]
    arrays.append(arrays[0] * 1e-30)
    types = [tf.float32, tf.float16 if factor == 1 else tf.float32, tf.float32, tf.float64, tf.float64]
    grads = [tf.constant(array, dtype) for array, dtype in zip(arrays, types, strict=True)]
    found = tf.function(lambda: norms.large_norm_of_each([*grads, None]), jit_compile=jit_compile)()
    expected = [np.linalg.norm(array / factor) * factor for array in arrays]
    np.testing.assert_allclose(found[:4], expected[:4], rtol=1e-3)
    np.testing.assert_allclose(found[4:], [expected[4], 0], atol=1e-9 * factor)


def test_large_norms_of_zeros_are_zero() -> None:
    assert norms.large_norm_of_each([tf.zeros([2]), None]).numpy().tolist() == [0, 0]
