"""Trains under Horovod with a hook that records ranges, and prints what each worker's hook has found.

    PYTHONPATH=. horovodrun -np 2 python tests/monitoring/graph_range_workers.py

Each worker also prints what `tfmp.ranges.exponent_counts` sums over the workers. It does both with TensorFlow 2's
behavior, and then with TensorFlow 1's, without eager code.
"""

import importlib
import json
from typing import Any

import tensorflow as tf

import tfmp

tf1 = tf.compat.v1


def _train(rank: int) -> dict[str, Any]:
    """Train for three steps; the factor of the loss is 4 on the first worker and 8 on the second."""
    with tf.Graph().as_default():
        w = tf1.get_variable("w", initializer=[1.0, 2.0])
        factor = tf1.placeholder_with_default([4.0 * (rank + 1), 0.0], [2])
        loss = tf.reduce_sum(tfmp.ranges.probe(w * factor, "product"))
        sgd, manager = tf1.train.GradientDescentOptimizer(0.0), tfmp.FixedLossScaleManager(16)
        opt = tfmp.LossScaleOptimizer(sgd, manager, is_distributed=True)
        train_op = opt.minimize(loss, tf1.train.get_or_create_global_step())
        hook = tfmp.LossScaleLoggingHook(ranges_every_n_steps=2)
        with tf1.train.MonitoredTrainingSession(hooks=[hook], log_step_count_steps=None) as session:
            for _ in range(3):
                session.run(train_op)
    last = hook.ranges.last
    kinds = {kind: {name: each.to_dict() for name, each in of.items()} for kind, of in last.histograms.items()}
    return {"step": last.step, "loss_scale": last.loss_scale, **kinds}


def _counts(rank: int) -> list[dict[str, int]]:
    with tf.Graph().as_default(), tf1.Session() as session:
        rows = session.run(tfmp.ranges.exponent_counts([tf.constant([1.0, 2.0**rank]), None], is_distributed=True))
    if tf.executing_eagerly():
        eager = tfmp.ranges.exponent_counts([tf.constant([1.0, 2.0**rank]), None], is_distributed=True)
        assert eager.numpy().tolist() == rows.tolist()
    return [tfmp.ranges.RangeHistogram(row).to_dict() for row in rows]


def _tell(behavior: str, rank: int) -> None:
    for way, state in (("counts", _counts(rank)), ("hook", _train(rank))):
        print(f"STATE {behavior}/{way}/{rank}", json.dumps(state), flush=True)  # noqa: T201 - a command line prints


if __name__ == "__main__":
    hvd = importlib.import_module("horovod.tensorflow")
    hvd.init()
    _tell("v2", hvd.rank())
    tf1.disable_v2_behavior()
    _tell("v1", hvd.rank())
