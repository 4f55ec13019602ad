"""Trains with Horovod, every process fed inputs of its own, and prints the state after every step.

    PYTHONPATH=. horovodrun -np 2 python tests/optimizers/horovod_training.py session plain inside outside

In a single process, without Horovod, `reference` trains on the mean of the gradients, and so does `ReplicaTraining`.
"""

import argparse
import json
import math
import os
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import replica_training
import tensorflow as tf

import tfmp

tf1 = tf.compat.v1

_WORKERS = 2


def inputs(steps: int) -> np.ndarray:
    """Return what each worker is fed, a row for each step: powers of two, so that means are exact.

    Some are infinite, some NaN, and some overflow once they are scaled.
    """
    chances = {0.25: 0.3, 0.5: 0.28, -1.0: 0.24, math.inf: 0.06, math.nan: 0.06, 2.0**127: 0.06}
    return np.random.default_rng(0).choice(list(chances), [steps, _WORKERS], p=list(chances.values()))


def manager() -> tfmp.ExponentialUpdateLossScaleManager:
    """Return a manager whose scale changes often, and in powers of two."""
    return tfmp.ExponentialUpdateLossScaleManager(256, 4, decr_every_n_nan_or_inf=5, decr_ratio=0.5)


class SessionTraining:
    """A kernel, with a dense gradient, an embedding, with a sparse one, and a bias that has none, in a graph.

    Args:
        opt: The optimizer.
        loss_scale_manager: Its manager.
        ranks: The workers whose inputs this process is fed: its own, or those of all, of which it takes the mean.
        with_bias: Let the loss depend on the bias too.
    """

    def __init__(
        self, opt: Any, loss_scale_manager: tfmp.LossScaleManager, ranks: Sequence[int], with_bias: bool = False
    ) -> None:
        self._inputs = [tf1.placeholder(tf.float32, []) for _ in ranks]
        kernel = tf1.get_variable("kernel", initializer=[1.0, 2.0])
        table = tf1.get_variable("table", initializer=np.ones([4, 1], np.float32))
        bias = tf1.get_variable("bias", initializer=1.0)
        losses = [
            (tf.reduce_sum(kernel) + tf.reduce_sum(tf.nn.embedding_lookup(table, [rank, 3]))) * value
            for rank, value in zip(ranks, self._inputs, strict=True)
        ]
        loss = tf.add_n(losses) / len(ranks) + (bias if with_bias else 0)
        self._train_op = opt.minimize(loss, tf1.train.get_or_create_global_step(), [kernel, table, bias])
        self._variables = tf1.global_variables()
        self._outcomes = loss_scale_manager.get_step_outcomes()
        self._saver = tf1.train.Saver()

    def states(self, fed: np.ndarray, restore: str | None = None, save: str | None = None) -> Iterator[dict[str, Any]]:
        """Take the steps; yield the variables and the counts after each.

        Args:
            fed: The inputs, a row for each step.
            restore: A checkpoint to start from.
            save: Where to save a checkpoint after each step, which ends in the number of steps taken.
        """
        with tf1.Session() as session:
            session.run(tf1.global_variables_initializer())
            if restore is not None:
                self._saver.restore(session, restore)
            for taken, values in enumerate(fed, start=1):
                session.run(self._train_op, dict(zip(self._inputs, values, strict=True)))
                if save is not None:
                    self._saver.save(session, save, taken)
                variables, outcomes = session.run([self._variables, self._outcomes])
                yield {
                    "variables": [value.tolist() for value in variables],
                    "outcomes": [value.tolist() for value in outcomes],
                }


def reference(steps: int, ranks: Sequence[int] = range(_WORKERS)) -> list[dict[str, Any]]:
    """Return the states of a single process that trains on the mean of the workers' gradients.

    Args:
        steps: How many to take.
        ranks: The workers.
    """
    with tf.Graph().as_default():
        loss_scale_manager = manager()
        opt = tfmp.LossScaleOptimizer(tf1.train.AdamOptimizer(0.125), loss_scale_manager)
        return list(SessionTraining(opt, loss_scale_manager, ranks).states(inputs(steps)[:, ranks]))


def _wrap(hvd: Any, order: str, inner: Any, **settings: Any) -> Any:
    """Wrap an optimizer in tfmp's and, but for some orders, in Horovod's."""
    if order == "inside":
        return tfmp.LossScaleOptimizer(hvd.DistributedOptimizer(inner), is_distributed=True, **settings)
    if order == "outside":
        return hvd.DistributedOptimizer(tfmp.LossScaleOptimizer(inner, is_distributed=True, **settings))
    dtype = "float16" if order == "float16" else None
    return tfmp.LossScaleOptimizer(inner, is_distributed=order != "alone", aggregation_dtype=dtype, **settings)


def _by_session(hvd: Any, order: str, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    rank = hvd.rank()
    with tf.Graph().as_default():
        loss_scale_manager = manager()
        opt = _wrap(hvd, order, tf1.train.AdamOptimizer(0.125), loss_scale_manager=loss_scale_manager)
        training = SessionTraining(opt, loss_scale_manager, [rank], with_bias=options.missing and rank == 1)
        fed = inputs(options.last)[options.first :, [rank]]
        yield from training.states(fed, options.restore, options.save if rank == 0 else None)


def _by_keras(hvd: Any, order: str, options: argparse.Namespace) -> Iterator[replica_training.State]:
    import keras

    training = replica_training.ReplicaTraining(
        keras,
        tf.distribute.get_strategy(),
        lambda inner: _wrap(hvd, order, inner, loss_scale_manager=replica_training.manager()),
    )
    fed = replica_training.inputs("random")[:, [hvd.rank()]]
    yield from training.by_fit(fed) if options.way == "fit" else training.by_loop(fed)


def _main() -> None:
    import horovod.tensorflow as hvd

    parser = argparse.ArgumentParser()
    parser.add_argument("way", choices=["session", "fit", "loop"])
    parser.add_argument("orders", nargs="+", choices=["plain", "inside", "outside", "float16", "alone"])
    parser.add_argument("--v1-behavior", action="store_true")
    parser.add_argument("--first", type=int, default=0, help="the first step")
    parser.add_argument("--last", type=int, default=300, help="the step before which to stop")
    parser.add_argument("--die", type=int, help="after how many steps the second process dies")
    parser.add_argument("--restore", help="a checkpoint to start from")
    parser.add_argument("--save", help="where to save a checkpoint after each step")
    parser.add_argument("--missing", action="store_true", help="let the second process have a gradient more")
    options = parser.parse_args()
    if options.v1_behavior:
        tf1.disable_v2_behavior()
    hvd.init()
    states_of = _by_session if options.way == "session" else _by_keras
    for order in options.orders:
        for taken, state in enumerate(states_of(hvd, order, options), start=1):
            print(f"STATE {hvd.rank()} {order}", json.dumps(state), flush=True)  # noqa: T201 - it is a program
            if taken == options.die and hvd.rank() == 1:
                os._exit(3)


if __name__ == "__main__":
    _main()
