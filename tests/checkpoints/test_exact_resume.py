"""A run that is stopped at any step and resumed equals an uninterrupted run, bit for bit."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import tfmp

_STEPS = 10
# One overflow alone, two in a row that lower the scale, and one right before the end.
_OVERFLOWS = (1, 4, 5, 8)


def _factor(step: int) -> float:
    return float("inf") if step in _OVERFLOWS else 1.0 + step / 7


def _manager() -> tfmp.LossScaleManager:
    # The scale grows after steps 2 and 3, and shrinks at the second overflow after that.
    return tfmp.ExponentialUpdateLossScaleManager(1024.0, 2, 2, 2, 0.5)


def _adam_with_schedule_and_average(factor: tf.Tensor) -> tf.Operation:
    """Build a step of Adam under a schedule, with an average of the weights."""
    w = tf.compat.v1.get_variable("w", initializer=[0.5, -1.0, 2.0])
    global_step = tf.compat.v1.train.get_or_create_global_step()
    rate = tf.compat.v1.train.polynomial_decay(0.125, global_step, 20)
    opt = tfmp.LossScaleOptimizer(tf.compat.v1.train.AdamOptimizer(rate), _manager())
    train_op = opt.minimize(tf.reduce_sum(tf.square(w)) * factor, global_step)
    with tf.control_dependencies([train_op]):
        return tf.train.ExponentialMovingAverage(0.75, name="average").apply([w])


def _values(session: Any) -> dict[str, Any]:
    return {
        name: value.tolist()
        for name, value in session.run({v.name: v for v in tf.compat.v1.global_variables()}).items()
    }


@pytest.fixture
def graph() -> Iterator[tuple[tf.Tensor, tf.Operation]]:
    with tf.Graph().as_default():
        factor = tf.compat.v1.placeholder(tf.float32, [])
        yield factor, _adam_with_schedule_and_average(factor)


@pytest.mark.graph
def test_session_loop_resumes_exactly_wherever_it_stopped(
    graph: tuple[tf.Tensor, tf.Operation], tmp_path: Path
) -> None:
    factor, train_op = graph
    saver = tf.compat.v1.train.Saver(max_to_keep=None)
    after = []
    with tf.compat.v1.Session() as session:
        session.run(tf.compat.v1.global_variables_initializer())
        for step in range(_STEPS):
            saver.save(session, str(tmp_path / "model.ckpt"), step, write_meta_graph=False)
            session.run(train_op, {factor: _factor(step)})
            after.append(_values(session))
    scales = [values[name] for values in after for name in values if name.startswith("loss_scale")]
    assert scales == [1024, 1024, 1024, 2048, 2048, 1024, 1024, 2048, 2048, 2048]
    # A new graph, as a new process would have.
    with tf.Graph().as_default():
        factor = tf.compat.v1.placeholder(tf.float32, [])
        train_op = _adam_with_schedule_and_average(factor)
        saver = tf.compat.v1.train.Saver()
        for stop in range(_STEPS):
            with tf.compat.v1.Session() as session:
                saver.restore(session, str(tmp_path / f"model.ckpt-{stop}"))
                for step in range(stop, _STEPS):
                    session.run(train_op, {factor: _factor(step)})
                    assert _values(session) == after[step], (stop, step)


def _in_monitored_sessions(directory: Path, pieces: list[list[int]]) -> dict[str, Any]:
    """Train in pieces, each in a graph and a session of its own, and return what the last leaves."""
    for steps in pieces:
        with tf.Graph().as_default():
            factor = tf.compat.v1.placeholder(tf.float32, [])
            train_op = _adam_with_schedule_and_average(factor)
            with tf.compat.v1.train.MonitoredTrainingSession(
                checkpoint_dir=str(directory),
                save_checkpoint_secs=None,
                save_checkpoint_steps=1,
                save_summaries_steps=None,
                log_step_count_steps=None,
            ) as session:
                for step in steps:
                    session.run(train_op, {factor: _factor(step)})
                values = _values(session)
    return values


@pytest.mark.graph
def test_monitored_session_resumes_exactly_after_applied_steps(tmp_path: Path) -> None:
    whole = _in_monitored_sessions(tmp_path / "whole", [list(range(_STEPS))])
    pieces = [[0, 1, 2], [3, 4, 5, 6], [7, 8, 9]]
    assert _in_monitored_sessions(tmp_path / "pieces", pieces) == whole


@pytest.mark.graph
def test_monitored_session_repeats_the_overflows_that_it_stopped_after(tmp_path: Path) -> None:
    # TensorFlow's hook saves when the global step has moved: what steps 4 and 5 did to the scale is in no checkpoint.
    whole = _in_monitored_sessions(tmp_path / "whole", [list(range(_STEPS))])
    again = [[0, 1, 2, 3, 4, 5], list(range(4, _STEPS))]
    assert _in_monitored_sessions(tmp_path / "again", again) == whole


@pytest.mark.graph
@pytest.mark.estimator
def test_estimator_trained_in_pieces_equals_one_trained_at_once(tmp_path: Path) -> None:
    def model_fn(features: tf.Tensor, labels: tf.Tensor, mode: str) -> Any:
        del labels
        train_op = _adam_with_schedule_and_average(features)
        # The loss is shown, and must be finite to go on.
        return tf.estimator.EstimatorSpec(mode, loss=tf.constant(0.0), train_op=train_op)

    def feed(steps: range) -> Callable[[], tf.data.Dataset]:
        rows = np.float32([_factor(step) for step in steps])
        return lambda: tf.data.Dataset.from_tensor_slices((rows, np.zeros(len(rows))))

    trained = []
    for directory, pieces in {"whole": [range(_STEPS)], "pieces": [range(3), range(3, 7), range(7, _STEPS)]}.items():
        estimator = tf.estimator.Estimator(model_fn, tmp_path / directory)
        for steps in pieces:
            estimator.train(feed(steps))
        names = [name for name in estimator.get_variable_names() if "checkpoint" not in name]
        trained.append({name: estimator.get_variable_value(name).tolist() for name in names})
    assert trained[0] == trained[1]
    assert (trained[0]["global_step"], trained[0]["loss_scale"]) == (6, 2048)


class _EagerRun:
    """A run of TF1's Adam in eager code."""

    def __init__(self) -> None:
        self._w = tf.Variable([0.5, -1.0, 2.0])
        self._global_step = tf.Variable(0, dtype=tf.int64)
        self._inner = tf.compat.v1.train.AdamOptimizer(0.125)
        self._manager = _manager()
        self.checkpoint = tf.train.Checkpoint(
            w=self._w, global_step=self._global_step, optimizer=self._inner, manager=self._manager
        )
        self._opt = tfmp.LossScaleOptimizer(self._inner, self._manager)

    def step(self, step: int) -> list[Any]:
        def loss() -> tf.Tensor:
            return tf.reduce_sum(tf.square(self._w)) * _factor(step)

        self._opt.minimize(loss, self._global_step, var_list=[self._w])
        kept = [self._w, self._global_step, *self._manager.state.values]
        return [variable.numpy().tolist() for variable in kept]

    def slots(self) -> list[Any]:
        return [variable.numpy().tolist() for variable in self._inner.variables()]


def test_eager_loop_resumes_exactly_wherever_it_stopped(tmp_path: Path) -> None:
    run = _EagerRun()
    paths, after, slots = [], [], []
    for step in range(_STEPS):
        paths.append(run.checkpoint.write(str(tmp_path / f"model.ckpt-{step}")))
        after.append(run.step(step))
        slots.append(run.slots())
    for stop, path in enumerate(paths):
        resumed = _EagerRun()
        resumed.checkpoint.read(path).assert_existing_objects_matched()
        for step in range(stop, _STEPS):
            assert resumed.step(step) == after[step], (stop, step)
            assert resumed.slots() == slots[step], (stop, step)
