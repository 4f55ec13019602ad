"""Optimizers of Keras: which gradients are unscaled where they are applied, and who applies them."""

from collections.abc import Sequence
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from kerases import for_every_keras, optimizer, values, variable

from tfmp.core.adapters import KerasAdapter
from tfmp.core.updates import OptimizerUpdate

pytestmark = pytest.mark.essential


def _adapter(opt: Any, variables: Sequence[Any], jit_compile: bool = False) -> KerasAdapter:
    return KerasAdapter(opt, variables, update=OptimizerUpdate(opt, jit_compile))


@for_every_keras()
@pytest.mark.parametrize(
    ("of_variable", "of_grad", "unscales"),
    [
        ("float32", "float32", True),
        ("float32", "float16", True),
        ("float32", None, True),
        ("float64", "float64", True),
        # A gradient that is finite could overflow the type of the variable when it is cast.
        ("float32", "float64", False),
        ("float16", "float16", False),
        ("float16", None, False),
        ("bfloat16", "bfloat16", False),
    ],
)
def test_gradient_is_unscaled_late_if_it_then_stays_finite_in_its_variables_type(
    keras: ModuleType, of_variable: str, of_grad: str | None, unscales: bool
) -> None:
    kernel, bias = variable(keras, [1.0], dtype=of_variable), variable(keras, [1.0])
    grad = None if of_grad is None else tf.constant([1.0], of_grad)
    program = _adapter(optimizer(keras), [bias, kernel]).program([tf.constant([1.0]), grad])
    assert (program is not None) is unscales


@for_every_keras()
def test_next_value_of_a_variable_is_not_unscaled_late(keras: ModuleType) -> None:
    kernel, scale = variable(keras, [1.0]), variable(keras, [1.0])
    scale.overwrite_with_gradient = True
    assert _adapter(optimizer(keras), [kernel, scale]).program([tf.ones([1])] * 2) is None


@for_every_keras()
def test_replicas_unscale_before_the_check(keras: ModuleType, two_replicas: tf.distribute.MirroredStrategy) -> None:
    with two_replicas.scope():
        adapter = _adapter(optimizer(keras), [variable(keras, [1.0])])
    found = []
    two_replicas.run(lambda: found.append(adapter.program([tf.constant([1.0])])))
    assert found == [None, None]
    assert adapter.program([tf.constant([1.0])]) is not None


@for_every_keras()
def test_program_unscales_and_clips_by_what_it_measured(keras: ModuleType) -> None:
    opt, kernel = optimizer(keras, global_clipnorm=0.5), variable(keras, [1.0, 2.0])
    adapter, grads, loss_scale = (
        _adapter(opt, [kernel], jit_compile=True),
        [tf.constant([24.0, 32.0])],
        tf.constant(8.0),
    )
    adapter.prepare([kernel])
    program = adapter.program(grads)
    measures = program.measure(grads, loss_scale)
    assert [measure.numpy().tolist() for measure in measures] == [[(24**2 + 32**2) / 2]]
    program.apply(grads, loss_scale, measures, ())
    np.testing.assert_allclose(kernel.numpy(), [1 - 0.15, 2 - 0.2], rtol=1e-6)


@for_every_keras()
def test_changes_are_made_to_the_unscaled_values(keras: ModuleType) -> None:
    kernel, bias = variable(keras, [1.0, 2.0]), variable(keras, [3.0])
    adapter, grads = _adapter(optimizer(keras), [kernel, bias]), [tf.constant([8.0, 16.0]), tf.constant([8.0])]
    adapter.prepare([kernel, bias])
    adapter.program(grads).apply(grads, tf.constant(8.0), [], [lambda values: values + 1, None])
    assert values([kernel, bias]) == [[0, 0.5], [2.5]]
