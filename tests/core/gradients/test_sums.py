import functools
import math
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tfmp.core import tracing
from tfmp.core.gradients import counting, finiteness, norms


@pytest.mark.parametrize("dtype", [tf.float32, tf.float64])
def test_form_for_accelerators_gives_the_same_answers(dtype: tf.DType, monkeypatch: pytest.MonkeyPatch) -> None:
    def answers() -> list[Any]:
        @functools.partial(tf.function, jit_compile=True)
        def answer(values: tf.Tensor) -> list[tf.Tensor]:
            counts = counting.counts([values], [tf.math.is_inf, tf.math.is_nan])
            return [finiteness.all_finite([values]), counts, norms.halves_of_square_sums([values])[0]]

        cases = [[1.0, 2.0], [math.inf, 1.0], [math.nan, -math.inf], [float(dtype.max), 1.0]]
        found = [answer(tf.constant([case] * 2**13, dtype)) for case in cases]
        return [[each.numpy().tolist() for each in row] for row in found]

    on_cpu = answers()
    monkeypatch.setattr(tracing, "has_accelerator", lambda: True)
    np.testing.assert_equal(answers(), on_cpu)
    assert [row[0] for row in on_cpu] == [True, False, False, True]


def test_sums_are_computed_once_in_each_graph() -> None:
    grads = [tf.ones([100, 100])]
    norms.halves_of_square_sums(grads)

    @tf.function
    def compute(values: tf.Tensor) -> list[tf.Tensor]:
        grads = [values]
        inner = tf.cond(values[0, 0] > 0, lambda: norms.halves_of_square_sums(grads), lambda: tf.zeros([1], tf.float64))
        outer = [norms.halves_of_square_sums(grads), finiteness.halves_of_large_square_sums(grads)]
        return [inner[0], *(each[0] for each in outer), tf.cast(finiteness.all_finite(grads), tf.float64)]

    graph = compute.get_concrete_function(*grads).graph
    assert len([op for op in graph.get_operations() if op.type == "L2Loss"]) == 1
    assert [float(each) for each in compute(*grads)] == [5000, 5000, 5000, 1]


@pytest.mark.graph
@pytest.mark.parametrize("flag", [True, False])
def test_sum_of_one_branch_is_not_used_in_another_or_outside(flag: bool) -> None:
    with tf.Graph().as_default():
        grads = [tf.ones([100, 100])]
        # With TensorFlow 1's control flow, the ops of both branches are in the same graph.
        of_branch = tf.cond(
            tf.compat.v1.placeholder_with_default(flag, []),
            lambda: norms.halves_of_square_sums(grads),
            lambda: 2 * norms.halves_of_square_sums(grads),
        )
        outside = norms.halves_of_square_sums(grads)
        with tf.compat.v1.Session() as session:
            assert [each.tolist() for each in session.run([of_branch, outside])] == [[5000 if flag else 10000], [5000]]
