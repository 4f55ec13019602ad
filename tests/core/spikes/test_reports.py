"""What is kept of the last spike."""

import pytest
import tensorflow as tf

from tfmp.core.spikes.reports import SpikeRecord


def test_last_spike_is_kept_and_spikes_are_counted() -> None:
    record = SpikeRecord(["kernel", "bias"])
    assert int(record.report().spikes) == 0
    for norm in (8.0, 9.0):
        shares = tf.constant([0.25, 0.75], tf.float64)
        record.store(shares, tf.constant(norm, tf.float64), tf.constant(2.0, tf.float64))
    report = record.report()
    assert (report.names, report.shares.numpy().tolist()) == (["kernel", "bias"], [0.25, 0.75])
    assert (float(report.norm), float(report.bound), int(report.spikes)) == (9, 2, 2)


@pytest.mark.graph
def test_record_in_a_graph_needs_no_initializer() -> None:
    record = SpikeRecord(["kernel"])
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        one = tf.ones([1], tf.float64)
        stored, report = record.store(one, one[0], one[0]), record.report()
        assert session.run(report.spikes) == 0
        session.run(stored)
        assert session.run(report[1:]) == ([1.0], 1.0, 1.0, 1)
        assert tf.compat.v1.global_variables() == []
