"""Ways to run code in a scope, and what tests compare: the results in the scope with those of plain code."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tfmp.mixed_precision.autocast import hooks, state

#: Takes a function and returns one that is called in its place, such as `tf.function`.
Way = Callable[[Callable[..., Any]], Callable[..., Any]]


def eager(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function itself."""
    return function


each_way = pytest.mark.parametrize("way", [eager, tf.function], ids=["eager", "function"])


def in_graph(code: Callable[[], Any]) -> Any:
    """Return the values of what code builds in a graph of its own, after they have been compared with their types."""
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        results = code()
        session.run(tf.compat.v1.global_variables_initializer())
        values = session.run(results)
        for result, value in zip(tf.nest.flatten(results), tf.nest.flatten(values), strict=True):
            assert result.dtype.as_numpy_dtype == value.dtype
        return values


def matrix() -> tf.Tensor:
    """Return what most tests compute with."""
    return tf.constant([[1.0, 2.0], [3.0, 4.0]])


def types(results: Any) -> list[str]:
    """Return the names of the types of tensors, variables of any Keras and arrays."""
    return [tf.as_dtype(each.dtype).name for each in tf.nest.flatten(results)]


def assert_as_plain(found: Any, plain: Any, expected: list[str], tolerance: float = 0.0) -> None:
    """Assert that results in a scope have the types that are expected, and the values of plain code."""
    assert types(found) == expected
    for one, other in zip(tf.nest.flatten(found), tf.nest.flatten(plain), strict=True):
        np.testing.assert_allclose(_numbers(one), _numbers(other), rtol=tolerance, atol=tolerance)


def _numbers(result: Any) -> np.ndarray:
    return np.asarray(tf.convert_to_tensor(result) if tf.is_tensor(result) else result).astype(np.float64)


def assert_no_scope_is_open() -> None:
    """Assert that all scopes were left, and act no more."""
    assert (hooks.open_scopes._count, state._thread.scopes) == (0, [None])
    assert (matrix() @ matrix()).dtype == tf.float32
