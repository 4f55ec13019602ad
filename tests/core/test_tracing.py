"""How code is traced: AutoGraph, variables outside of functions, conditional updates, and the lines of the script."""

import contextlib
import inspect
import threading
from pathlib import Path
from typing import Any

import pytest
import tensorflow as tf
from gradient_forms import MODES

from tfmp.core import script_lines, tracing
from tfmp.core.control_flow import conditional_update
from tfmp.core.tracing import outside_of_functions, without_autograph
from tfmp.types import Gradients


def _larger(value: tf.Tensor) -> tf.Tensor:
    if value > 0:
        value = value + 1
    return value


def _caller(value: tf.Tensor) -> tf.Tensor:
    return _larger(value)


def test_autograph_converts_neither_the_function_nor_its_callees() -> None:
    assert float(tf.function(_caller)(tf.constant(1.0))) == 2
    with pytest.raises(tf.errors.OperatorNotAllowedInGraphError):
        tf.function(without_autograph(_caller))(tf.constant(1.0))


@pytest.mark.parametrize("scope", [contextlib.nullcontext, lambda: tf.distribute.OneDeviceStrategy("cpu:0").scope()])
def test_variables_made_outside_of_functions_need_no_second_trace(scope: Any) -> None:
    made: list[tf.Variable] = []
    traces = []

    @tf.function
    def step(value: tf.Tensor) -> tf.Tensor:
        traces.append(value)
        if value.shape.rank == len(made):
            made.append(outside_of_functions(lambda: tf.Variable(2.0)))
        return made[-1] * value

    with scope():
        assert float(step(tf.constant(3.0))) == 6
        assert len(traces) == 1
        # TensorFlow refuses variables that a later trace makes.
        assert step(tf.constant([3.0])).numpy().tolist() == [6]
    assert (len(traces), len(made)) == (2, 2)


def test_error_while_variables_are_made_is_raised_in_the_function() -> None:
    def fail() -> None:
        raise ValueError("no variables today")

    with pytest.raises(ValueError, match="no variables today"):
        tf.function(without_autograph(lambda: outside_of_functions(fail)))()


def test_eager_code_and_graphs_need_no_thread() -> None:
    here = threading.get_ident()
    assert outside_of_functions(threading.get_ident) == here
    found: list[int] = []
    with tf.Graph().as_default():
        assert outside_of_functions(threading.get_ident) == here
        tf.function(without_autograph(lambda: found.append(outside_of_functions(threading.get_ident))))()
    assert found == [here]


_MODES = MODES | {"xla for accelerators": MODES["xla"]}


@pytest.mark.parametrize("mode", _MODES)
@pytest.mark.parametrize("has_other", [False, True])
def test_one_of_two_functions_or_none_is_called(mode: str, has_other: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if mode.endswith("accelerators"):
        monkeypatch.setattr(tracing, "has_accelerator", lambda: True)
    weight, other = tf.Variable([1.0, 2.0]), tf.Variable(0.0)

    def if_true(grads: Gradients) -> tf.Operation:
        assert grads[1] is None
        return tf.group(weight.assign_add(grads[0]))

    def if_false(grads: Gradients) -> tf.Operation:
        return tf.group(other.assign_add(grads[0][1]))

    def step(flag: tf.Tensor, grad: tf.Tensor) -> None:
        conditional_update(flag, [grad, None], if_true, if_false if has_other else None)

    step = _MODES[mode](step)
    seen = []
    for flag in (False, True, False):
        step(tf.constant(flag), tf.constant([0.5, 0.25]))
        seen.append((weight.numpy().tolist(), float(other)))
    added = 0.25 if has_other else 0
    assert seen == [([1, 2], added), ([1.5, 2.25], added), ([1.5, 2.25], 2 * added)]


@pytest.mark.parametrize(("accelerated", "loops", "conditionals"), [(False, 2, 0), (True, 0, 1)])
def test_xla_gets_loops_or_a_conditional(accelerated: bool, loops: int, conditionals: int, monkeypatch: Any) -> None:
    monkeypatch.setattr(tracing, "has_accelerator", lambda: accelerated)
    weight = tf.Variable(0.0)

    @tf.function(jit_compile=True)
    def step(flag: tf.Tensor) -> None:
        conditional_update(flag, [], lambda _: weight.assign_add(1.0), lambda _: weight.assign_sub(1.0))

    kinds = [
        op.type.removeprefix("Stateless") for op in step.get_concrete_function(tf.constant(True)).graph.get_operations()
    ]
    assert (kinds.count("While"), kinds.count("If")) == (loops, conditionals)


def _here() -> str:
    """Return the line of the caller."""
    frame = inspect.currentframe()
    assert frame is not None
    assert frame.f_back is not None
    return f"test_tracing.py:{frame.f_back.f_lineno}"


@pytest.mark.graph
def test_line_of_a_call_skips_lines_of_libraries() -> None:
    # Python's `map` and TensorFlow's `map_structure` call the lambda, so lines of libraries are between the two calls.
    assert list(map(lambda _: script_lines.line_of_call(), [0])) == [_here()]  # noqa: C417 - a call through another
    assert tf.nest.map_structure(lambda _: script_lines.line_of_call(), [0]) == [_here()]


@pytest.mark.graph
def test_line_of_sparse_gradients_is_the_one_that_made_them() -> None:
    with tf.Graph().as_default():
        w = tf.compat.v1.get_variable("w", initializer=[[1.0], [2.0]])
        grads, line = tf.gradients(tf.reduce_sum(tf.gather(w, [0])), [w]), _here()
        assert isinstance(grads[0], tf.IndexedSlices)
        assert script_lines.line_of_gradients([None, *grads]) == line


@pytest.mark.graph
def test_script_that_is_installed_itself_is_named_if_nothing_else_calls(tmp_path: Path) -> None:
    names: dict[str, Any] = {"script_lines": script_lines, "__name__": "own.train"}
    text = "line = script_lines.with_library(script_lines.line_of_call())"
    code = compile(text, str(tmp_path / "site-packages" / "own" / "train.py"), "exec")
    # Above the code that a thread runs, there is only the standard library.
    thread = threading.Thread(target=exec, args=(code, names))
    thread.start()
    thread.join()
    assert names["line"] == "train.py:1"
