"""What is kept of the last spike."""

import pytest
import tensorflow as tf

from tfmp.core.spikes.reports import SpikeRecords


def test_last_spike_is_kept_and_spikes_are_counted_by_list_of_variables() -> None:
    records = SpikeRecords()
    for norm in (8.0, 9.0):
        shares = tf.constant([0.25, 0.75], tf.float64)
        records.of(["kernel", "bias"]).store(shares, tf.constant(norm, tf.float64), tf.constant(2.0, tf.float64))
    first, second = (records.of(names).report() for names in (["kernel", "bias"], ["scale"]))
    assert (first.shares.numpy().tolist(), float(first.norm), float(first.bound)) == ([0.25, 0.75], 9, 2)
    assert (int(first.spikes), int(second.spikes)) == (2, 0)
    assert [record.report().names for record in records] == [["kernel", "bias"], ["scale"]]


@pytest.mark.graph
def test_records_of_a_graph_need_no_initializer() -> None:
    record = SpikeRecords().of(["kernel"])
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        one = tf.ones([1], tf.float64)
        stored, report = record.store(one, one[0], one[0]), record.report()
        assert session.run(report.spikes) == 0
        session.run(stored)
        assert session.run(report[1:]) == ([1.0], 1.0, 1.0, 1)
        assert tf.compat.v1.global_variables() == []
