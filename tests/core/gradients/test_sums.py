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


@pytest.mark.graph
def test_sums_for_which_a_graph_has_several_ops_are_computed_once(session: tf.compat.v1.Session) -> None:
    fed = tf.compat.v1.placeholder(tf.float32, [100, 100])
    asked = [
        norms.halves_of_square_sums([fed]),
        finiteness.halves_of_large_square_sums([fed]),
        finiteness.all_finite([fed]),
    ]
    options, metadata = tf.compat.v1.RunOptions(output_partition_graphs=True), tf.compat.v1.RunMetadata()
    found = session.run(asked, {fed: np.ones([100, 100])}, options, metadata)
    assert [each.tolist() for each in found] == [[5000], [5000], True]
    assert [node.op for graph in metadata.partition_graphs for node in graph.node].count("L2Loss") == 1
