import math
from collections.abc import Callable

import numpy as np
import pytest
import tensorflow as tf
from gradient_forms import FORMS, TYPES, gradient
from hypothesis import given, settings
from hypothesis import strategies as st

from tfmp.core.gradients import arithmetic, finiteness
from tfmp.types import Gradients


def test_list_without_gradients_is_finite() -> None:
    assert bool(finiteness.all_finite([None]))


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", TYPES)
def test_single_infinity_or_nan_anywhere_is_found(dtype: tf.DType, form: str, bad: float) -> None:
    good = gradient([1.0, 2.0], dtype)
    assert bool(finiteness.all_finite([good, None, gradient([0.0, 60000.0], dtype, form)]))
    assert not bool(finiteness.all_finite([good, None, gradient([0.0, bad], dtype, form)]))


@pytest.mark.parametrize("mode", ["eager", "function", "xla"])
@pytest.mark.parametrize("dtype", [tf.float16, tf.float32])
def test_infinity_is_found_in_one_type_beside_finite_values_of_another(dtype: tf.DType, mode: str) -> None:
    good, bad = [tf.constant([1.0, 1e4], each) for each in TYPES], tf.constant([1.0, math.inf], dtype)
    assert bool(_check(mode)(good))
    assert not bool(_check(mode)([*good, bad]))


@pytest.mark.parametrize("mode", ["eager", "function", "xla"])
@pytest.mark.parametrize("position", [0, 300, 400 * 257 - 1])
def test_infinity_is_found_anywhere_among_values_whose_squares_overflow(position: int, mode: str) -> None:
    values = np.full([400, 257], 1e30, np.float32)
    assert bool(_check(mode)([tf.constant(values)]))
    values.flat[position] = math.inf
    assert not bool(_check(mode)([tf.constant(values)]))


@pytest.mark.parametrize("mode", ["eager", "function", "xla"])
@pytest.mark.parametrize("dtype", TYPES)
def test_values_whose_sum_would_overflow_are_found(dtype: tf.DType, mode: str) -> None:
    largest = float(tf.cast(dtype.max, tf.float64))
    check = _check(mode)
    for value in (0.25 * largest, -0.625 * largest):
        grads = [tf.cast(tf.constant([1.0, value], tf.float64), dtype), None]
        assert bool(check(grads))
        assert bool(check(grads, addends=2)) is (abs(value) < 0.5 * largest)


#: Values at which arithmetic has special cases: zeros, denormal numbers, values whose squares just overflow, the
#: largest values, infinities and NaN.
_EDGES = ["0", "tiny", "-tiny", "root", "-root", "max", "-max", "inf", "-inf", "nan"]


def _edge(name: str, dtype: tf.DType) -> float:
    maximum = float(tf.cast(dtype.max, tf.float64))
    values = {"0": 0.0, "tiny": float(tf.cast(dtype.as_numpy_dtype(1e-45), tf.float64)), "root": 2 * maximum**0.5}
    values |= {"max": maximum, "inf": math.inf, "nan": math.nan}
    return math.copysign(1, -1) * values[name[1:]] if name[0] == "-" else values[name]


def _check(mode: str) -> Callable[..., tf.Tensor]:
    functions = {
        "eager": finiteness.all_finite,
        "function": tf.function(finiteness.all_finite),
        "xla": tf.function(finiteness.all_finite, jit_compile=True),
    }
    return functions[mode]


@pytest.mark.parametrize("mode", ["eager", "function", "xla"])
@pytest.mark.parametrize("dtype", TYPES)
def test_fast_check_gives_the_same_answer_as_checking_every_value(dtype: tf.DType, mode: str) -> None:
    check = _check(mode)
    shapes = [[], [3, 300], [2**13 + 1], [2, 0]]

    @settings(deadline=None, max_examples=60)
    @given(
        st.lists(st.tuples(st.integers(0, 3), st.integers(0, 2**14), st.sampled_from(_EDGES)), max_size=6),
        st.sampled_from(_EDGES[:3] + _EDGES[5:7]),
    )
    def answers_alike(places: list[tuple[int, int, str]], everywhere: str) -> None:
        arrays = [np.full(shape, _edge(everywhere, dtype), dtype.as_numpy_dtype) for shape in shapes]
        for index, place, name in places:
            if arrays[index].size:
                arrays[index].flat[place % arrays[index].size] = _edge(name, dtype)
        expected = all(np.isfinite(np.float64(array)).all() for array in arrays)
        tensors = [tf.constant(array) for array in arrays]
        sparse = tf.IndexedSlices(tensors[1], tf.range(3), tf.constant([9, 300]))
        assert bool(check([tensors[0], sparse, None, *tensors[2:]])) is expected

    answers_alike()


def test_only_gradients_whose_squares_are_not_finite_are_suspect() -> None:
    small, sparse = (
        tf.ones([2]),
        tf.IndexedSlices(tf.fill([100, 100], math.inf), tf.range(100), tf.constant([200, 100])),
    )
    finite, half = tf.ones([100, 100]), tf.ones([100, 100], tf.float16)
    grads = [small, finite, None, sparse, half, tf.fill([100, 100], 3e30)]

    def sizes(grads: Gradients) -> list[tf.Tensor]:
        found = finiteness.suspects(grads, finiteness.halves_of_large_square_sums(grads))
        return [tf.size(each) for each in arithmetic.values_of(found)]

    for find in (sizes, tf.function(sizes)):
        assert [int(size) for size in find(grads)] == [2, 0, 10000, 10000, 10000]


def test_value_overflows_in_a_sum_from_the_largest_value_divided_by_the_addends_on() -> None:
    for dtype in TYPES:
        half = 0.5 * float(tf.cast(dtype.max, tf.float64))
        values = tf.cast(tf.constant([half, -half, 0.96875 * half, math.inf, math.nan], tf.float64), dtype)
        assert finiteness.overflows_in_sum(values, 2).numpy().tolist() == [True, True, False, False, False]
        assert finiteness.overflows_in_sum(values, 1).numpy().tolist() == [False] * 5


def test_finite_values_whose_squares_overflow_are_finite() -> None:
    grads = [tf.constant([3e38, -3e38]), tf.constant([1e300], tf.float64), tf.constant([60000.0], tf.float16)]
    assert bool(finiteness.all_finite(grads))
    assert bool(tf.function(finiteness.all_finite, jit_compile=True)(grads))
