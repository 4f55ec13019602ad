"""Trains by Estimator on the replicas of a strategy, each fed inputs of its own, and tells the state after every step.

Run as a program it is one of two workers of such a training, and prints the states:

    TF_CONFIG=... python tests/optimizers/estimator_training.py tf_config Adam random /tmp/model
    horovodrun -np 2 python tests/optimizers/estimator_training.py horovod Adam random /tmp/model
"""

import argparse
import importlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import tensorflow as tf
from replica_training import OVERFLOWS, inputs, ours

import tfmp

tf1 = tf.compat.v1

#: The values of variables and counters by name, a list for the replicas of this process.
State: TypeAlias = dict[str, list[Any]]

OPTIMIZERS: dict[str, Callable[[], tf1.train.Optimizer]] = {
    "Adam": lambda: tf1.train.AdamOptimizer(0.125),
    "Momentum": lambda: tf1.train.MomentumOptimizer(0.125, 0.5),
}


class Worker(NamedTuple):
    """A process that trains, by default alone.

    Attributes:
        rank: Its number.
        count: The number of all.
        strategy: Where to train.
        hooks: What joins it to the others.
    """

    rank: int = 0
    count: int = 1
    strategy: tf.distribute.Strategy | None = None
    hooks: Sequence[tf1.train.SessionRunHook] = ()


def train(optimizer: str, inputs: np.ndarray, model_dir: Path, worker: Worker) -> list[State]:
    """Train, and return the states after each step.

    Args:
        optimizer: A key of `OPTIMIZERS`.
        inputs: What two replicas are fed, a row for each step; one replica gets both as a batch.
        model_dir: Where Estimator keeps its checkpoints.
        worker: This process.
    """
    states: list[State] = []
    # Only the first fetches summaries: workers need not run the same graph.
    config = tf.estimator.RunConfig(
        str(model_dir),
        train_distribute=worker.strategy,
        save_summary_steps=None if worker.rank else 100,
        save_checkpoints_steps=None if worker.rank else 100,
        log_step_count_steps=None,
    )
    estimator = tf.estimator.Estimator(_model_fn(optimizer, states, worker.count > 1), config=config)
    replicas = worker.strategy.num_replicas_in_sync if worker.strategy else worker.count

    def input_fn() -> tf.data.Dataset:
        rows = tf.data.Dataset.from_tensor_slices(np.float32(inputs).reshape(-1, 1))
        return rows.shard(worker.count, worker.rank).batch(inputs.shape[1] // replicas)

    if config.cluster_spec:
        tf.estimator.train_and_evaluate(estimator, tf.estimator.TrainSpec(input_fn), tf.estimator.EvalSpec(input_fn))
    else:
        estimator.train(input_fn, hooks=worker.hooks)
    return states


def _model_fn(optimizer: str, states: list[State], is_distributed: bool) -> Callable[..., Any]:
    """Make a model of a kernel, a bias whose gradient is always 1, and two tables whose gradients are sparse."""

    def model_fn(features: tf.Tensor, mode: str) -> Any:
        kernel = tf1.get_variable("kernel", initializer=1.0)
        bias = tf1.get_variable("bias", initializer=0.0)
        table = tf1.get_variable("table", initializer=[1.0, 1.0, 1.0])
        rows = tf.gather(table, tf.cast(features > 0, tf.int32))
        places = tf.gather(tf1.get_variable("places", initializer=[1.0, 1.0]), [1])
        loss = tf.reduce_mean((kernel + rows + places) * features + bias)
        opt = ours(OPTIMIZERS[optimizer](), is_distributed=is_distributed)
        train_op = opt.minimize(loss, tf1.train.get_or_create_global_step())
        # Estimator would end the training where the loss, not only a gradient, is NaN.
        loss = tf.zeros([])
        return tf.estimator.EstimatorSpec(mode, loss=loss, train_op=train_op, training_hooks=[_StateHook(opt, states)])

    return model_fn


class _StateHook(tf1.train.SessionRunHook):
    def __init__(self, opt: tfmp.LossScaleOptimizer, states: list[State]) -> None:
        self._opt = opt
        self._states = states

    def begin(self) -> None:
        results = tf.distribute.get_strategy().experimental_local_results
        self._fetches = {
            variable.op.name: [part.read_value() for part in results(variable)] for variable in tf1.global_variables()
        }
        counts = ("applied_steps", "skipped_steps", "consecutive_skipped_steps", "last_step_finite")
        self._fetches |= {name: [getattr(self._opt, name)] for name in counts}

    def after_run(self, run_context: tf1.train.SessionRunContext, run_values: tf1.train.SessionRunValues) -> None:
        del run_values
        fetched = run_context.session.run(self._fetches)
        self._states.append({name: [value.tolist() for value in parts] for name, parts in fetched.items()})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=["tf_config", "tf_config_v1", "horovod"], help="what brings workers together")
    parser.add_argument("optimizer", choices=OPTIMIZERS)
    parser.add_argument("overflow", choices=[*OVERFLOWS, "random"])
    parser.add_argument("model_dir", type=Path)
    args = parser.parse_args()

    worker = _worker(args.kind)
    # One a process: in a second training by TF_CONFIG the collectives of Estimator's copy of the strategy would take
    # the numbers of the first, and fail, with any optimizer (TensorFlow 2.15.1).
    for state in train(args.optimizer, inputs(args.overflow), args.model_dir, worker):
        print(f"STATE {worker.rank}", json.dumps(state), flush=True)  # noqa: T201 - a command line prints


def _worker(kind: str) -> Worker:
    if kind == "horovod":
        horovod = importlib.import_module("horovod.tensorflow")
        horovod.init()
        return Worker(horovod.rank(), horovod.size(), hooks=[horovod.BroadcastGlobalVariablesHook(0)])
    if kind == "tf_config_v1":
        tf1.disable_v2_behavior()
        strategy = tf1.distribute.experimental.MultiWorkerMirroredStrategy()
    else:
        strategy = tf.distribute.MultiWorkerMirroredStrategy()
    return Worker(strategy.cluster_resolver.task_id, strategy.num_replicas_in_sync, strategy)


if __name__ == "__main__":
    main()
