import math

import pytest
import tensorflow as tf
from gradient_forms import TYPES, gradient

from tfmp.core.gradients import counting
from tfmp.types import Gradients


def test_a_graph_counts_large_gradients_by_one_function_for_each_type() -> None:
    @tf.function
    def counted(grads: Gradients) -> tf.Tensor:
        return counting.counts(grads, [tf.math.is_inf, tf.math.is_nan])

    shapes = [[100, 100], [2**14], [3, 1, 4000]]
    grads = [tf.fill(shape, tf.constant(math.inf, dtype)) for dtype in (tf.float32, tf.float64) for shape in shapes]
    assert counted(grads)[:, 0].numpy().tolist() == [10000, 2**14, 12000] * 2
    graph = counted.get_concrete_function(grads).graph
    calls = [op.get_attr("f").name for op in graph.get_operations() if op.type == "PartitionedCall"]
    assert len(calls) == 6
    assert len(set(calls)) == 2


@pytest.mark.parametrize("dtype", TYPES)
def test_counts_are_right_at_every_position_of_a_sparse_gradient(dtype: tf.DType) -> None:
    @tf.function(input_signature=[tf.TensorSpec([None, 2], dtype), tf.TensorSpec([None], tf.int64)])
    def counted(rows: tf.Tensor, indices: tf.Tensor) -> list[tf.Tensor]:
        # Its number of rows is unknown while the function is traced.
        sparse = tf.IndexedSlices(rows, indices, tf.constant([9, 2], tf.int64))
        small = [gradient([1.0, value], dtype) for value in (math.inf, 1.0)]
        # A `tf.DType` equals a small integer, so a dtype could be confused with a position in the list.
        places = [[None] * place + [sparse, *small, *small] for place in range(20)]
        return [counting.counts(grads, [tf.math.is_inf])[-5:, 0] for grads in places]

    rows = tf.cast([[math.inf, 1.0], [2.0, -math.inf]], dtype)
    for each in counted(rows, tf.constant([1, 2], tf.int64)):
        assert each.numpy().tolist() == [2, 1, 0, 1, 0]


def test_more_values_than_float32_can_count_are_counted() -> None:
    # An odd number above 2**24.
    counts = counting.counts([tf.ones([65793, 257], tf.float16)], [lambda values: values > 0])
    assert counts.numpy().tolist() == [[65793 * 257]]
