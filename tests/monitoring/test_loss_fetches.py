"""The hook fetches the losses of a step with the step itself, and nothing with other calls of `session.run`."""

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import tfmp
from tfmp.monitoring.loss_fetches import LossFetches

tf1 = tf.compat.v1


def _train_op(factors: list[float]) -> tuple[tf.Operation, tf.Variable, tf.Tensor]:
    """Return a step whose loss is the weight times the next factor, the weight, and the loss."""
    w = tf1.get_variable("w", initializer=1.0)
    factor = tf1.data.make_one_shot_iterator(tf.data.Dataset.from_tensor_slices(np.float32(factors))).get_next()
    opt = tfmp.LossScaleOptimizer(tf1.train.GradientDescentOptimizer(0.5), tfmp.FixedLossScaleManager(8))
    loss = tf.identity(w * factor, name="loss")
    return opt.minimize(loss, tf1.train.get_or_create_global_step()), w, loss


def _run(hook: tfmp.LossScaleLoggingHook, train_op: Any, at_most: int) -> int:
    """Run until a hook stops it, and return the number of steps."""
    with tf1.train.MonitoredTrainingSession(hooks=[hook], log_step_count_steps=None) as session:
        for step in range(at_most):
            if session.should_stop():
                return step
            session.run(train_op)
    return at_most


class _Runs(tf1.train.SessionRunHook):
    """Wraps a hook, and records what the hook asks to fetch at each call of `session.run`."""

    def __init__(self, hook: tfmp.LossScaleLoggingHook) -> None:
        self._hook = hook
        self.asked: list[Any] = []

    def begin(self) -> None:
        self._hook.begin()

    def before_run(self, run_context: Any) -> Any:
        asked = self._hook.before_run(run_context)
        self.asked.append(asked and asked.fetches)
        return asked

    def after_run(self, run_context: Any, run_values: Any) -> None:
        self._hook.after_run(run_context, run_values)

    def end(self, session: Any) -> None:
        self._hook.end(session)


@pytest.mark.graph
def test_loss_is_fetched_at_reported_steps_alone() -> None:
    with tf.Graph().as_default():
        train_op, _, loss = _train_op([1] * 6)
        runs = _Runs(tfmp.LossScaleLoggingHook(every_n_steps=3))
        _run(runs, tf.group(train_op), 6)
        assert [asked and asked["losses"] for asked in runs.asked] == [[[loss]], None, None, [[loss]], None, None]


@pytest.mark.graph
def test_run_that_takes_no_step_is_not_asked_for_a_loss() -> None:
    with tf.Graph().as_default():
        fed = tf1.placeholder(tf.float32, [])
        w = tf1.get_variable("w", initializer=1.0)
        opt = tfmp.LossScaleOptimizer(tf1.train.GradientDescentOptimizer(0.5), tfmp.FixedLossScaleManager(8))
        train_op = opt.minimize(w * fed)
        runs = _Runs(tfmp.LossScaleLoggingHook(every_n_steps=1))
        with tf1.train.MonitoredTrainingSession(hooks=[runs], log_step_count_steps=None) as session:
            session.run({"weight": w})
            session.run(train_op, {fed: 1.0})
        assert [asked is not None for asked in runs.asked] == [False, True]


@pytest.mark.graph
def test_loss_inside_a_conditional_is_left_alone() -> None:
    with tf.Graph().as_default():
        w = tf1.get_variable("w", initializer=1.0, use_resource=True)
        opt = tfmp.LossScaleOptimizer(tf1.train.GradientDescentOptimizer(0.5), tfmp.FixedLossScaleManager(8))

        def gradient() -> tf.Tensor:
            return opt.compute_gradients(w * 2.0, [w])[0][0]

        train_op = opt.apply_gradients([(tf.cond(w > 0.0, gradient, gradient), w)])
        runs = _Runs(tfmp.LossScaleLoggingHook(every_n_steps=1))
        _run(runs, train_op, 1)
        assert [asked["losses"] for asked in runs.asked] == [[[]]]


@pytest.mark.graph
@pytest.mark.parametrize("loss", ["no_such_op", "train", 3.0])
def test_loss_that_is_none_of_the_graph_is_refused(loss: Any) -> None:
    with tf.Graph().as_default():
        _train_op([1])
        tf.no_op(name="train")
        with pytest.raises(ValueError, match="loss must be a tensor of the graph, or the name of one, got "):
            tfmp.LossScaleLoggingHook(loss=loss).begin()


@pytest.mark.graph
def test_loss_of_a_manager_without_reports_counts_for_every_manager() -> None:
    with tf.Graph().as_default():
        watched = [tfmp.FixedLossScaleManager(8) for _ in range(2)]
        losses = []
        for manager in [*watched, tfmp.FixedLossScaleManager(8)]:
            opt = tfmp.LossScaleOptimizer(tf1.train.GradientDescentOptimizer(0.5), manager)
            losses.append(tf1.get_variable(f"w_{len(losses)}", initializer=1.0) * 2.0)
            opt.minimize(losses[-1])
        fetches = LossFetches(watched)
        found = [[loss.name for loss in fetches.for_manager(manager)] for manager in watched]
        assert found == [[losses[0].name, losses[2].name], [losses[1].name, losses[2].name]]
