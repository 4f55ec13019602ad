"""A half-precision variable as the float32 variable that an optimizer computes with."""

import operator
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tfmp.optimizer_state.float32_view import Float32View


def _view(values: Any, dtype: tf.DType = tf.bfloat16) -> Float32View:
    return Float32View(tf.Variable(values, dtype=dtype), seed=lambda: None)


@pytest.mark.parametrize("operation", [operator.add, operator.sub, operator.mul, operator.truediv])
def test_arithmetic_is_that_of_float32(operation: Callable[[Any, Any], Any]) -> None:
    view = _view([1.0, 2.0])
    for other in (2.5, tf.constant([3.0, 1.0001]), tf.Variable([3.0, 1.0001])):
        for found, expected in (
            (operation(view, other), operation(view.value, other)),
            (operation(other, view), operation(other, view.value)),
        ):
            assert found.dtype == tf.float32
            np.testing.assert_array_equal(found.numpy(), expected.numpy())


def test_it_is_used_as_a_tensor() -> None:
    view = _view([[1.0, 4.0]])
    assert tf.sqrt(view).numpy().tolist() == [[1.0, 2.0]]
    assert (-view).numpy().tolist() == [[-1.0, -4.0]]
    assert (view**2).numpy().tolist() == [[1.0, 16.0]]
    assert view[0, 1].numpy() == 4.0
    assert tf.convert_to_tensor(view).dtype == tf.float32
    assert view.numpy().tolist() == [[1.0, 4.0]]
    assert (view.shape, view.dtype, view.name) == ([1, 2], tf.float32, view.variable.name)


def test_each_assignment_stores_the_rounded_value() -> None:
    view = _view([1.0])
    view.assign_add([2.0**-9])
    assert view.numpy().tolist() == [1.0]
    view.assign_add([2.0**-6])
    assert view.numpy().tolist() == [1.0 + 2.0**-6]
    view.assign_sub(tf.constant([1.0], tf.float64))
    assert view.numpy().tolist() == [2.0**-6]
    view.assign([3.0 + 2.0**-10])
    assert view.numpy().tolist() == [3.0]
    view.assign_add(tf.IndexedSlices(tf.constant([1.0]), tf.constant([0]), tf.constant([1])))
    assert view.numpy().tolist() == [4.0]


def test_sparse_values_change_the_rows_that_they_name() -> None:
    rows = tf.IndexedSlices(tf.constant([[1.0, 1.0], [2.0, 2.0], [4.0, 4.0]]), tf.constant([2, 0, 2]), [3, 2])
    view = _view([[1.0, 1.0]] * 3)
    view.scatter_add(rows)
    assert view.numpy()[:, 0].tolist() == [3.0, 1.0, 6.0]
    view.scatter_sub(rows)
    assert view.numpy()[:, 0].tolist() == [1.0, 1.0, 1.0]
    view.scatter_update(tf.IndexedSlices(tf.constant([[7.0, 8.0]]), tf.constant([1]), [3, 2]))
    assert view.numpy().tolist() == [[1.0, 1.0], [7.0, 8.0], [1.0, 1.0]]
