"""tfmp.ranges.exponent_counts alone and over replicas; that of Horovod's workers is tested with the hook."""

import re

import numpy as np
import pytest
import tensorflow as tf

import tfmp


def _found(counts: tf.Tensor) -> list[dict[str, int]]:
    return [tfmp.ranges.RangeHistogram(row).to_dict() for row in counts.numpy()]


def test_counts_have_a_row_for_each_tensor() -> None:
    sparse = tf.IndexedSlices(tf.constant([[4.0]], tf.bfloat16), tf.constant([2]), tf.constant([9, 1]))
    # Any iterable will do.
    counts = tfmp.ranges.exponent_counts(iter([tf.constant([1.0, 0.0]), None, sparse]))
    assert (counts.dtype, counts.shape.as_list()) == (tf.int64, [3, 283])
    assert _found(counts) == [{"0": 1, "zero": 1}, {}, {"2": 1}]


@pytest.mark.graph
def test_list_without_tensors_has_no_rows(session: tf.compat.v1.Session) -> None:
    counts = tfmp.ranges.exponent_counts([])
    assert counts.shape.as_list() == [0, 283]
    found = session.run(counts)
    assert (found.dtype, found.shape) == (np.int64, (0, 283))


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "function"])
def test_counts_are_summed_over_replicas_if_asked(two_replicas: tf.distribute.MirroredStrategy, compiled: bool) -> None:
    def of_replica() -> tuple[tf.Tensor, tf.Tensor]:
        replica = tf.cast(tf.distribute.get_replica_context().replica_id_in_sync_group, tf.float32)
        tensors = [tf.stack([1.0, 4 * replica]), None]
        return tfmp.ranges.exponent_counts(tensors), tfmp.ranges.exponent_counts(
            tensors, is_distributed=True, name="all"
        )

    def run() -> list[tuple[tf.Tensor, ...]]:
        return [two_replicas.experimental_local_results(each) for each in two_replicas.run(of_replica)]

    own, total = (tf.function(run) if compiled else run)()
    assert [_found(each) for each in own] == [[{"0": 1, "zero": 1}, {}], [{"0": 1, "2": 1}, {}]]
    assert [_found(each) for each in total] == [[{"0": 2, "2": 1, "zero": 1}, {}]] * 2


def test_sum_is_refused_where_nothing_distributes() -> None:
    with pytest.raises(ValueError, match="is_distributed=True, and nothing distributes"):
        tfmp.ranges.exponent_counts([tf.constant(1.0)], is_distributed=True)


@pytest.mark.graph
def test_integers_are_refused() -> None:
    message = "powers of two are counted in floating-point tensors, got one of int64."
    with tf.Graph().as_default(), pytest.raises(TypeError, match=re.escape(message)):
        tfmp.ranges.exponent_counts([tf.constant(1, tf.int64)])
