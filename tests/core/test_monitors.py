"""What looks at steps without changing them: losses, steps and norms that are kept, and losses that need no scaling."""

import logging

import numpy as np
import pytest
import tensorflow as tf
from recording_adapters import scaler_of, take_step

import tfmp
from tfmp.core.monitors import RecordedGradients, record_gradients, record_loss, records_of_graph
from tfmp.core.overflow.found import Found
from tfmp.core.step.norms import StepNorms

tf1 = tf.compat.v1


@pytest.mark.graph
def test_graph_knows_the_managers_of_its_steps_and_their_overflows_once_each(session: tf1.Session) -> None:
    del session
    scaler, other = (scaler_of(tfmp.FixedLossScaleManager(8)) for _ in range(2))
    assert records_of_graph().managers == []
    for each, name in [(scaler, "kernel"), (scaler, "bias"), (other, "other"), (scaler, "kernel")]:
        take_step(each, [tf.constant(1.0)], [name], lambda grads: tf.no_op())
    assert records_of_graph().managers == [scaler.manager, other.manager]
    assert [counts.report().names for counts in scaler.overflow_counts] == [["kernel"], ["bias"]]
    for each in (scaler, other):
        assert records_of_graph().overflow_counts(each.manager) == list(each.overflow_counts)


@pytest.mark.graph
def test_losses_and_gradients_that_could_not_be_fetched_are_not_recorded(session: tf1.Session) -> None:
    del session
    manager = tfmp.FixedLossScaleManager(8)

    def record() -> tf.Tensor:
        loss = tf.constant(1.0) * 2
        record_loss(manager, loss)
        record_gradients(RecordedGradients(manager, ["kernel"], [loss], None))
        sparse = tf.IndexedSlices(tf.reshape(loss, [1]), tf.constant([0]))
        record_gradients(RecordedGradients(manager, ["table", "bias"], [sparse, None], None))
        return loss

    tf.cond(tf1.placeholder(tf.bool, []), record, record)
    tf.function(record)()
    tf.while_loop(lambda index: index < 2, lambda index: index + tf.cast(record(), tf.int32), [0])
    # A number is no tensor of the graph.
    record_loss(manager, 1.0)
    hidden = tf.constant(1.0)
    hidden.graph.prevent_fetching(hidden.op)
    record_loss(manager, hidden)
    assert records_of_graph()[:2] == ([], [])


@pytest.mark.graph
def test_losses_and_gradients_of_a_graph_are_those_of_the_scalers_in_it(session: tf1.Session) -> None:
    scaler, other = (scaler_of(tfmp.FixedLossScaleManager(8)) for _ in range(2))
    assert records_of_graph()[:2] == ([], [])
    for each, value in [(scaler, 1.0), (other, 2.0), (scaler, 3.0)]:
        each.scale(tf.constant(value))
        take_step(each, [tf.constant(value), None], ["kernel", "bias"], lambda grads: tf.no_op())
    losses, recorded = records_of_graph()[:2]
    managers = [scaler.manager, other.manager, scaler.manager]
    assert [each.manager for each in losses] == [each.manager for each in recorded] == managers
    # This adapter's gradients were unscaled before.
    assert [(each.names, each.grads[1], each.loss_scale) for each in recorded] == [(["kernel", "bias"], None, None)] * 3
    found = session.run([[each.loss for each in losses], [each.grads[0] for each in recorded]])
    assert found == [[1, 2, 3], [1, 2, 3]]
    # Scaled gradients are recorded with their factor.
    grads = [tf.IndexedSlices(tf.constant([16.0]), tf.constant([1]), tf.constant([3]))]
    take_step(scaler, grads, ["table"], lambda grads: tf.no_op(), are_scaled=True)
    *_, last = records_of_graph().gradients
    assert session.run([last.grads[0].values, last.loss_scale]) == [[16], 8]
    with tf.Graph().as_default():
        assert records_of_graph()[:2] == ([], [])


def test_losses_and_gradients_of_eager_code_are_not_recorded() -> None:
    scaler = scaler_of(tfmp.FixedLossScaleManager(8))
    scaler.scale(tf.constant(1.0))
    take_step(scaler, [tf.constant(1.0)], ["kernel"], lambda grads: tf.no_op())
    assert records_of_graph()[:2] == ([], [])


def test_norm_is_nan_until_one_is_stored_and_in_no_checkpoint() -> None:
    norms = StepNorms(tfmp.FixedLossScaleManager(8))
    norms.record()
    assert np.isnan(norms.read())
    # Float32 could not hold it.
    norms.store(tf.constant(1e300, tf.float64), None, Found(tf.constant(True)))
    assert float(norms.read()) == 1e300
    assert norms._trackable_children() == {}


@pytest.mark.graph
def test_norm_in_a_graph_needs_no_initializer(session: tf1.Session) -> None:
    norms = StepNorms(tfmp.FixedLossScaleManager(8))
    norms.record()
    stored = norms.store(tf.constant(2.0, tf.float64), None, Found(tf.constant(True)))
    read = norms.read_stored()
    assert np.isnan(session.run(read))
    session.run(stored)
    assert session.run(read) == 2
    assert tf1.global_variables() == []


_NEEDLESS = "the loss is in bfloat16, which has the range of float32: it needs no loss scaling"


@pytest.mark.parametrize(("dtype", "notices"), [(tf.bfloat16, 1), (tf.float16, 0), (tf.float32, 0)])
def test_script_is_told_once_that_a_loss_in_bfloat16_needs_no_scaling(
    dtype: tf.DType, notices: int, caplog: pytest.LogCaptureFixture
) -> None:
    for scaler in (tfmp.GradScaler(enabled=False), tfmp.GradScaler(manager=tfmp.FixedLossScaleManager(1))):
        scaler.scale(tf.constant(1.0, dtype))
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
    scaler = tfmp.GradScaler()
    for loss in (tf.constant(1.0, dtype), tf.constant(1.0, dtype), 1.0):
        scaler.scale(loss)
    assert caplog.text.count(_NEEDLESS) == notices
    assert not notices or "pass enabled=False to tfmp.GradScaler" in caplog.text
    tf.function(lambda: tfmp.GradScaler().scale(tf.constant(1.0, dtype)))()
    assert caplog.text.count(_NEEDLESS) == 2 * notices
