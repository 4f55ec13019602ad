"""A run in a monitored session or an Estimator that is stopped and resumed equals an uninterrupted run, bit for bit.

`tests/contract/` stops every host; here TensorFlow decides when a checkpoint is written.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import tfmp

tf1 = tf.compat.v1

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
    w = tf1.get_variable("w", initializer=[0.5, -1.0, 2.0])
    global_step = tf1.train.get_or_create_global_step()
    rate = tf1.train.polynomial_decay(0.125, global_step, 20)
    opt = tfmp.LossScaleOptimizer(tf1.train.AdamOptimizer(rate), _manager())
    train_op = opt.minimize(tf.reduce_sum(tf.square(w)) * factor, global_step)
    with tf.control_dependencies([train_op]):
        return tf.train.ExponentialMovingAverage(0.75, name="average").apply([w])


def _in_monitored_sessions(directory: Path, pieces: list[list[int]]) -> dict[str, Any]:
    """Train in pieces, each in a graph and a session of its own, and return what the last leaves."""
    for steps in pieces:
        with tf.Graph().as_default():
            factor = tf1.placeholder(tf.float32, [])
            train_op = _adam_with_schedule_and_average(factor)
            with tf1.train.MonitoredTrainingSession(
                checkpoint_dir=str(directory),
                save_checkpoint_secs=None,
                save_checkpoint_steps=1,
                save_summaries_steps=None,
                log_step_count_steps=None,
            ) as session:
                for step in steps:
                    session.run(train_op, {factor: _factor(step)})
                values = session.run({variable.name: variable for variable in tf1.global_variables()})
    return {name: value.tolist() for name, value in values.items()}


@pytest.mark.graph
@pytest.mark.parametrize(
    "pieces",
    [
        [[0, 1, 2], [3, 4, 5, 6], [7, 8, 9]],
        # TensorFlow's hook saves when the global step has moved: what steps 4 and 5 did to the scale is in no
        # checkpoint, and the overflows that it stopped after are repeated.
        [[0, 1, 2, 3, 4, 5], list(range(4, _STEPS))],
    ],
    ids=["after applied steps", "after overflows"],
)
def test_monitored_session_resumes_exactly(pieces: list[list[int]], tmp_path: Path) -> None:
    whole = _in_monitored_sessions(tmp_path / "whole", [list(range(_STEPS))])
    assert (whole["global_step:0"], whole["loss_scale:0" if "loss_scale:0" in whole else "loss_scale/value:0"]) == (
        6,
        2048,
    )
    assert _in_monitored_sessions(tmp_path / "pieces", pieces) == whole


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
