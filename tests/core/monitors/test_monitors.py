"""What looks at steps without changing them: losses, steps and norms that are kept, and losses that need no scaling."""

import logging

import numpy as np
import pytest
import tensorflow as tf
from recording_adapters import take_step

import tfmp
from tfmp.core import graph_search
from tfmp.core.monitors.gradient_norm import GradientNorm
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

tf1 = tf.compat.v1


def _scaler() -> tuple[LossScaler, tfmp.LossScaleManager]:
    manager = tfmp.FixedLossScaleManager(8)
    return LossScaler(manager, tfmp.NonFiniteDetector(), is_distributed=False), manager


@pytest.mark.graph
def test_graph_knows_the_managers_of_its_steps_and_their_overflows_once_each(session: tf1.Session) -> None:
    del session
    scaler, manager = _scaler()
    other_scaler, other_manager = _scaler()
    assert managers_of_graph() == []
    for each, name in [(scaler, "kernel"), (scaler, "bias"), (other_scaler, "other"), (scaler, "kernel")]:
        take_step(each, [tf.constant(1.0)], [name], lambda grads: tf.no_op())
    assert managers_of_graph() == [manager, other_manager]
    assert [report.names for report in overflow_reports_of_graph(manager)] == [["kernel"], ["bias"]]
    assert overflow_counts_of_graph(manager) == list(scaler.overflow_counts)
    assert [report.names for report in overflow_reports_of_graph(other_manager)] == [["other"]]


@pytest.mark.graph
def test_losses_of_a_graph_are_those_that_were_scaled_in_it(session: tf1.Session) -> None:
    scaler, manager = _scaler()
    losses = [tf.constant(2.0), tf.constant(3.0)]
    for loss in losses:
        scaler.scale(loss)
    recorded = losses_of_graph()
    assert [each.manager for each in recorded] == [manager, manager]
    assert session.run([each.loss for each in recorded]) == [2, 3]
    with tf.Graph().as_default():
        assert losses_of_graph() == []


@pytest.mark.graph
def test_losses_and_gradients_that_could_not_be_fetched_are_not_recorded(session: tf1.Session) -> None:
    del session
    _, manager = _scaler()

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
    assert (losses_of_graph(), gradients_of_graph()) == ([], [])


@pytest.mark.graph
def test_gradients_of_a_manager_are_those_of_its_steps(session: tf1.Session) -> None:
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


@pytest.mark.graph
def test_scaled_gradients_are_recorded_with_their_factor(session: tf1.Session) -> None:
    scaler, _ = _scaler()
    grads = [tf.IndexedSlices(tf.constant([16.0]), tf.constant([1]), tf.constant([3]))]
    take_step(scaler, grads, ["table"], lambda grads: tf.no_op(), are_scaled=True)
    (recorded,) = gradients_of_graph()
    assert session.run([recorded.grads[0].values, recorded.loss_scale]) == [[16], 8]


def test_losses_and_gradients_of_eager_code_are_not_recorded() -> None:
    scaler, _ = _scaler()
    scaler.scale(tf.constant(1.0))
    take_step(scaler, [tf.constant(1.0)], ["kernel"], lambda grads: tf.no_op())
    assert (losses_of_graph(), gradients_of_graph()) == ([], [])


def test_norm_is_nan_until_one_is_stored_and_in_no_checkpoint() -> None:
    norm = GradientNorm()
    assert np.isnan(norm.read())
    # Float32 could not hold it.
    norm.store(tf.constant(1e300, tf.float64))
    assert float(norm.read()) == 1e300
    assert norm._trackable_children() == {}


@pytest.mark.graph
def test_norm_in_a_graph_needs_no_initializer() -> None:
    norm = GradientNorm()
    with tf.Graph().as_default(), tf1.Session() as session:
        stored, read = norm.store(tf.constant(2.0, tf.float64)), norm.read()
        assert np.isnan(session.run(read))
        session.run(stored)
        assert session.run(read) == 2
        assert tf1.global_variables() == []


_NEEDLESS = "the loss is computed in bfloat16, which has the range of float32: it needs no loss scaling"


def _loss(dtypes: list[tf.DType], weights: tf.Variable) -> tf.Tensor:
    """Return a loss that is computed by a product in each of the types, and cast to float32."""
    values = tf.ones([2, 2])
    for dtype in dtypes:
        values = tf.matmul(tf.cast(values, dtype), tf.cast(weights, dtype))
    return tf.reduce_mean(tf.cast(values, tf.float32))


@pytest.mark.parametrize(
    ("dtypes", "notices"),
    [
        ([tf.bfloat16], 1),
        ([tf.bfloat16, tf.float32], 1),
        ([tf.float32], 0),
        ([tf.float16], 0),
        ([tf.float16, tf.bfloat16], 0),
    ],
)
@pytest.mark.parametrize("jit_compile", [False, True], ids=["graph", "xla"])
def test_function_is_told_once_if_its_products_are_in_bfloat16(
    dtypes: list[tf.DType], notices: int, jit_compile: bool, caplog: pytest.LogCaptureFixture
) -> None:
    scaler, weights = tfmp.GradScaler(), tf.Variable(tf.eye(2))
    for _ in range(2):
        tf.function(lambda: scaler.scale(_loss(dtypes, weights)), jit_compile=jit_compile)()
    assert caplog.text.count(_NEEDLESS) == notices
    assert not notices or "pass enabled=False to tfmp.GradScaler" in caplog.text


@pytest.mark.graph
def test_graph_is_told(session: tf1.Session, caplog: pytest.LogCaptureFixture) -> None:
    weights = tf1.get_variable("weights", initializer=[[1.0, 0.0], [0.0, 1.0]])
    opt = tfmp.LossScaleOptimizer(
        tf1.train.GradientDescentOptimizer(0.5), tfmp.ExponentialUpdateLossScaleManager(8, 1000)
    )
    opt.compute_gradients(_loss([tf.bfloat16], weights), [weights])
    assert caplog.text.count(_NEEDLESS) == 1


@pytest.mark.parametrize(("dtype", "notices"), [(tf.bfloat16, 1), (tf.float16, 0), (tf.float32, 0)])
def test_eager_code_is_told_by_the_type_of_the_loss(
    dtype: tf.DType, notices: int, caplog: pytest.LogCaptureFixture
) -> None:
    scaler = tfmp.GradScaler()
    for _ in range(2):
        scaler.scale(tf.constant(1.0, dtype))
    scaler.scale(1.0)
    assert caplog.text.count(_NEEDLESS) == notices


def test_autocast_is_seen(caplog: pytest.LogCaptureFixture) -> None:
    weights = tf.Variable(tf.eye(2))

    @tf.function
    def scaled(scaler: tfmp.GradScaler, dtype: str) -> tf.Tensor:
        with tfmp.autocast(dtype):
            loss = tf.reduce_mean(tf.nn.relu(tf.ones([2, 2]) @ weights) ** 2)
        return scaler.scale(loss)

    for dtype, notices in (("float16", 0), ("bfloat16", 1)):
        scaled(tfmp.GradScaler(), dtype)
        assert caplog.text.count(_NEEDLESS) == notices


def test_nothing_is_said_where_nothing_is_scaled(caplog: pytest.LogCaptureFixture) -> None:
    for scaler in (tfmp.GradScaler(enabled=False), tfmp.GradScaler(manager=tfmp.FixedLossScaleManager(1))):
        scaler.scale(tf.constant(1.0, tf.bfloat16))
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_functions_that_are_called_may_hide_float16(caplog: pytest.LogCaptureFixture) -> None:
    scaler, weights = tfmp.GradScaler(), tf.Variable(tf.eye(2))
    hidden = tf.function(lambda values: tf.cast(tf.matmul(values, tf.cast(weights, tf.float16)), tf.bfloat16))

    @tf.function
    def scaled() -> tf.Tensor:
        values = hidden(tf.ones([2, 2], tf.float16))
        return scaler.scale(tf.reduce_mean(tf.matmul(values, tf.cast(weights, tf.bfloat16))))

    scaled()
    assert _NEEDLESS not in caplog.text


def test_graph_that_is_too_large_to_search_is_told_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(graph_search, "_MOST_OPS", 3)
    scaler, weights = tfmp.GradScaler(), tf.Variable(tf.eye(2))
    tf.function(lambda: scaler.scale(_loss([tf.bfloat16], weights)))()
    assert _NEEDLESS not in caplog.text
