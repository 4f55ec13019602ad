"""Compiled programs that run the updates of several variables."""

import gc
from collections.abc import Callable
from typing import Any

import pytest
import tensorflow as tf

from tfmp.hosts.keras.programs.shared_programs import SharedPrograms

pytestmark = pytest.mark.essential


def _traced(step: Callable[[], object]) -> Any:
    return tf.function(step).get_concrete_function()


def test_updates_of_a_kind_are_traced_once() -> None:
    weights, rate, traced = [tf.Variable(1.0) for _ in range(3)], tf.Variable(2.0), []

    def step() -> None:
        programs = SharedPrograms([rate])
        for weight in weights:

            def update(grads: Any, tensors: Any, weight: tf.Variable = weight) -> None:
                traced.append(weight)
                weight.assign_sub(grads[0] * tensors[0] * rate)

            programs.run("weight", [weight], update, [tf.constant(0.5)], [tf.constant(4.0)])

    function = _traced(step)
    # What ran in the trace is needed no more.
    gc.collect()
    function()
    assert len(traced) == 1
    assert [float(weight) for weight in weights] == [-3, -3, -3]


def test_update_that_uses_another_variable_has_a_program_of_its_own() -> None:
    weights, others = [tf.Variable(1.0), tf.Variable(1.0)], [tf.Variable(2.0), tf.Variable(3.0)]

    def step() -> None:
        programs = SharedPrograms([])
        for weight, other in zip(weights, others, strict=True):
            programs.run("weight", [weight], lambda *_, w=weight, o=other: w.assign(o), [tf.constant(0.0)], [])

    _traced(step)()
    assert [float(weight) for weight in weights] == [2, 3]
