"""How code is traced: AutoGraph, variables outside of functions, and conditional updates."""

import contextlib
import threading
from typing import Any

import pytest
import tensorflow as tf
from gradient_forms import MODES

from tfmp.core import tracing
from tfmp.core.tracing import conditional_update, outside_of_functions, without_autograph
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
