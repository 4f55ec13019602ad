"""Rounded results, of programs that XLA compiles and of operations one by one."""

import logging
import math
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tfmp.optimizer_state import rounded_results
from tfmp.optimizer_state.rounded_results import rounded_result
from tfmp.optimizer_state.rounding import rounded

_TYPES = pytest.mark.parametrize("dtype", [tf.float16, tf.bfloat16], ids=["float16", "bfloat16"])
_SEEDS = pytest.mark.parametrize("seed", [None, [7, 3, 2**40]], ids=["nearest", "stochastic"])

#: Infinities, NaN, the largest values of the types and their neighbours, zeros and values that are subnormal.
_SPECIAL = [math.inf, -math.inf, math.nan, 3.4e38, -3.4e38, 65504.0, 65519.0, -65520.0, 0.0, -0.0, 1e-8, 6e-8, 1e-40]


def _itself(value: tf.Tensor) -> tf.Tensor:
    return value


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


@pytest.fixture
def xla_untried() -> Iterator[None]:
    rounded_results._xla_compiled.cache_clear()
    yield
    rounded_results._xla_compiled.cache_clear()


@_TYPES
@_SEEDS
@pytest.mark.parametrize("compute", [_itself, operator.add, operator.sub])
@pytest.mark.essential
def test_programs_give_the_bits_of_operations_one_by_one(
    compute: Callable[..., tf.Tensor], dtype: tf.DType, seed: list[int] | None
) -> None:
    values = [_values(0)] if compute is _itself else [_values(0, dtype), _values(1)]
    numbers = None if seed is None else [tf.constant(number, tf.int64) for number in seed]
    expected = _bits(rounded(compute(*(tf.cast(value, tf.float32) for value in values)), dtype, numbers))

    def result(*values: tf.Tensor) -> tf.Tensor:
        return rounded_result(compute, values, dtype, numbers)

    assert _bits(result(*values)) == expected
    assert _num_programs(result, *values) == (1, 1)
    assert _bits(tf.function(result, autograph=False)(*values)) == expected
    within_xla = tf.function(result, autograph=False, jit_compile=True)
    assert _bits(within_xla(*values)) == expected


def test_results_of_all_shapes_share_one_program() -> None:
    def results() -> list[tf.Tensor]:
        shapes: list[list[int]] = [[], [3], [2, 3], [0, 4]]
        return [
            rounded_result(_itself, [tf.ones(shape)], tf.bfloat16, [0, number]) for number, shape in enumerate(shapes)
        ]

    assert _num_programs(results) == (4, 1)
    assert [result.shape for result in tf.function(results, autograph=False)()] == [[], [3], [2, 3], [0, 4]]


def test_tensorflow_does_not_warn_of_many_programs(caplog: pytest.LogCaptureFixture) -> None:
    for count in range(1, 8):
        for dtype in (tf.float16, tf.bfloat16):
            rounded_result(_itself, [tf.ones([count])], dtype, range(count))
    assert "retracing" not in caplog.text


def test_within_xla_there_are_no_further_programs() -> None:
    compiled = tf.function(
        lambda value: rounded_result(_itself, [value], tf.bfloat16, [1]), autograph=False, jit_compile=True
    )
    assert not compiled.get_concrete_function(tf.ones([2])).graph.as_graph_def().library.function


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


@pytest.mark.parametrize("eager", [True, False], ids=["eager", "graph"])
def test_operations_run_one_by_one_while_numerics_are_checked(eager: bool) -> None:
    expected = _bits(_result())
    tf.debugging.enable_check_numerics()
    try:
        assert _bits(_result() if eager else tf.function(_result, autograph=False)()) == expected
        assert _num_programs(_result) == (0, 0)
    finally:
        tf.debugging.disable_check_numerics()


def test_operations_run_one_by_one_where_functions_do() -> None:
    expected = _bits(_result())
    tf.config.run_functions_eagerly(True)
    try:
        assert _bits(_result()) == expected
    finally:
        tf.config.run_functions_eagerly(False)


def test_operations_run_one_by_one_on_an_apple_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = _bits(_result())
    monkeypatch.setattr(rounded_results, "has_apple_gpu", lambda: True)
    assert _bits(_result()) == expected
    assert _num_programs(_result) == (0, 0)


@pytest.mark.usefixtures("xla_untried")
def test_operations_run_one_by_one_if_xla_fails(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    expected = _bits(_result())
    rounded_results._xla_compiled.cache_clear()

    def without_xla(*args: object) -> tf.Tensor:
        raise tf.errors.UnimplementedError(None, None, "XLA is not linked")

    monkeypatch.setattr(rounded_results, "_program", lambda *_: without_xla)
    with caplog.at_level(logging.WARNING, logger="tfmp"):
        assert [_bits(_result()) for _ in range(2)] == [expected] * 2
        assert _num_programs(_result) == (0, 0)
    (record,) = [record for record in caplog.records if record.name == "tfmp"]
    assert "rounded without XLA" in record.getMessage()
    assert "XLA is not linked" in record.getMessage()


def test_session_runs_it() -> None:
    expected = _bits(_result())
    with tf.Graph().as_default() as graph:
        result = tf.cast(_result(), tf.float32)
    with tf.compat.v1.Session(graph=graph) as session:
        found = session.run(result)
    assert _bits(tf.cast(found, tf.bfloat16)) == expected
