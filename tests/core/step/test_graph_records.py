"""The losses and steps that a graph is known to hold."""

import pytest
import tensorflow as tf
from function_steps import take_step

import tfmp
from tfmp.core.step.graph_records import (
    losses_of_graph,
    managers_of_graph,
    overflow_counts_of_graph,
    overflow_reports_of_graph,
    record_loss,
)
from tfmp.core.step.scaler import LossScaler

pytestmark = pytest.mark.graph


def _scaler() -> tuple[LossScaler, tfmp.LossScaleManager]:
    manager = tfmp.FixedLossScaleManager(8)
    return LossScaler(manager, tfmp.NonFiniteDetector(), is_distributed=False), manager


def test_graph_knows_the_managers_of_its_steps_once_each(session: tf.compat.v1.Session) -> None:
    scaler, manager = _scaler()
    other_scaler, other_manager = _scaler()
    assert managers_of_graph() == []
    for each in (scaler, scaler, other_scaler):
        take_step(each, [tf.constant(1.0)], ["kernel"], lambda grads: tf.no_op())
    assert managers_of_graph() == [manager, other_manager]


def test_overflows_of_a_manager_are_listed_once_for_each_list_of_variables(session: tf.compat.v1.Session) -> None:
    del session
    scaler, manager = _scaler()
    other_scaler, other_manager = _scaler()
    for each, name in [(scaler, "kernel"), (scaler, "bias"), (other_scaler, "other"), (scaler, "kernel")]:
        take_step(each, [tf.constant(1.0)], [name], lambda grads: tf.no_op())
    assert [report.names for report in overflow_reports_of_graph(manager)] == [["kernel"], ["bias"]]
    assert overflow_counts_of_graph(manager) == list(scaler.overflow_counts)
    assert [report.names for report in overflow_reports_of_graph(other_manager)] == [["other"]]


def test_losses_of_a_graph_are_those_that_were_scaled_in_it(session: tf.compat.v1.Session) -> None:
    scaler, manager = _scaler()
    losses = [tf.constant(2.0), tf.constant(3.0)]
    for loss in losses:
        scaler.scale(loss)
    recorded = losses_of_graph()
    assert [each.manager for each in recorded] == [manager, manager]
    assert session.run([each.loss for each in recorded]) == [2, 3]
    with tf.Graph().as_default():
        assert losses_of_graph() == []


def test_loss_that_could_not_be_fetched_is_not_recorded(session: tf.compat.v1.Session) -> None:
    del session
    _, manager = _scaler()

    def record() -> tf.Tensor:
        loss = tf.constant(1.0) * 2
        record_loss(manager, loss)
        return loss

    tf.cond(tf.compat.v1.placeholder(tf.bool, []), record, record)
    tf.function(record)()
    tf.while_loop(lambda index: index < 2, lambda index: index + tf.cast(record(), tf.int32), [0])
    # A number is no tensor of the graph.
    record_loss(manager, 1.0)
    assert losses_of_graph() == []
