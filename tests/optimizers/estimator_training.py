"""Trains by Estimator on the replicas of a strategy, each with other inputs, and notes the state after each step.

Run as a program, this module is one of two workers, and prints the states. With the behaviour of TensorFlow 1:

    TF_CONFIG=... python tests/optimizers/estimator_training.py v1 /tmp/model
"""

import argparse
import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import tensorflow as tf
from replica_training import add_options, die_after, inputs, ours

import tfmp

tf1 = tf.compat.v1

#: The values of variables and counters by name: for each a list of the values on the replicas of this process.
State: TypeAlias = dict[str, list[Any]]


def train(
    fed: np.ndarray, model_dir: Path, note: Callable[[State], None], strategy: tf.distribute.Strategy | None = None
) -> None:
    """Train, and note the state after each step; a single replica gets both inputs as one batch."""
    workers = getattr(strategy, "cluster_resolver", None)
    rank, count = (workers.task_id, strategy.num_replicas_in_sync) if workers else (0, 1)
    # Only the first worker fetches summaries, to show that the workers need not run the same graph.
    config = tf.estimator.RunConfig(
        str(model_dir),
        train_distribute=strategy,
        save_summary_steps=None if rank else 100,
        save_checkpoints_steps=None if rank else 20,
        log_step_count_steps=None,
    )
    estimator = tf.estimator.Estimator(_model_fn(note), config=config)
    replicas = strategy.num_replicas_in_sync if strategy else 1

    def input_fn() -> tf.data.Dataset:
        rows = tf.data.Dataset.from_tensor_slices(np.float32(fed).reshape(-1, 1))
        return rows.shard(count, rank).batch(fed.shape[1] // replicas)

    if workers:
        tf.estimator.train_and_evaluate(estimator, tf.estimator.TrainSpec(input_fn), tf.estimator.EvalSpec(input_fn))
    else:
        estimator.train(input_fn)


def _model_fn(note: Callable[[State], None]) -> Callable[..., Any]:
    """Make a model of a kernel, a bias whose gradient is always 1, and a table whose gradient is sparse."""

    def model_fn(features: tf.Tensor, mode: str) -> Any:
        kernel = tf1.get_variable("kernel", initializer=1.0)
        bias = tf1.get_variable("bias", initializer=0.0)
        table = tf1.get_variable("table", initializer=[1.0, 1.0, 1.0])
        rows = tf.gather(table, tf.cast(features > 0, tf.int32))
        opt = ours(tf1.train.AdamOptimizer(0.125), is_distributed=tf.distribute.has_strategy())
        loss = tf.reduce_mean((kernel + rows) * features + bias)
        train_op = opt.minimize(loss, tf1.train.get_or_create_global_step())
        # Estimator would end the training at a NaN loss, so it gets a constant in its place.
        hook = _StateHook(opt.manager, note)
        return tf.estimator.EstimatorSpec(mode, loss=tf.zeros([]), train_op=train_op, training_hooks=[hook])

    return model_fn


class _StateHook(tf1.train.SessionRunHook):
    def __init__(self, loss_scale_manager: tfmp.LossScaleManager, note: Callable[[State], None]) -> None:
        self._manager = loss_scale_manager
        self._note = note

    def begin(self) -> None:
        results = tf.distribute.get_strategy().experimental_local_results
        self._fetches = {
            variable.op.name: [part.read_value() for part in results(variable)] for variable in tf1.global_variables()
        }
        self._fetches |= {name: [count] for name, count in self._manager.get_status()._asdict().items()}

    def after_run(self, run_context: tf1.train.SessionRunContext, run_values: tf1.train.SessionRunValues) -> None:
        del run_values
        fetched = run_context.session.run(self._fetches)
        self._note({name: [value.tolist() for value in parts] for name, parts in fetched.items()})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("behavior", choices=["v1", "v2"])
    parser.add_argument("model_dir", type=Path)
    add_options(parser)
    args = parser.parse_args()
    # A process can run only one training. In a second training Estimator's copy of the strategy would reuse the numbers
    # of the first one's collectives, and fail, with any optimizer (TensorFlow 2.15.1).
    if args.behavior == "v1":
        tf1.disable_v2_behavior()
        strategy = tf1.distribute.experimental.MultiWorkerMirroredStrategy()
    else:
        strategy = tf.distribute.MultiWorkerMirroredStrategy()
    taken = itertools.count(1)

    def tell(state: State) -> None:
        print("STATE estimator", json.dumps(state), flush=True)  # noqa: T201 - a command line prints
        die_after(args, next(taken), strategy.cluster_resolver.task_id)

    train(inputs()[args.first : args.last], args.model_dir, tell, strategy)


if __name__ == "__main__":
    main()
