"""Optimizers of Keras 3: which gradients are unscaled where they are applied, and who applies them."""

from collections.abc import Sequence
from types import ModuleType
from typing import Any

import pytest
import tensorflow as tf
from kerases import for_every_keras, optimizer, values, variable

from tfmp.core.adapters import Keras3Adapter
from tfmp.types import Gradients


class _Update:
    """Moves variables by unscaled gradients and by what it measured."""

    def measure(self, grads: Gradients, variables: Sequence[Any], loss_scale: tf.Tensor) -> list[tf.Tensor]:
        return [tf.reduce_sum(grad) / loss_scale for grad, _ in zip(grads, variables, strict=True)]

    def apply(
        self, grads: Gradients, variables: Sequence[Any], loss_scale: tf.Tensor, measures: Sequence[tf.Tensor]
    ) -> None:
        for grad, weight, measure in zip(grads, variables, measures, strict=True):
            weight.assign_add(grad / loss_scale + 16 * measure)


@for_every_keras("keras3")
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
    kernel, bias = keras.Variable([1.0], dtype=of_variable), keras.Variable([1.0], dtype="float32")
    grad = None if of_grad is None else tf.constant([1.0], of_grad)
    adapter = Keras3Adapter(optimizer(keras), [bias, kernel], _Update())
    assert adapter.unscales([tf.constant([1.0]), grad]) is unscales


@for_every_keras("keras3")
def test_next_value_of_a_variable_is_not_unscaled_late(keras: ModuleType) -> None:
    kernel, scale = variable(keras, [1.0]), variable(keras, [1.0])
    scale.overwrite_with_gradient = True
    assert not Keras3Adapter(optimizer(keras), [kernel, scale], _Update()).unscales([tf.ones([1])] * 2)


@for_every_keras("keras3")
def test_replicas_unscale_before_the_check(keras: ModuleType, two_replicas: tf.distribute.MirroredStrategy) -> None:
    with two_replicas.scope():
        adapter = Keras3Adapter(optimizer(keras), [variable(keras, [1.0])], _Update())
    found = []
    two_replicas.run(lambda: found.append(adapter.unscales([tf.constant([1.0])])))
    assert found == [False, False]
    assert adapter.unscales([tf.constant([1.0])])


@for_every_keras("keras3")
def test_scaled_gradients_go_to_the_update_with_its_measures(keras: ModuleType) -> None:
    opt, kernel = optimizer(keras), variable(keras, [1.0, 2.0])
    adapter, grads, loss_scale = Keras3Adapter(opt, [kernel], _Update()), [tf.constant([8.0, 16.0])], tf.constant(8.0)
    measures = adapter.measure(grads, loss_scale)
    assert [float(measure) for measure in measures] == [3]
    adapter.apply(grads, loss_scale, measures)
    assert values([kernel]) == [[1 + 1 + 48, 2 + 2 + 48]]


@for_every_keras("keras3")
def test_gradients_in_true_magnitude_go_to_the_optimizer(keras: ModuleType) -> None:
    opt, kernel = optimizer(keras), variable(keras, [1.0, 2.0])
    adapter, grads = Keras3Adapter(opt, [kernel], _Update()), [tf.constant([1.0, 2.0])]
    adapter.prepare([kernel])
    assert adapter.measure(grads, None) == []
    adapter.apply(grads)
    assert values([kernel]) == [[0.5, 1]]
    assert int(opt.iterations) == 1
