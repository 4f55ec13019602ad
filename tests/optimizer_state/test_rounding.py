"""Rounding to half precision, to the nearest value and stochastically."""

import math
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import tensorflow as tf

from tfmp.optimizer_state.rounding import rounded

_TYPES = pytest.mark.parametrize("dtype", [tf.float16, tf.bfloat16], ids=["float16", "bfloat16"])
_NUMPY = {tf.float16: np.float16, tf.bfloat16: ml_dtypes.bfloat16}

#: Values of all sizes that float16 has numbers around, subnormal ones too; and others of both signs.
_VALUES = [1 + 2**-12, 1.7, -1.3e-3, 3.3e-5, -4e-7, 3e-8, 1e-9, 2047.7, -60000.7, 65500.1]
_COUNT = 2**18


def _mean_and_deviation(values: Any) -> tuple[float, float]:
    exact = values.numpy().astype(np.float64)
    return float(exact.mean()), float(exact.std())


@_TYPES
@pytest.mark.parametrize("value", _VALUES)
def test_stochastic_rounding_is_unbiased_to_3_sigma(dtype: tf.DType, value: float) -> None:
    value = float(np.float32(value))
    found = rounded(tf.fill([_COUNT], tf.constant(value)), dtype, seed=[2, 5])
    mean, deviation = _mean_and_deviation(found)
    assert deviation > 0
    assert abs(mean - value) < 3 * deviation / math.sqrt(_COUNT)


@_TYPES
@pytest.mark.parametrize("value", _VALUES)
def test_stochastic_rounding_gives_only_the_two_next_values(dtype: tf.DType, value: float) -> None:
    found = rounded(tf.fill([4096], tf.constant(value, tf.float32)), dtype, seed=[0, 1]).numpy()
    numpy_type = _NUMPY[dtype]
    nearest = np.float32(value).astype(numpy_type)
    towards = numpy_type(math.inf if float(nearest) < np.float32(value) else -math.inf)
    assert set(found.tolist()) <= {float(nearest), float(np.nextafter(nearest, towards))}


@_TYPES
def test_values_that_the_type_has_stay(dtype: tf.DType) -> None:
    bits = np.arange(2**16, dtype=np.uint16)
    every = bits.view(_NUMPY[dtype])
    every = every[np.isfinite(every.astype(np.float32))]
    if dtype == tf.bfloat16:
        # Processors may replace subnormal numbers of float32 by 0.
        every = every[np.abs(every.astype(np.float32)) >= np.finfo(np.float32).tiny]
    for seed in (None, [0, 1], [1, 7]):
        np.testing.assert_array_equal(rounded(tf.constant(every.astype(np.float32)), dtype, seed).numpy(), every)


@_TYPES
def test_nearest_is_that_of_numpy(dtype: tf.DType) -> None:
    values = np.random.default_rng(0).normal(size=10_000).astype(np.float32)
    np.testing.assert_array_equal(rounded(tf.constant(values), dtype).numpy(), values.astype(_NUMPY[dtype]))


@_TYPES
@pytest.mark.parametrize("seed", [None, [3, 4]], ids=["nearest", "stochastic"])
def test_values_beyond_the_range_become_the_largest_and_infinities_stay(
    dtype: tf.DType, seed: list[int] | None
) -> None:
    largest = float(dtype.max)
    beyond = min(largest * 1.001, float(np.finfo(np.float32).max))
    found = rounded(tf.constant([beyond, -beyond, math.inf, -math.inf, math.nan]), dtype, seed).numpy()
    assert found.astype(np.float32)[:4].tolist() == [largest, -largest, math.inf, -math.inf]
    assert np.isnan(found.astype(np.float32)[4])


@_TYPES
def test_random_numbers_are_the_same_in_eager_code_and_within_xla(dtype: tf.DType) -> None:
    values = tf.random.stateless_normal([64, 33], seed=[1, 2])
    step = tf.constant(5, tf.int64)
    eager = rounded(values, dtype, [7, 2, step])
    compiled = tf.function(lambda values, step: rounded(values, dtype, [7, 2, step]), jit_compile=True)(values, step)
    np.testing.assert_array_equal(eager.numpy(), compiled.numpy())


def test_each_number_of_the_seed_gives_other_random_numbers() -> None:
    values = tf.fill([1000], 1 + 2.0**-9)
    seeds = [[0, 1, 2], [1, 1, 2], [0, 2, 2], [0, 1, 3], [0, 1, 2**40]]
    found = [rounded(values, tf.bfloat16, [tf.constant(number, tf.int64) for number in seed]) for seed in seeds]
    assert len({one.numpy().tobytes() for one in found}) == len(seeds)


def test_errors_of_steps_are_independent() -> None:
    steps = [rounded(tf.fill([4096], 1.5 + 2.0**-9), tf.bfloat16, [0, 1, step]).numpy() > 1.5 for step in range(64)]
    errors = np.stack(steps).astype(np.float64) - np.mean(steps)
    # Of neighbouring elements, and of the same element in consecutive steps; their deviations are 1 / sqrt(count).
    for one, other in ((errors[:, 1:], errors[:, :-1]), (errors[1:], errors[:-1])):
        correlation = float((one * other).mean() / errors.var())
        assert abs(correlation) < 4 / math.sqrt(one.size)


def test_shape_may_be_known_only_when_it_runs() -> None:
    shapes = [tf.TensorSpec([None, 3], tf.float32)]
    of_any_length = tf.function(lambda values: rounded(values, tf.float16, [0, 1]), input_signature=shapes)
    assert of_any_length(tf.fill([5, 3], 1.0001)).shape == [5, 3]
    assert rounded(tf.constant(1.0001), tf.float16, [0, 1]).shape == []
