"""Counts by powers of two equal those of NumPy, bit by bit, wherever they are computed."""

from collections.abc import Callable, Sequence

import numpy as np
import pytest
import tensorflow as tf
from checked_models import counted
from gradient_forms import MODES, in_every_mode, of_every_type

from tfmp.ranges import exponent_counts
from tfmp.ranges.exponents import LOWEST_EXPONENT, NUM_COUNTS, OTHER_COUNTS
from tfmp.types import Gradient

#: The exponents of the smallest subnormal and of the largest number.
_RANGES = {"float16": (-24, 15), "bfloat16": (-133, 127), "float32": (-149, 127), "float64": (-1074, 1023)}


def _bits(dtype: tf.DType, integers: np.ndarray) -> np.ndarray:
    """Return the values whose bits are the lowest ones of these integers."""
    unsigned = {2: np.uint16, 4: np.uint32, 8: np.uint64}[dtype.size]
    return integers.astype(unsigned).view(dtype.as_numpy_dtype)


def _random_bits(dtype: tf.DType, shape: Sequence[int]) -> np.ndarray:
    return _bits(dtype, np.random.default_rng(0).integers(0, 2**64, shape, np.uint64))


def _arrays(dtype: tf.DType) -> list[np.ndarray]:
    """Return arrays of several shapes that need each way to count, and all of them together."""
    kind = dtype.as_numpy_dtype
    smallest, largest = _RANGES[dtype.name]
    powers = np.ldexp(1.0, np.arange(smallest, largest + 1)).astype(kind)
    mantissa_bits = {"float16": 10, "bfloat16": 7, "float32": 23, "float64": 52}[dtype.name]
    mantissas = np.random.default_rng(1).integers(0, 2**mantissa_bits, 400, np.uint64)
    infinity = np.array([np.inf]).astype(kind).view(f"uint{8 * dtype.size}")[0].astype(np.uint64)
    return [
        _bits(dtype, np.arange(2**16, dtype=np.uint64)) if dtype.size == 2 else _random_bits(dtype, [5, 4001]),
        np.concatenate([powers, -powers]),
        _bits(dtype, mantissas),  # subnormal numbers
        _bits(dtype, mantissas + infinity),  # NaN
        np.array([[0.0, -0.0], [-0.0, 0.0]]).astype(kind),
        np.array([1.0, -0.0, np.inf, -np.inf, -np.inf]).astype(kind),
        np.zeros([2, 0, 3], kind),
        np.array(-0.75).astype(kind),
    ]


def _grads(dtype: tf.DType, tensor: Callable[[np.ndarray], tf.Tensor]) -> tuple[list[Gradient], list[list[int]]]:
    """Return gradients of all forms, whose values `tensor` makes of arrays, and their counts."""
    arrays = _arrays(dtype)
    # Rows of the same index are not added.
    rows = np.array([[1.0, 0.0], [-4.0, np.inf], [1.0, np.nan]]).astype(dtype.as_numpy_dtype)
    sparse = tf.IndexedSlices(tensor(rows), tf.constant([3, 0, 3]), tf.constant([9, 2]))
    # None has no values.
    counts = [counted(each).row.tolist() for each in [*arrays, rows]]
    return [None, *map(tensor, arrays), sparse], [[0] * NUM_COUNTS, *counts]


@in_every_mode
@of_every_type
def test_every_column_equals_numpys(dtype: tf.DType, mode: str) -> None:
    grads, expected = _grads(dtype, tf.constant)
    counts = MODES[mode](exponent_counts)(grads)
    assert counts.dtype == tf.int64
    assert counts.numpy().tolist() == expected


@pytest.mark.graph
@of_every_type
def test_every_column_equals_numpys_in_a_graph(dtype: tf.DType, session: tf.compat.v1.Session) -> None:
    fed: dict[tf.Tensor, np.ndarray] = {}

    def placeholder(array: np.ndarray) -> tf.Tensor:
        # The shapes of half of them are unknown.
        made = tf.compat.v1.placeholder(dtype, array.shape if len(fed) % 2 else None)
        fed[made.ref()] = array
        return made

    grads, expected = _grads(dtype, placeholder)
    counts = exponent_counts(grads)
    assert counts.shape.as_list() == [len(grads), NUM_COUNTS]
    assert session.run(counts, {made.deref(): array for made, array in fed.items()}).tolist() == expected
    # TensorFlow computes what depends on constants only once, before the graph runs.
    grads, expected = _grads(dtype, tf.constant)
    assert session.run(exponent_counts(grads[5:])).tolist() == expected[5:]
    # Any iterable will do, also one without tensors.
    assert session.run(exponent_counts(iter([]))).shape == (0, NUM_COUNTS)


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("dtype", [tf.float32, tf.float64], ids=lambda dtype: dtype.name)
def test_single_subnormal_number_is_told_from_zeros(dtype: tf.DType, sign: int) -> None:
    smallest, least_normal = {tf.float32: (-149, -126), tf.float64: (-1074, -1022)}[dtype]
    for number in (2.0**smallest, 2.0**least_normal - 2.0**smallest):
        for values in ([sign * number], [sign * number, sign * 0.0, 1.0], [-sign * 0.0, sign * number]):
            array = np.array(values).astype(dtype.as_numpy_dtype)
            assert exponent_counts([tf.constant(array)]).numpy().tolist() == [counted(array).row.tolist()]


def test_columns_after_the_exponents_are_named_and_more_values_counted_than_float32_can_count() -> None:
    assert OTHER_COUNTS == ("zero", "infinite", "nan", "below", "above")
    values = tf.constant([0.0] + [np.inf] * 2 + [np.nan] * 3 + [1e-100] * 4 + [1e100] * 5, tf.float64)
    assert exponent_counts([values]).numpy()[0, -5:].tolist() == [1, 2, 3, 4, 5]
    counts = exponent_counts([tf.ones([2**24 + 1], tf.float16)])
    assert int(counts[0, -LOWEST_EXPONENT]) == 2**24 + 1


@pytest.mark.graph
@pytest.mark.parametrize("dtype", [tf.int32, tf.uint8, tf.bool, tf.complex64], ids=lambda dtype: dtype.name)
def test_other_types_are_refused(dtype: tf.DType) -> None:
    message = f"^powers of two are counted in floating-point tensors, got one of {dtype.name}.$"
    for tensor in (tf.zeros([2], dtype), tf.IndexedSlices(tf.zeros([1, 2], dtype), tf.constant([0]))):
        with pytest.raises(TypeError, match=message):
            exponent_counts([tf.constant(1.0), tensor])
