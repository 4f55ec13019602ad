import functools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from gradient_forms import FORMS, TYPES, gradient
from hypothesis import given, settings
from hypothesis import strategies as st

from tfmp.core.gradients import arithmetic, reductions
from tfmp.types import Gradients


def test_list_without_gradients_is_finite_and_has_norm_0() -> None:
    assert bool(reductions.all_finite([None]))
    assert float(reductions.max_abs([None])) == 0
    assert float(reductions.global_norm([None])) == 0


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", TYPES)
def test_single_infinity_or_nan_anywhere_is_found(dtype: tf.DType, form: str, bad: float) -> None:
    good = gradient([1.0, 2.0], dtype)
    assert bool(reductions.all_finite([good, None, gradient([0.0, 60000.0], dtype, form)]))
    assert not bool(reductions.all_finite([good, None, gradient([0.0, bad], dtype, form)]))


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
        "eager": reductions.all_finite,
        "function": tf.function(reductions.all_finite),
        "xla": tf.function(reductions.all_finite, jit_compile=True),
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


@pytest.mark.parametrize("dtype", [tf.float32, tf.float64])
def test_form_for_accelerators_gives_the_same_answers(dtype: tf.DType, monkeypatch: pytest.MonkeyPatch) -> None:
    def answers() -> list[Any]:
        @functools.partial(tf.function, jit_compile=True)
        def answer(values: tf.Tensor) -> list[tf.Tensor]:
            counts = reductions.counts([values], [tf.math.is_inf, tf.math.is_nan])
            return [reductions.all_finite([values]), counts, reductions.half_squares([values])[0]]

        cases = [[1.0, 2.0], [math.inf, 1.0], [math.nan, -math.inf], [float(dtype.max), 1.0]]
        found = [answer(tf.constant([case] * 2**13, dtype)) for case in cases]
        return [[each.numpy().tolist() for each in row] for row in found]

    on_cpu = answers()
    monkeypatch.setattr(reductions, "_has_accelerator", lambda: True)
    np.testing.assert_equal(answers(), on_cpu)
    assert [row[0] for row in on_cpu] == [True, False, False, True]


def test_only_gradients_whose_squares_are_not_finite_are_suspect() -> None:
    small, sparse = (
        tf.ones([2]),
        tf.IndexedSlices(tf.fill([100, 100], math.inf), tf.range(100), tf.constant([200, 100])),
    )
    finite, half = tf.ones([100, 100]), tf.ones([100, 100], tf.float16)
    grads = [small, finite, None, sparse, half, tf.fill([100, 100], 3e30)]

    def sizes(grads: Gradients) -> list[tf.Tensor]:
        found = reductions.suspects(grads, reductions.large_squares(grads))
        return [tf.size(each) for each in arithmetic.values_of(found)]

    for find in (sizes, tf.function(sizes)):
        assert [int(size) for size in find(grads)] == [2, 0, 10000, 10000, 10000]


def test_value_overflows_in_a_sum_from_the_largest_value_divided_by_the_addends_on() -> None:
    for dtype in TYPES:
        half = 0.5 * float(tf.cast(dtype.max, tf.float64))
        values = tf.cast(tf.constant([half, -half, 0.96875 * half, math.inf, math.nan], tf.float64), dtype)
        assert reductions.overflows_in_sum(values, 2).numpy().tolist() == [True, True, False, False, False]
        assert reductions.overflows_in_sum(values, 1).numpy().tolist() == [False] * 5


def test_squares_are_those_of_each_large_gradient_and_of_the_small_ones_of_a_type() -> None:
    large, half = tf.fill([2**13], 2.0), tf.ones([2, 2**12], tf.float16)
    wide = tf.constant([10.0], tf.float64)
    grads = [tf.constant([[3.0]]), large, None, half, tf.constant([4.0, 2.0], tf.bfloat16), wide]
    squares = reductions.half_squares(grads)
    assert squares.dtype == tf.float64
    assert squares.numpy().tolist() == [2**14, 2**12, 14.5, 50]
    # Only of those that the check of all values sums up one by one.
    assert reductions.large_squares(grads).numpy().tolist() == [2**14]
    assert reductions.large_squares([None]).shape == [0]
    assert reductions.norms(grads).numpy() == pytest.approx([3, 2**7.5, 0, 2**6.5, 20**0.5, 10])


def test_a_graph_counts_large_gradients_by_one_function_for_each_type() -> None:
    @tf.function
    def counted(grads: Gradients) -> tf.Tensor:
        return reductions.counts(grads, [tf.math.is_inf, tf.math.is_nan])

    shapes = [[100, 100], [2**14], [3, 1, 4000]]
    grads = [tf.fill(shape, tf.constant(math.inf, dtype)) for dtype in (tf.float32, tf.float64) for shape in shapes]
    assert counted(grads)[:, 0].numpy().tolist() == [10000, 2**14, 12000] * 2
    graph = counted.get_concrete_function(grads).graph
    calls = [op.get_attr("f").name for op in graph.get_operations() if op.type == "PartitionedCall"]
    assert len(calls) == 6
    assert len(set(calls)) == 2


def test_sums_are_computed_once_in_each_graph() -> None:
    grads = [tf.ones([100, 100])]
    reductions.half_squares(grads)

    @tf.function
    def compute(values: tf.Tensor) -> list[tf.Tensor]:
        grads = [values]
        inner = tf.cond(values[0, 0] > 0, lambda: reductions.half_squares(grads), lambda: tf.zeros([1], tf.float64))
        outer = [reductions.half_squares(grads), reductions.large_squares(grads)]
        return [inner[0], *(each[0] for each in outer), tf.cast(reductions.all_finite(grads), tf.float64)]

    graph = compute.get_concrete_function(*grads).graph
    assert len([op for op in graph.get_operations() if op.type == "L2Loss"]) == 1
    assert [float(each) for each in compute(*grads)] == [5000, 5000, 5000, 1]


@pytest.mark.parametrize("dtype", TYPES)
def test_counts_are_right_at_every_position_of_a_sparse_gradient(dtype: tf.DType) -> None:
    @tf.function(input_signature=[tf.TensorSpec([None, 2], dtype), tf.TensorSpec([None], tf.int64)])
    def counted(rows: tf.Tensor, indices: tf.Tensor) -> list[tf.Tensor]:
        # Its number of rows is unknown while the function is traced.
        sparse = tf.IndexedSlices(rows, indices, tf.constant([9, 2], tf.int64))
        small = [gradient([1.0, value], dtype) for value in (math.inf, 1.0)]
        # A `tf.DType` equals a small integer, so a dtype could be confused with a position in the list.
        places = [[None] * place + [sparse, *small, *small] for place in range(20)]
        return [reductions.counts(grads, [tf.math.is_inf])[-5:, 0] for grads in places]

    rows = tf.cast([[math.inf, 1.0], [2.0, -math.inf]], dtype)
    for each in counted(rows, tf.constant([1, 2], tf.int64)):
        assert each.numpy().tolist() == [2, 1, 0, 1, 0]


def test_finite_values_whose_squares_overflow_are_finite() -> None:
    grads = [tf.constant([3e38, -3e38]), tf.constant([1e300], tf.float64), tf.constant([60000.0], tf.float16)]
    assert bool(reductions.all_finite(grads))
    assert bool(tf.function(reductions.all_finite, jit_compile=True)(grads))


def test_global_norm_is_right_although_squares_overflow() -> None:
    assert float(reductions.global_norm([tf.constant([3e25]), None, tf.constant([-4e25])])) == pytest.approx(5e25)
    assert float(reductions.global_norm([tf.constant([3e38, 3e38])])) == pytest.approx(3e38 * 2**0.5)
    assert float(reductions.global_norm([tf.constant([math.inf])])) == math.inf
    assert math.isnan(float(reductions.global_norm([tf.constant([math.nan, 1.0])])))


@pytest.mark.parametrize("jit_compile", [False, True], ids=["function", "xla"])
def test_norms_are_right_in_functions_whether_squares_overflow_or_not(jit_compile: bool) -> None:
    grads = [tf.constant([3.0, -4.0]), None, tf.constant([3e25, 4e25]), tf.constant([[0.0, 6.0, 8.0]], tf.float16)]
    norms = tf.function(reductions.norms, jit_compile=jit_compile)
    np.testing.assert_allclose(norms(grads), [5, 0, 5e25, 10], rtol=1e-6)
    norm = tf.function(reductions.global_norm, jit_compile=jit_compile)
    assert [float(norm(each)) for each in (grads[:2], grads)] == pytest.approx([5, 5e25], rel=1e-6)


def test_more_values_than_float32_can_count_are_counted() -> None:
    # An odd number above 2**24.
    counts = reductions.counts([tf.ones([65793, 257], tf.float16)], [lambda values: values > 0])
    assert counts.numpy().tolist() == [[65793 * 257]]


def test_norm_from_known_squares_is_the_same() -> None:
    grads = [tf.constant([3.0] * 2), tf.zeros([2**13]), tf.constant([[4.0]] * 2, tf.float16)]
    norm = float(reductions.global_norm(grads, reductions.half_squares(grads)))
    assert norm == float(reductions.global_norm(grads))
    assert norm == pytest.approx(50**0.5)


@pytest.mark.parametrize("form", FORMS)
def test_max_abs_and_norm_cover_all_gradients(form: str) -> None:
    grads = [gradient([3.0, 0.0], tf.float16, form), None, tf.zeros([0]), tf.constant([[-4.0]])]
    assert float(reductions.max_abs(grads)) == 4
    assert float(reductions.global_norm(grads)) == 5


def test_max_abs_is_nan_or_infinite_if_a_value_is() -> None:
    assert math.isnan(float(reductions.max_abs([tf.constant([1.0, math.nan, 2.0]), tf.constant([5.0])])))
    assert float(reductions.max_abs([tf.constant([1.0, -math.inf])])) == math.inf


def test_float16_norm_does_not_overflow_in_its_squares() -> None:
    assert float(reductions.global_norm([tf.constant([30000.0, 40000.0], tf.float16)])) == pytest.approx(
        50000, rel=1e-3
    )


@pytest.mark.graph
@pytest.mark.parametrize("flag", [True, False])
def test_sum_of_one_branch_is_not_used_in_another_or_outside(flag: bool) -> None:
    with tf.Graph().as_default():
        grads = [tf.ones([100, 100])]
        # With TensorFlow 1's control flow, the ops of both branches are in the same graph.
        of_branch = tf.cond(
            tf.compat.v1.placeholder_with_default(flag, []),
            lambda: reductions.half_squares(grads),
            lambda: 2 * reductions.half_squares(grads),
        )
        outside = reductions.half_squares(grads)
        with tf.compat.v1.Session() as session:
            assert [each.tolist() for each in session.run([of_branch, outside])] == [[5000 if flag else 10000], [5000]]
