"""The norm of the gradients that a step measures."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tfmp.core.distribute import SingleProcess
from tfmp.core.step.measured import Measured
from tfmp.types import Gradient, Gradients


class _TwoAlike(SingleProcess):
    """Two replicas with the same gradients."""

    num_summed = 2

    def sums(self, grads: Gradients, names: Sequence[str]) -> list[Gradient]:
        assert list(names) == ["kernel", "bias"]
        return [None if grad is None else grad * 2 for grad in grads]


def _norm(grads: Sequence[Any], loss_scale: float | None = None, **settings: Any) -> float:
    scale = None if loss_scale is None else tf.constant(loss_scale)
    measured = Measured(grads, scale, **{"is_summed": True} | settings)
    return float(measured.norm(["kernel", "bias"], _TwoAlike()))


def test_norm_is_divided_by_the_loss_scale() -> None:
    assert _norm([tf.constant([24.0]), tf.constant([32.0])], 8.0) == 5
    assert _norm([tf.constant([3.0]), tf.constant([4.0])]) == 5


def test_gradients_are_summed_over_the_replicas_unless_they_are_already() -> None:
    grads = [tf.constant([3.0, 4.0]), None]
    assert (_norm(grads), _norm(grads, is_summed=False)) == (5, 10)


def test_half_precision_is_summed_in_float32() -> None:
    assert _norm([tf.constant([40000.0], tf.float16), None], is_summed=False) == 80000


@pytest.mark.parametrize("jit_compile", [False, True])
def test_rows_with_the_same_index_are_added_up(jit_compile: bool) -> None:
    def norm() -> tf.Tensor:
        rows = tf.IndexedSlices(tf.constant([[1.0], [4.0], [2.0]]), tf.constant([5, 0, 5]), tf.constant([6, 1]))
        return Measured([rows], None, is_summed=True).norm(["embedding"], SingleProcess())

    assert float(tf.function(norm, jit_compile=jit_compile)()) == 5


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
def test_norm_of_gradients_that_overflowed_is_not_finite(value: float) -> None:
    assert not np.isfinite(_norm([tf.constant([1.0, value]), tf.constant([1.0])], 8.0))
