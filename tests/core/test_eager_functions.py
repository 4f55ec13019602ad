"""Functions that eager code runs as graphs, each traced once."""

import copy

import pytest
import tensorflow as tf

from tfmp.core import eager_functions
from tfmp.core.eager_functions import EagerFunctions

pytestmark = pytest.mark.essential


@pytest.fixture
def traced_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(eager_functions, "_CALLS_BEFORE_TRACE", 0)


def test_first_calls_run_op_by_op_and_then_one_trace_serves_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(eager_functions, "_CALLS_BEFORE_TRACE", 2)
    functions, in_eager_code = EagerFunctions(), []

    def double(value: tf.Tensor) -> tf.Tensor:
        in_eager_code.append(tf.executing_eagerly())
        return value * 2

    assert [int(functions.call("a", double, tf.constant(value))) for value in range(5)] == [0, 2, 4, 6, 8]
    assert in_eager_code == [True, True, False]
    # Each shape is counted by itself.
    assert functions.call("a", double, tf.constant([1])).numpy().tolist() == [2]
    assert in_eager_code[3:] == [True]


@pytest.mark.usefixtures("traced_at_once")
def test_function_is_traced_once_for_each_key_shape_and_type() -> None:
    functions, traced = EagerFunctions(), []

    def call(key: str, value: tf.Tensor) -> tf.Tensor:
        def double(value: tf.Tensor) -> tf.Tensor:
            traced.append((key, value.dtype, value.shape.as_list()))
            return value * 2

        return functions.call(key, double, value)

    for value in (1, 2):
        assert int(call("a", tf.constant(value))) == 2 * value
    assert call("a", tf.constant([3, 4])).numpy().tolist() == [6, 8]
    assert float(call("a", tf.constant(0.5))) == 1
    assert int(call("b", tf.constant(5))) == 10
    assert traced == [("a", tf.int32, []), ("a", tf.int32, [2]), ("a", tf.float32, []), ("b", tf.int32, [])]


@pytest.mark.usefixtures("both_ways_of_eager_functions")
def test_what_changes_variables_runs_although_it_returns_an_op() -> None:
    functions, total = EagerFunctions(), tf.Variable(0)
    for _ in range(3):
        assert functions.call("add", lambda value: tf.group(total.assign_add(value)), tf.constant(2)) is None
    assert int(total) == 6


def test_function_is_a_part_of_a_graph_that_is_being_built() -> None:
    functions = EagerFunctions()

    @tf.function
    def step(value: tf.Tensor) -> tf.Tensor:
        doubled = functions.call("double", lambda value: value * 2, value)
        assert doubled.op.type == "Mul"
        return doubled

    assert int(step(tf.constant(2))) == 4


@pytest.mark.usefixtures("both_ways_of_eager_functions")
def test_tapes_record_nothing() -> None:
    functions, value = EagerFunctions(), tf.constant(3.0)
    with tf.GradientTape() as tape:
        tape.watch(value)
        squared = functions.call("square", tf.square, value)
    assert tape.gradient(squared, value) is None


@pytest.mark.usefixtures("traced_at_once")
def test_the_graphs_used_last_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(eager_functions, "_MOST", 2)
    functions, traced = EagerFunctions(), []

    def call(key: str) -> None:
        functions.call(key, lambda value: [traced.append(key), value][1], tf.constant(0))

    for key in ("a", "b", "a", "c", "a", "b"):
        call(key)
    assert traced == ["a", "b", "c", "b"]


@pytest.mark.usefixtures("traced_at_once")
def test_copies_are_empty() -> None:
    functions, traced = EagerFunctions(), []
    for each in (functions, copy.deepcopy(functions)):
        each.call("a", lambda value: [traced.append("a"), value][1], tf.constant(0))
    assert len(traced) == 2
