"""Histograms over powers of two, and the shares that NumPy's own casts to half precision confirm."""

import json
import re
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

import tfmp

RangeHistogram = tfmp.ranges.RangeHistogram


def _of(*values: float, dtype: tf.DType = tf.float64) -> tfmp.ranges.RangeHistogram:
    return RangeHistogram.of(tf.constant(values, dtype))


def _shares_by_numpy(values: np.ndarray, dtype: str, scale: float) -> tfmp.ranges.RangeShares:
    """Return the shares that a cast of scaled values by NumPy shows."""
    kind = tf.as_dtype(dtype).as_numpy_dtype
    smallest_normal = {"float16": 2.0**-14, "bfloat16": 2.0**-126}[dtype]
    # Scaled in float64: what overflows is not to be infinite before the cast.
    scaled = np.float64(values) * scale
    with np.errstate(over="ignore"):
        cast = np.float64(scaled.astype(kind))
    finite, was_finite, not_zero = np.isfinite(cast), np.isfinite(values), values != 0
    parts = {
        "zero": ~not_zero,
        "lost": not_zero & (cast == 0),
        # What is rounded up to the smallest normal number loses bits, too.
        "subnormal": not_zero & finite & (cast != 0) & (np.abs(scaled) < smallest_normal),
        "normal": finite & (np.abs(scaled) >= smallest_normal),
        "overflow": was_finite & ~finite,
        "nonfinite": ~was_finite,
    }
    return tfmp.ranges.RangeShares(**{name: float(part.sum()) / max(values.size, 1) for name, part in parts.items()})


def _comparable(values: np.ndarray, largest: float, half_of_smallest: float, scale: float) -> np.ndarray:
    """Leave out what a histogram cannot tell: values from the largest to the next power of two, and a tie."""
    scaled = np.abs(np.float64(values) * scale)
    next_power = 2.0 ** np.ceil(np.log2(largest))
    return values[~((scaled >= largest) & (scaled < next_power)) & (scaled != half_of_smallest)]


@pytest.mark.parametrize("scale", [1.0, 2.0**7, 2.0**15])
@pytest.mark.parametrize("kind", ["bits", "near", "gradients"])
def test_shares_of_float16_are_those_of_numpys_casts(kind: str, scale: float) -> None:
    rng = np.random.default_rng(0)
    values = {
        "bits": lambda: rng.integers(0, 2**32, 20000, np.uint64).astype(np.uint32).view(np.float32),
        # Around the bounds, also with exact powers of two.
        "near": lambda: np.float32(np.ldexp(rng.choice([1.0, 1.25, -1.999, 0.0], 20000), rng.integers(-45, 20, 20000))),
        "gradients": lambda: np.float32(np.exp(rng.normal(-14, 6, 20000)) * rng.choice([-1, 1], 20000)),
    }[kind]()
    with np.errstate(invalid="ignore"):
        values = _comparable(values, 65504.0, 2.0**-25, scale)
        expected = _shares_by_numpy(values, "float16", scale)
    histogram = RangeHistogram.of(tf.constant(values))
    assert histogram.shares("float16", scale=scale) == expected
    assert histogram.shares(scale=scale) == expected
    assert histogram.times(scale).shares() == expected
    assert sum(expected) == pytest.approx(1)


@pytest.mark.parametrize("scale", [1.0, 2.0**7, 2.0**15])
def test_shares_of_bfloat16_are_those_of_casts(scale: float) -> None:
    rng = np.random.default_rng(0)
    values = np.ldexp(rng.choice([1.0, 1.25, -1.75, 0.0], 20000), rng.integers(-149, 127, 20000)).astype(np.float32)
    values = _comparable(values, (2 - 2.0**-7) * 2.0**127, 2.0**-134, scale)
    expected = _shares_by_numpy(values, "bfloat16", scale)
    assert RangeHistogram.of(tf.constant(values)).shares("bfloat16", scale=scale) == expected


def test_shares_count_the_bounds_of_float16_exactly() -> None:
    below, smallest, normal, largest = 2.0**-26, 2.0**-24, 2.0**-14, 65504.0
    assert _of(0.0, below, smallest, normal, largest, 65536.0, np.inf, np.nan).shares() == tfmp.ranges.RangeShares(
        zero=1 / 8, lost=1 / 8, subnormal=1 / 8, normal=2 / 8, overflow=1 / 8, nonfinite=2 / 8
    )
    # With values of float64 beyond all bins.
    assert _of(1e-200, 1e200, 1.0, 1.0).shares() == tfmp.ranges.RangeShares(0, 0.25, 0, 0.5, 0.25, 0)
    assert RangeHistogram().shares() == tfmp.ranges.RangeShares(0, 0, 0, 0, 0, 0)


def test_scale_that_is_no_power_of_two_is_taken_as_the_nearest() -> None:
    histogram = _of(2.0**-30, 2.0**-20)
    assert histogram.shares(scale=1000.0) == histogram.shares(scale=1024.0)
    assert histogram.times(1000.0) == histogram.times(1024.0) == _of(2.0**-20, 2.0**-10)


def test_exponents_are_the_lowest_and_the_highest() -> None:
    assert _of(0.0, np.inf).exponents is None
    assert RangeHistogram().exponents is None
    assert _of(0.0, -3.0, 2.0**-149, np.nan).exponents == (-149, 1)
    assert _of(2.0**-150, 2.0**127).exponents == (-150, 127)
    assert _of(1e-200, 1.0).exponents == (-151, 0)
    assert _of(1e-200, 1e200).exponents == (-151, 128)


def test_numbers_of_values_are_told_apart() -> None:
    histogram = _of(0.0, -0.0, 1.0, -1.5, np.inf, -np.inf, np.nan, 1e-200, 1e200)
    assert (histogram.total, histogram.zeros, histogram.nonfinite) == (9, 2, 3)
    assert histogram.counts.shape == (278,)
    assert (histogram.counts.sum(), histogram.counts[150]) == (2, 2)
    assert repr(histogram) == "<RangeHistogram of 9 values, 2^-151..2^128>"
    assert repr(RangeHistogram()) == "<RangeHistogram of 0 values, no value but 0>"


def test_histogram_is_of_all_tensors_together() -> None:
    sparse = tf.IndexedSlices(tf.constant([[1.0, 4.0]]), tf.constant([2]), tf.constant([9, 2]))
    both = RangeHistogram.of(tf.constant([1.0], tf.float16), None, sparse)
    assert both == _of(1.0) + _of(1.0, 4.0)
    assert both != _of(1.0)
    assert both != 3
    assert RangeHistogram.of() == RangeHistogram()
    with pytest.raises(TypeError, match="unhashable"):
        hash(both)


def test_sum_leaves_both_as_they_are() -> None:
    one, other = _of(1.0, 0.0), _of(np.nan, 2.0)
    assert (one + other).to_dict() == {"0": 1, "1": 1, "zero": 1, "nan": 1}
    assert (one.to_dict(), other.to_dict()) == ({"0": 1, "zero": 1}, {"1": 1, "nan": 1})


def test_multiplied_values_leave_the_bins_at_both_ends() -> None:
    histogram = _of(2.0**-150, 1.0, 2.0**127, 0.0, np.inf, np.nan)
    assert histogram.times(1) == histogram
    assert histogram.times(2).to_dict() == {"-149": 1, "1": 1, "zero": 1, "infinite": 1, "nan": 1, "above": 1}
    assert histogram.times(0.5).to_dict() == {"-1": 1, "126": 1, "zero": 1, "infinite": 1, "nan": 1, "below": 1}


@settings(deadline=None, max_examples=60)
@given(st.lists(st.floats(width=32), max_size=12), st.integers(-20, 20))
def test_multiplied_histogram_is_that_of_multiplied_values(values: list[float], power: int) -> None:
    array = np.array(values, np.float64)
    with np.errstate(invalid="ignore"):
        expected = RangeHistogram.of(tf.constant(array * 2.0**power))
    assert RangeHistogram.of(tf.constant(array)).times(2.0**power) == expected


@settings(deadline=None, max_examples=60)
@given(st.lists(st.floats(width=64), max_size=12))
def test_dictionary_gives_the_histogram_back(values: list[float]) -> None:
    histogram = _of(*values)
    found = histogram.to_dict()
    assert all(found.values())
    assert sum(found.values()) == len(values)
    assert RangeHistogram.from_dict(json.loads(json.dumps(found))) == histogram


def test_row_of_another_shape_is_refused() -> None:
    for bad in (np.zeros([278]), np.zeros([1, 283]), 3):
        shape = np.shape(bad)
        message = f"counts must be a row of tfmp.ranges.exponent_counts, of shape [283], got shape {shape}."
        with pytest.raises(ValueError, match=re.escape(message)):
            RangeHistogram(bad)


def test_histogram_keeps_a_copy_of_its_counts() -> None:
    row = np.zeros([283], np.int64)
    histogram = RangeHistogram(row)
    row[0] = 1
    assert histogram == RangeHistogram()


@pytest.mark.parametrize(
    ("bad", "error", "message"),
    [
        (0, ValueError, "must be greater than 0, got 0."),
        (-2.0, ValueError, "must be greater than 0, got -2.0."),
        (np.inf, ValueError, "must be finite, got inf."),
        ("8", TypeError, "must be a number, got '8' of type str."),
    ],
)
def test_bad_factor_is_refused(bad: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=re.escape(f"factor {message}")):
        _of(1.0).times(bad)
    with pytest.raises(error, match=re.escape(f"scale {message}")):
        _of(1.0).shares(scale=bad)


def test_other_type_is_refused() -> None:
    with pytest.raises(ValueError, match=re.escape('dtype must be "float16" or "bfloat16", got \'float32\'.')):
        _of(1.0).shares("float32")
    with pytest.raises(TypeError, match="powers of two are counted in floating-point tensors, got one of int32"):
        RangeHistogram.of(tf.constant([1]))
