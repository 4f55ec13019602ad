"""Rounding to half precision, to the nearest value and stochastically, in programs of XLA and op by op."""

import logging
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import tensorflow as tf

from tfmp.optimizer_state import rounding
from tfmp.optimizer_state.rounding import rounded, rounded_result

_TYPES = pytest.mark.parametrize("dtype", [tf.float16, tf.bfloat16], ids=["float16", "bfloat16"])
_SEEDS = pytest.mark.parametrize("seed", [None, [7, 3, 2**40]], ids=["nearest", "stochastic"])
_NUMPY = {tf.float16: np.float16, tf.bfloat16: ml_dtypes.bfloat16}

#: Infinities, NaN, the largest values of the types and their neighbours, zeros and values that are subnormal.
_SPECIAL = [math.inf, -math.inf, math.nan, 3.4e38, -3.4e38, 65504.0, 65519.0, -65520.0, 0.0, -0.0, 1e-8, 6e-8, 1e-40]


@_TYPES
# Values of all sizes that float16 has numbers around, subnormal ones too; and others of both signs.
@pytest.mark.parametrize("value", [1 + 2**-12, 1.7, -1.3e-3, 3.3e-5, -4e-7, 3e-8, 1e-9, 2047.7, -60000.7, 65500.1])
def test_stochastic_rounding_gives_the_two_next_values_and_is_unbiased_to_3_sigma(
    dtype: tf.DType, value: float
) -> None:
    value, numpy_type, count = float(np.float32(value)), _NUMPY[dtype], 2**18
    found = rounded(tf.fill([count], tf.constant(value)), dtype, seed=[2, 5]).numpy()
    nearest = np.float32(value).astype(numpy_type)
    towards = numpy_type(math.inf if float(nearest) < value else -math.inf)
    assert set(found.tolist()) == {float(nearest), float(np.nextafter(nearest, towards))}
    exact = found.astype(np.float64)
    assert abs(exact.mean() - value) < 3 * exact.std() / math.sqrt(count)


@_TYPES
@_SEEDS
def test_values_that_the_type_has_stay_and_others_become_the_nearest_or_the_largest(
    dtype: tf.DType, seed: list[int] | None
) -> None:
    every = np.arange(2**16, dtype=np.uint16).view(_NUMPY[dtype])
    if dtype == tf.bfloat16:
        # Processors may replace subnormal numbers of float32 by 0.
        every = every[~(np.abs(every.astype(np.float32)) < np.finfo(np.float32).tiny)]
    every = every.astype(np.float32)
    np.testing.assert_array_equal(np.float32(rounded(tf.constant(every), dtype, seed).numpy()), every)
    values = np.random.default_rng(0).normal(size=10_000).astype(np.float32)
    if seed is None:
        np.testing.assert_array_equal(rounded(tf.constant(values), dtype).numpy(), values.astype(_NUMPY[dtype]))
    largest = float(dtype.max)
    beyond = min(largest * 1.001, float(np.finfo(np.float32).max))
    assert np.float32(rounded(tf.constant([beyond, -beyond]), dtype, seed).numpy()).tolist() == [largest, -largest]


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


def _values(seed: int, dtype: tf.DType = tf.float32) -> tf.Tensor:
    rng = np.random.default_rng(seed)
    of_all_sizes = rng.normal(size=20_000) * 10.0 ** rng.integers(-10, 10, size=20_000)
    return tf.cast(rng.permutation(np.concatenate([of_all_sizes, _SPECIAL * 20])).astype(np.float32), dtype)


def _bits(values: tf.Tensor) -> Any:
    """Return the bits of all values but NaN, of which there are several."""
    array = values.numpy()
    return np.where(np.isnan(array.astype(np.float32)), np.uint16(0x7FFF), array.view(np.uint16)).tolist()


def _num_programs(function: Callable[..., object], *args: Any) -> tuple[int, int]:
    """Return the number of calls of compiled programs in the graph of a function, and of the programs."""
    nodes = tf.function(function, autograph=False).get_concrete_function(*args).graph.as_graph_def().node
    called = [node.attr["f"].func.name for node in nodes if "_XlaMustCompile" in node.attr]
    return len(called), len(set(called))


@_TYPES
@_SEEDS
@pytest.mark.parametrize("compute", [tf.identity, operator.add, operator.sub])
def test_programs_give_the_bits_of_operations_one_by_one(
    compute: Callable[..., tf.Tensor], dtype: tf.DType, seed: list[int] | None
) -> None:
    values = [_values(0)] if compute is tf.identity else [_values(0, dtype), _values(1)]
    numbers = None if seed is None else [tf.constant(number, tf.int64) for number in seed]
    expected = _bits(rounded(compute(*(tf.cast(value, tf.float32) for value in values)), dtype, numbers))

    def result(*values: tf.Tensor) -> tf.Tensor:
        return rounded_result(compute, values, dtype, numbers)

    assert _bits(result(*values)) == expected
    assert _num_programs(result, *values) == (1, 1)
    assert _bits(tf.function(result, autograph=False)(*values)) == expected
    within_xla = tf.function(result, autograph=False, jit_compile=True)
    assert _bits(within_xla(*values)) == expected
    assert not within_xla.get_concrete_function(*values).graph.as_graph_def().library.function


def test_results_of_all_shapes_share_one_program_without_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    shapes: list[list[int]] = [[], [3], [2, 3], [0, 4], *([size] for size in range(4, 9))]

    def results() -> list[tf.Tensor]:
        return [rounded_result(tf.identity, [tf.ones(shape)], tf.bfloat16, [0, n]) for n, shape in enumerate(shapes)]

    assert _num_programs(results) == (len(shapes), 1)
    for found in (tf.function(results, autograph=False)(), results()):
        assert [result.shape for result in found] == shapes
    # TensorFlow's, of functions that are traced too often.
    assert "retracing" not in caplog.text


def test_tapes_need_no_gradient_of_a_program() -> None:
    weight = tf.constant([1.0, 2.0])
    with tf.GradientTape() as tape:
        tape.watch(weight)
        square = weight**2
        rounded_result(operator.add, [weight, square], tf.bfloat16, [1])
    assert tape.gradient(square, weight).numpy().tolist() == [2.0, 4.0]


def _result() -> tf.Tensor:
    values: Sequence[tf.Tensor] = [tf.constant([1.0, 2.0], tf.bfloat16), tf.constant([0.5, 0.0039])]
    return rounded_result(operator.add, values, tf.bfloat16, [0, 1])


def test_session_runs_it() -> None:
    expected = _bits(_result())
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        found = session.run(tf.cast(_result(), tf.float32))
    assert _bits(tf.cast(found, tf.bfloat16)) == expected


def _break_xla(patch: pytest.MonkeyPatch) -> None:
    def program(*args: object) -> tf.Tensor:
        raise tf.errors.UnimplementedError(None, None, "XLA is not linked")

    rounding._xla_works.cache_clear()
    patch.setattr(rounding, "_program", lambda *_: program)


@pytest.mark.parametrize(
    ("begin", "end", "num_warnings"),
    [
        (lambda _: tf.debugging.enable_check_numerics(), tf.debugging.disable_check_numerics, 0),
        (lambda _: tf.config.run_functions_eagerly(True), lambda: tf.config.run_functions_eagerly(False), 0),
        (lambda patch: patch.setattr(rounding, "has_apple_gpu", lambda: True), lambda: None, 0),
        (_break_xla, rounding._xla_works.cache_clear, 1),
    ],
    ids=["numerics are checked", "functions run eagerly", "Apple's GPU", "XLA fails"],
)
def test_operations_run_one_by_one_where_no_program_can(
    begin: Any, end: Any, num_warnings: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    expected = _bits(_result())
    begin(monkeypatch)
    try:
        with caplog.at_level(logging.WARNING, logger="tfmp"):
            found = [_result(), tf.function(_result, autograph=False)(), _result()]
            programs = (0, 0) if tf.config.functions_run_eagerly() else _num_programs(_result)
    finally:
        end()
    assert ([_bits(each) for each in found], programs) == ([expected] * 3, (0, 0))
    messages = [record.getMessage() for record in caplog.records if record.name == "tfmp"]
    # It is said once.
    assert len(messages) == num_warnings
    assert all("rounded without XLA" in each and "XLA is not linked" in each for each in messages)
