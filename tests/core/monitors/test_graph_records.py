"""The losses and steps that a graph is known to hold."""

import pytest
import tensorflow as tf
from recording_adapters import take_step

import tfmp
from tfmp.core.monitors.graph_records import (
    RecordedGradients,
    gradients_of_graph,
    losses_of_graph,
    managers_of_graph,
    overflow_counts_of_graph,
    overflow_reports_of_graph,
    record_gradients,
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
    hidden = tf.constant(1.0)
    hidden.graph.prevent_fetching(hidden.op)
    record_loss(manager, hidden)
    assert losses_of_graph() == []


def test_gradients_of_a_manager_are_those_of_its_steps(session: tf.compat.v1.Session) -> None:
    scaler, manager = _scaler()
    other_scaler, other_manager = _scaler()
    assert gradients_of_graph() == []
    for each, value in [(scaler, 1.0), (other_scaler, 2.0), (scaler, 3.0)]:
        take_step(each, [tf.constant(value), None], ["kernel", "bias"], lambda grads: tf.no_op())
    recorded = [each for each in gradients_of_graph() if each.manager is manager]
    assert [each.names for each in recorded] == [["kernel", "bias"]] * 2
    assert [each.grads[1] for each in recorded] == [None, None]
    # This adapter's gradients were unscaled before.
    assert [each.loss_scale for each in recorded] == [None, None]
    assert session.run([each.grads[0] for each in recorded]) == [1, 3]
    (other,) = (each for each in gradients_of_graph() if each.manager is other_manager)
    assert session.run(other.grads[0]) == 2
    with tf.Graph().as_default():
        assert gradients_of_graph() == []


def test_scaled_gradients_are_recorded_with_their_factor(session: tf.compat.v1.Session) -> None:
    scaler, _ = _scaler()
    grads = [tf.IndexedSlices(tf.constant([16.0]), tf.constant([1]), tf.constant([3]))]
    take_step(scaler, grads, ["table"], lambda grads: tf.no_op(), are_scaled=True)
    (recorded,) = gradients_of_graph()
    found = session.run({"rows": recorded.grads[0].values, "loss_scale": recorded.loss_scale}, {})
    assert (found["rows"].tolist(), found["loss_scale"]) == ([16], 8)


def test_gradients_that_could_not_be_fetched_are_not_recorded(session: tf.compat.v1.Session) -> None:
    del session
    _, manager = _scaler()

    def record() -> tf.Tensor:
        grad = tf.constant(1.0) * 2
        record_gradients(RecordedGradients(manager, ["kernel"], [grad], None))
        sparse = tf.IndexedSlices(tf.reshape(grad, [1]), tf.constant([0]))
        record_gradients(RecordedGradients(manager, ["table", "bias"], [sparse, None], None))
        return grad

    tf.cond(tf.compat.v1.placeholder(tf.bool, []), record, record)
    tf.function(record)()
    tf.while_loop(lambda index: index < 2, lambda index: index + tf.cast(record(), tf.int32), [0])
    assert gradients_of_graph() == []


def test_losses_and_gradients_of_eager_code_are_not_recorded() -> None:
    scaler, _ = _scaler()
    if not tf.executing_eagerly():
        pytest.skip("is about eager code")
    scaler.scale(tf.constant(1.0))
    take_step(scaler, [tf.constant(1.0)], ["kernel"], lambda grads: tf.no_op())
    assert (losses_of_graph(), gradients_of_graph()) == ([], [])
