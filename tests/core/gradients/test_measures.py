"""What is measured of gradients: whether all are finite, their norms and largest magnitude, and counts of values."""

import functools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from gradient_forms import MODES, TYPES, gradient, in_every_mode, of_every_type
from hypothesis import given, settings
from hypothesis import strategies as st

from tfmp.core import tracing
from tfmp.core.gradients import arithmetic, measures
from tfmp.types import Gradients


@in_every_mode
def test_value_is_found_in_one_type_beside_many_values_of_others(mode: str) -> None:
    check = MODES[mode](measures.all_finite)
    large = [tf.tile(tf.constant([1.0, 1e4], dtype), [2**12]) for dtype in TYPES]
    for place, dtype in enumerate(TYPES):
        largest = float(tf.cast(dtype.max, tf.float64))
        for value, addends, is_finite in ((0.25 * largest, 2, True), (0.625 * largest, 2, False), (math.inf, 1, False)):
            small = [tf.ones([2], each) for each in TYPES]
            small[place] = tf.cast(tf.constant([1.0, value], tf.float64), dtype)
            assert bool(check([*large, *small], addends=addends)) is is_finite


@in_every_mode
@of_every_type
def test_values_whose_sum_would_overflow_are_found(dtype: tf.DType, mode: str) -> None:
    largest = float(tf.cast(dtype.max, tf.float64))
    check = MODES[mode](measures.all_finite)
    for value in (0.25 * largest, -0.625 * largest):
        grads = [tf.cast(tf.constant([1.0, value], tf.float64), dtype), None]
        assert bool(check(grads))
        assert bool(check(grads, addends=2)) is (abs(value) < 0.5 * largest)
    half = 0.5 * largest
    values = tf.cast(tf.constant([half, -half, 0.96875 * half, math.inf, math.nan], tf.float64), dtype)
    assert measures.overflows_in_sum(values, 2).numpy().tolist() == [True, True, False, False, False]
    assert measures.overflows_in_sum(values, 1).numpy().tolist() == [False] * 5


def test_largest_magnitude_is_divided_before_it_is_float32() -> None:
    grads = [tf.constant([-3e39, 1.0], tf.float64), tf.constant([65504.0], tf.float16)]
    assert float(measures.max_abs(grads, tf.constant(32768.0))) == pytest.approx(3e39 / 32768)
    assert float(measures.max_abs(grads)) == math.inf


#: Values at which arithmetic has special cases: zeros, denormal numbers, values whose squares just overflow, the
#: largest values, infinities and NaN.
_EDGES = ["0", "tiny", "-tiny", "root", "-root", "max", "-max", "inf", "-inf", "nan"]


def _edge(name: str, dtype: tf.DType) -> float:
    maximum = float(tf.cast(dtype.max, tf.float64))
    values = {"0": 0.0, "tiny": float(tf.cast(dtype.as_numpy_dtype(1e-45), tf.float64)), "root": 2 * maximum**0.5}
    values |= {"max": maximum, "inf": math.inf, "nan": math.nan}
    return math.copysign(1, -1) * values[name[1:]] if name[0] == "-" else values[name]


@in_every_mode
@of_every_type
def test_fast_check_gives_the_same_answer_as_checking_every_value(dtype: tf.DType, mode: str) -> None:
    check = MODES[mode](measures.all_finite)
    shapes = [[], [3, 300], [2**13 + 1], [2, 0]]

    @settings(max_examples=60)
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
    sparse = tf.IndexedSlices(tf.fill([100, 100], math.inf), tf.range(100), tf.constant([200, 100]))
    finite, half = tf.ones([100, 100]), tf.ones([100, 100], tf.float16)
    grads = [tf.ones([2]), finite, None, sparse, half, tf.fill([100, 100], 3e30)]

    def sizes(grads: Gradients) -> list[tf.Tensor]:
        return [
            tf.size(each) for each in arithmetic.values_of(measures.only_suspects(grads, measures.are_suspect(grads)))
        ]

    for find in (sizes, tf.function(sizes)):
        assert [int(size) for size in find(grads)] == [2, 0, 10000, 10000, 10000]


def _norm(arrays: Sequence[np.ndarray]) -> float:
    """Return the norm, computed by NumPy so that no square overflows."""
    largest = max(np.abs(array).max() for array in arrays) or 1.0
    return float(largest * math.sqrt(sum(np.sum((np.float64(array) / largest) ** 2) for array in arrays)))


_RANDOM = [np.random.default_rng(0).normal(size=shape) for shape in ([40, 300], [5])]


@in_every_mode
@pytest.mark.parametrize(
    ("arrays", "dtypes", "rtol"),
    [
        ([np.array([3.0, 0.0]), np.array([[-4.0]])], [tf.float16, tf.float32], 0),
        ([np.array([3.0, -4.0]), np.array([[0.0, 6.0, 8.0]])], [tf.float32, tf.float16], 1e-6),
        # Squares overflow; or the norm is larger than the type's largest number.
        ([np.array([3e25]), np.array([-4e25])], [tf.float32] * 2, 1e-6),
        ([np.array([3e38]), np.array([3e38])], [tf.float32] * 2, 1e-6),
        ([np.array([30000.0]), np.array([40000.0])], [tf.float16] * 2, 1e-3),
        # Beyond what float32 can hold.
        ([np.array([3e200]), np.array([4e200])], [tf.float64] * 2, 1e-12),
        ([np.array([3e-200]), np.array([4e-200])], [tf.float64] * 2, 1e-12),
        *(([each * factor for each in _RANDOM], [tf.float32] * 2, 1e-6) for factor in (1e25, 1.0, 1e-12, 1e-28, 0.0)),
    ],
)
def test_norm_and_magnitude_are_right_for_any_values(
    arrays: list[np.ndarray], dtypes: list[Any], rtol: float, mode: str
) -> None:
    grads = [tf.constant(array, dtype) for array, dtype in zip(arrays, dtypes, strict=True)]
    for first in (
        grads[0],
        tf.IndexedSlices(grads[0], tf.range(len(grads[0])), tf.constant([99, *grads[0].shape[1:]])),
    ):
        given = [first, None, tf.zeros([0]), grads[1]]
        np.testing.assert_allclose(MODES[mode](measures.global_norm)(given), _norm(arrays), rtol=rtol)
        assert float(measures.max_abs(given)) == max(
            float(tf.reduce_max(tf.abs(tf.cast(grad, tf.float32)))) for grad in grads
        )


def test_no_gradient_is_finite_of_norm_0_and_largest_magnitude_0_and_measures_show_infinities_and_nan() -> None:
    assert bool(measures.all_finite([None]))
    assert float(measures.max_abs([None])) == float(measures.global_norm([None])) == 0
    assert measures.large_norm_of_each([tf.zeros([2]), None]).numpy().tolist() == [0, 0]
    nan, infinite = [tf.constant([1.0, math.nan, 2.0]), tf.constant([5.0])], [tf.constant([1.0, -math.inf])]
    for measure in (measures.max_abs, measures.global_norm):
        assert math.isnan(float(measure(nan)))
        assert float(measure(infinite)) == math.inf
    # Of what is known not to be finite, the values are not looked at again.
    large = [tf.constant([3e25, 4e25])]
    assert float(measures.global_norm(large, is_needed=tf.constant(True))) == pytest.approx(5e25)
    assert float(measures.global_norm(large, is_needed=tf.constant(False))) == math.inf


@in_every_mode
def test_norm_of_each_is_right_whether_squares_of_another_overflow_or_not(mode: str) -> None:
    grads = [tf.constant([3.0, -4.0]), None, tf.constant([3e25, 4e25]), tf.constant([[0.0, 6.0, 8.0]], tf.float16)]
    np.testing.assert_allclose(MODES[mode](measures.norm_of_each)(grads), [5, 0, 5e25, 10], rtol=1e-6)
    # One value: XLA reorders the products by which it is made smaller.
    one = [tf.constant([3e25]), None, tf.zeros([0]), tf.constant(-3e38), tf.constant([2.0])]
    np.testing.assert_allclose(MODES[mode](measures.norm_of_each)(one), [3e25, 0, 0, 3e38, 2], rtol=1e-6)


@pytest.mark.parametrize("factor", [1e30, 1.0, 1e-30])
@pytest.mark.parametrize("jit_compile", [False, True], ids=["function", "xla"])
def test_large_norms_are_right_and_small_ones_may_be_0(factor: float, jit_compile: bool) -> None:
    rng = np.random.default_rng(0)
    arrays = [rng.normal(size=shape) * factor for shape in ([40, 300], [5], [100, 100], [7, 3])]
    arrays.append(arrays[0] * 1e-30)
    types = [tf.float32, tf.float16 if factor == 1 else tf.float32, tf.float32, tf.float64, tf.float64]
    grads = [tf.constant(array, dtype) for array, dtype in zip(arrays, types, strict=True)]
    # The rows of one index are added up.
    rows = tf.constant(factor * np.float32([[1, -2], [4, 0], [2, 2]]))
    grads.insert(0, tf.IndexedSlices(rows, tf.constant([7, 3, 7]), tf.constant([9, 2])))
    found = tf.function(lambda: measures.large_norm_of_each([*grads, None]), jit_compile=jit_compile)()
    expected = [5 * factor, *(_norm([array]) for array in arrays)]
    np.testing.assert_allclose(found[:5], expected[:5], rtol=1e-3)
    np.testing.assert_allclose(found[5:], [expected[5], 0], atol=1e-9 * factor)


def test_a_graph_counts_large_gradients_by_one_function_for_each_type() -> None:
    @tf.function
    def counted(grads: Gradients) -> tf.Tensor:
        return measures.sums_of_each(grads, [tf.math.is_inf, tf.math.is_nan])

    shapes = [[100, 100], [2**14], [3, 1, 4000]]
    grads = [tf.fill(shape, tf.constant(math.inf, dtype)) for dtype in (tf.float32, tf.float64) for shape in shapes]
    assert counted(grads)[:, 0].numpy().tolist() == [10000, 2**14, 12000] * 2
    graph = counted.get_concrete_function(grads).graph
    calls = [op.get_attr("f").name for op in graph.get_operations() if op.type == "PartitionedCall"]
    assert len(calls) == 6
    assert len(set(calls)) == 2


@of_every_type
def test_counts_are_right_at_every_position_of_a_sparse_gradient(dtype: tf.DType) -> None:
    @tf.function(input_signature=[tf.TensorSpec([None, 2], dtype), tf.TensorSpec([None], tf.int64)])
    def counted(rows: tf.Tensor, indices: tf.Tensor) -> list[tf.Tensor]:
        # Its number of rows is unknown while the function is traced.
        sparse = tf.IndexedSlices(rows, indices, tf.constant([9, 2], tf.int64))
        small = [gradient([1.0, value], dtype) for value in (math.inf, 1.0)]
        # A `tf.DType` equals a small integer, so a dtype could be confused with a position in the list.
        places = [[None] * place + [sparse, *small, *small] for place in range(20)]
        return [measures.sums_of_each(grads, [tf.math.is_inf])[-5:, 0] for grads in places]

    rows = tf.cast([[math.inf, 1.0], [2.0, -math.inf]], dtype)
    for each in counted(rows, tf.constant([1, 2], tf.int64)):
        assert each.numpy().tolist() == [2, 1, 0, 1, 0]


def test_more_values_than_float32_can_count_are_counted() -> None:
    # An odd number above 2**24.
    counts = measures.sums_of_each([tf.ones([65793, 257], tf.float16)], [lambda values: values > 0])
    assert counts.numpy().tolist() == [[65793 * 257]]


@pytest.mark.parametrize("dtype", [tf.float32, tf.float64])
def test_form_for_accelerators_gives_the_same_answers(dtype: tf.DType, monkeypatch: pytest.MonkeyPatch) -> None:
    def answers() -> list[Any]:
        @functools.partial(tf.function, jit_compile=True)
        def answer(values: tf.Tensor) -> list[tf.Tensor]:
            counts = measures.sums_of_each([values], [tf.math.is_inf, tf.math.is_nan])
            return [measures.all_finite([values]), counts, measures.global_norm([values])]

        cases = [[1.0, 2.0], [math.inf, 1.0], [math.nan, -math.inf], [float(dtype.max), 1.0]]
        found = [answer(tf.constant([case] * 2**13, dtype)) for case in cases]
        return [[each.numpy().tolist() for each in row] for row in found]

    on_cpu = answers()
    monkeypatch.setattr(tracing, "has_accelerator", lambda: True)
    for found, expected in zip(answers(), on_cpu, strict=True):
        np.testing.assert_allclose(found[2], expected[2], rtol=1e-6)
        assert found[:2] == expected[:2]
    assert [row[0] for row in on_cpu] == [True, False, False, True]


@pytest.mark.graph
def test_sums_for_which_a_graph_has_several_ops_are_computed_once(session: tf.compat.v1.Session) -> None:
    fed = tf.compat.v1.placeholder(tf.float32, [100, 100])
    asked = [measures.only_suspects([fed], measures.are_suspect([fed]))[0], measures.all_finite([fed])]
    options, metadata = tf.compat.v1.RunOptions(output_partition_graphs=True), tf.compat.v1.RunMetadata()
    found = session.run(asked, {fed: np.ones([100, 100])}, options, metadata)
    assert [each.tolist() for each in found] == [[], True]
    assert [node.op for graph in metadata.partition_graphs for node in graph.node].count("L2Loss") == 1
