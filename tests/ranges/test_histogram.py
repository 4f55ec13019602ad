"""Histograms over powers of two against NumPy and its casts to half precision; and probes, which change no value."""

import json
import re
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from checked_models import counted
from hypothesis import example, given, settings
from hypothesis import strategies as st

import tfmp
from tfmp.ranges.probes import probes_of_graph

RangeHistogram, RangeShares = tfmp.ranges.RangeHistogram, tfmp.ranges.RangeShares


def _of(*values: float, dtype: tf.DType = tf.float64) -> tfmp.ranges.RangeHistogram:
    return RangeHistogram.of(tf.constant(values, dtype))


@settings(max_examples=60)
@given(st.lists(st.floats(width=64), max_size=12), st.lists(st.floats(width=32), max_size=12), st.integers(-20, 20))
@example([0.0, -0.0, 1.0, -1.5, np.inf, -np.inf, np.nan, 1e-200, 1e200], [2.0**-150, 2.0**127, 0.0, 1.0], 1)
@example([1e-200, 1.0], [2.0**-150, 1.0, 2.0**127], -1)
def test_histogram_is_that_of_numpy(wide: list[float], narrow: list[float], power: int) -> None:
    one, other = RangeHistogram.of(tf.constant(wide, tf.float64)), RangeHistogram.of(tf.constant(narrow, tf.float32))
    assert (one, other) == (counted(wide), counted(np.float32(narrow)))
    # The sum leaves both as they are.
    both = one + other
    assert both == RangeHistogram.of(tf.constant(wide, tf.float64), None, tf.constant(narrow, tf.float32))
    assert one == counted(wide)
    found = one.to_dict()
    assert all(found.values())
    assert RangeHistogram.from_dict(json.loads(json.dumps(found))) == one
    with np.errstate(invalid="ignore", over="ignore"):
        assert other.times(2.0**power) == counted(np.float64(np.float32(narrow)) * 2.0**power)
    values = np.array(wide)
    finite = np.abs(values[np.isfinite(values) & (values != 0)])
    expected = [int(np.clip(np.frexp(each)[1] - 1, -151, 128)) for each in finite]
    assert one.exponents == ((min(expected), max(expected)) if expected else None)
    assert (one.total, one.zeros) == (len(wide), np.count_nonzero(values == 0))
    assert (one.nonfinite, one.counts.shape) == (np.count_nonzero(~np.isfinite(values)), (278,))
    assert one.counts.sum() == sum(-150 <= exponent <= 127 for exponent in expected)


def test_histogram_shows_its_range_and_is_compared_by_its_counts() -> None:
    row = np.zeros([283], np.int64)
    histogram = RangeHistogram(row)
    # It keeps a copy of its counts.
    row[0] = 1
    assert histogram == RangeHistogram() == RangeHistogram.of()
    assert (_of(1.0) != _of(2.0), _of(1.0) != 3) == (True, True)
    assert repr(_of(0.0, 1e-200, 1e200)) == "<RangeHistogram of 3 values, 2^-151..2^128>"
    assert repr(histogram) == "<RangeHistogram of 0 values, no value but 0>"
    with pytest.raises(TypeError, match="unhashable"):
        hash(histogram)


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
    return RangeShares(**{name: float(part.sum()) / max(values.size, 1) for name, part in parts.items()})


@pytest.mark.parametrize("scale", [1.0, 2.0**7, 2.0**15])
@pytest.mark.parametrize("kind", ["bits", "near", "gradients"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_shares_are_those_of_numpys_casts(dtype: str, kind: str, scale: float) -> None:
    rng = np.random.default_rng(0)
    lowest, highest = {"float16": (-45, 20), "bfloat16": (-149, 127)}[dtype]
    values = {
        "bits": lambda: rng.integers(0, 2**32, 20000, np.uint64).astype(np.uint32).view(np.float32),
        # Around the bounds, also with exact powers of two.
        "near": lambda: np.float32(
            np.ldexp(rng.choice([1.0, 1.25, -1.999, 0.0], 20000), rng.integers(lowest, highest, 20000))
        ),
        "gradients": lambda: np.float32(np.exp(rng.normal(-14, 6, 20000)) * rng.choice([-1, 1], 20000)),
    }[kind]()
    largest, tie = {"float16": (65504.0, 2.0**-25), "bfloat16": ((2 - 2.0**-7) * 2.0**127, 2.0**-134)}[dtype]
    with np.errstate(invalid="ignore"):
        # A histogram cannot tell the values from the largest to the next power of two, and a tie.
        scaled = np.abs(np.float64(values) * scale)
        values = values[~((scaled >= largest) & (scaled < 2.0 ** np.ceil(np.log2(largest)))) & (scaled != tie)]
        expected = _shares_by_numpy(values, dtype, scale)
    histogram = RangeHistogram.of(tf.constant(values))
    assert histogram.shares(dtype, scale=scale) == expected
    assert sum(expected) == pytest.approx(1)
    if dtype == "float16":
        # It is the default.
        assert histogram.times(scale).shares() == expected


def test_shares_count_the_bounds_of_float16_exactly() -> None:
    below, smallest, normal, largest = 2.0**-26, 2.0**-24, 2.0**-14, 65504.0
    assert _of(0.0, below, smallest, normal, largest, 65536.0, np.inf, np.nan).shares() == RangeShares(
        zero=1 / 8, lost=1 / 8, subnormal=1 / 8, normal=2 / 8, overflow=1 / 8, nonfinite=2 / 8
    )
    # With values of float64 beyond all bins.
    assert _of(1e-200, 1e200, 1.0, 1.0).shares() == RangeShares(0, 0.25, 0, 0.5, 0.25, 0)
    assert RangeHistogram().shares() == RangeShares(0, 0, 0, 0, 0, 0)


def test_scale_that_is_no_power_of_two_is_taken_as_the_nearest() -> None:
    histogram = _of(2.0**-30, 2.0**-20)
    assert histogram.shares(scale=1000.0) == histogram.shares(scale=1024.0)
    assert histogram.times(1000.0) == histogram.times(1024.0) == _of(2.0**-20, 2.0**-10)


def _counts_of(counts: tf.Tensor) -> list[dict[str, int]]:
    return [RangeHistogram(row).to_dict() for row in counts.numpy()]


# That of Horovod's workers is tested with the hook.
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "function"])
def test_counts_are_summed_over_replicas_if_asked(two_replicas: tf.distribute.MirroredStrategy, compiled: bool) -> None:
    def of_replica() -> tuple[tf.Tensor, tf.Tensor]:
        replica = tf.cast(tf.distribute.get_replica_context().replica_id_in_sync_group, tf.float32)
        tensors = [tf.stack([1.0, 4 * replica]), None]
        return tfmp.ranges.exponent_counts(tensors), tfmp.ranges.exponent_counts(
            tensors, is_distributed=True, name="all"
        )

    def run() -> list[tuple[tf.Tensor, ...]]:
        return [two_replicas.experimental_local_results(each) for each in two_replicas.run(of_replica)]

    own, total = (tf.function(run) if compiled else run)()
    assert [_counts_of(each) for each in own] == [[{"0": 1, "zero": 1}, {}], [{"0": 1, "2": 1}, {}]]
    assert [_counts_of(each) for each in total] == [[{"0": 2, "2": 1, "zero": 1}, {}]] * 2


_COUNTS = "counts must be a row of tfmp.ranges.exponent_counts, of shape [283], got shape "
_PROBE = "a probe takes a tensor of a floating-point type, got "
_HALF = 'dtype must be "float16" or "bfloat16", got '


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: _of(1.0).times(0), ValueError, "factor must be greater than 0, got 0."),
        (lambda: _of(1.0).times("8"), TypeError, "factor must be a number, got '8' of type str."),
        (lambda: _of(1.0).shares(scale=-2.0), ValueError, "scale must be greater than 0, got -2.0."),
        (lambda: _of(1.0).shares("half"), ValueError, f"{_HALF}'half'."),
        (lambda: _of(1.0).shares(tf.float16), ValueError, f"{_HALF}tf.float16."),
        (lambda: RangeHistogram(np.zeros([278])), ValueError, f"{_COUNTS}(278,)."),
        (lambda: tfmp.ranges.probe(tf.constant(1.0), 3), TypeError, "name must be a string, got 3 of type int"),
        (lambda: tfmp.ranges.probe(tf.constant(1), "x"), TypeError, f"{_PROBE}int32 for 'x'."),
        (lambda: tfmp.ranges.probe(1.0, "x"), TypeError, f"{_PROBE}float for 'x'."),
        (lambda: tfmp.ranges.probe([tf.constant(1.0)], "x"), TypeError, f"{_PROBE}list for 'x'."),
        (
            lambda: tfmp.ranges.exponent_counts([tf.ones([])], is_distributed=True),
            ValueError,
            "is_distributed=True, and nothing distributes",
        ),
    ],
)
def test_bad_input_is_refused(call: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=re.escape(message)):
        call()


@pytest.mark.parametrize("jit_compile", [False, True], ids=["function", "xla"])
def test_probe_adds_no_op_to_a_function(jit_compile: bool) -> None:
    @tf.function(jit_compile=jit_compile)
    def double(x: tf.Tensor) -> tf.Tensor:
        return tfmp.ranges.probe(x, "x") * 2.0

    assert float(double(tf.constant(3.0))) == 6
    types = [op.type for op in double.get_concrete_function(tf.constant(3.0)).graph.get_operations()]
    # The one identity op is that of the result.
    assert types.count("Identity") == 1


@pytest.mark.graph
def test_probe_that_could_not_be_fetched_is_not_seen(session: tf.compat.v1.Session) -> None:
    def inner() -> tf.Tensor:
        return tfmp.ranges.probe(tf.constant(1.0) * 2.0, "inner")

    found = [tf.cond(tf.constant(True), inner, inner), tf.function(inner)()]
    found.append(tf.while_loop(lambda index: index < 2.0, lambda index: index + inner(), [0.0]))
    assert session.run(tf.stack([tf.reshape(each, []) for each in found])).tolist() == [2, 2, 2]
    assert probes_of_graph() == []
    # A tensor of its own: the other may be used beside it.
    x = tf.constant(1.0)
    probed = tfmp.ranges.probe(x, "x")
    assert probed is not x
    assert [found.tensor is probed for found in probes_of_graph()] == [True]
