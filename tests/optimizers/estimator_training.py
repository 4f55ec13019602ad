"""Trains by Estimator on the replicas of a strategy, each with other inputs, and returns the state after each step.

Run as a program, this module is one of the two workers of such a training, and prints the states:

    TF_CONFIG=... python tests/optimizers/estimator_training.py tf_config Adam random /tmp/model
    horovodrun -np 2 python tests/optimizers/estimator_training.py plain,inside Adam random /tmp/model
"""

import argparse
import functools
import importlib
import itertools
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import tensorflow as tf
from horovod_training import wrap
from replica_training import OVERFLOWS, add_options, die_after, inputs, manager

import tfmp

tf1 = tf.compat.v1

#: The values of variables and counters by name: for each a list of the values on the replicas of this process.
State: TypeAlias = dict[str, list[Any]]

OPTIMIZERS: dict[str, Callable[[], tf1.train.Optimizer]] = {
    "Adam": lambda: tf1.train.AdamOptimizer(0.125),
    "Momentum": lambda: tf1.train.MomentumOptimizer(0.125, 0.5),
}


class Worker(NamedTuple):
    """A process that takes part in the training; the defaults are for a process that trains alone.

    Attributes:
        rank: The number of this process.
        count: The number of all processes.
        strategy: The strategy to train under, if there is one.
        hooks: Hooks that synchronize this process with the others.
        wrap: Wraps an inner optimizer; takes the manager as a keyword argument.
    """

    rank: int = 0
    count: int = 1
    strategy: tf.distribute.Strategy | None = None
    hooks: Sequence[tf1.train.SessionRunHook] = ()
    wrap: Callable[..., Any] = functools.partial(wrap, None, "alone")


def train(
    optimizer: str,
    inputs: np.ndarray,
    model_dir: Path,
    worker: Worker,
    tell: Callable[[State], None] = lambda state: None,
) -> list[State]:
    """Train, and return the states after each step.

    Args:
        optimizer: A key of `OPTIMIZERS`.
        inputs: The inputs of two replicas, a row for each step. A single replica gets both as one batch.
        model_dir: The directory of Estimator's checkpoints.
        worker: This process.
        tell: Called with each state.
    """
    states: list[State] = []

    def note(state: State) -> None:
        states.append(state)
        tell(state)

    # Only the first worker fetches summaries, to show that the workers need not run the same graph.
    config = tf.estimator.RunConfig(
        str(model_dir),
        train_distribute=worker.strategy,
        save_summary_steps=None if worker.rank else 100,
        save_checkpoints_steps=None if worker.rank else 20,
        log_step_count_steps=None,
    )
    estimator = tf.estimator.Estimator(_model_fn(OPTIMIZERS[optimizer], worker.wrap, note), config=config)
    replicas = worker.strategy.num_replicas_in_sync if worker.strategy else worker.count

    def input_fn() -> tf.data.Dataset:
        rows = tf.data.Dataset.from_tensor_slices(np.float32(inputs).reshape(-1, 1))
        return rows.shard(worker.count, worker.rank).batch(inputs.shape[1] // replicas)

    if config.cluster_spec:
        tf.estimator.train_and_evaluate(estimator, tf.estimator.TrainSpec(input_fn), tf.estimator.EvalSpec(input_fn))
    else:
        estimator.train(input_fn, hooks=worker.hooks)
    return states


def _model_fn(
    make_inner: Callable[[], tf1.train.Optimizer], wrap: Callable[..., Any], note: Callable[[State], None]
) -> Callable[..., Any]:
    """Make a model of a kernel, a bias whose gradient is always 1, and a table whose gradient is sparse."""

    def model_fn(features: tf.Tensor, mode: str) -> Any:
        kernel = tf1.get_variable("kernel", initializer=1.0)
        bias = tf1.get_variable("bias", initializer=0.0)
        table = tf1.get_variable("table", initializer=[1.0, 1.0, 1.0])
        rows = tf.gather(table, tf.cast(features > 0, tf.int32))
        loss = tf.reduce_mean((kernel + rows) * features + bias)
        loss_scale_manager = manager()
        opt = wrap(make_inner(), loss_scale_manager=loss_scale_manager)
        train_op = opt.minimize(loss, tf1.train.get_or_create_global_step())
        # Estimator would end the training at a NaN loss, so it gets a constant in its place.
        loss = tf.zeros([])
        hook = _StateHook(loss_scale_manager, note)
        return tf.estimator.EstimatorSpec(mode, loss=loss, train_op=train_op, training_hooks=[hook])

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
    parser.add_argument(
        "kinds",
        help="tf_config or tf_config_v1; or, with Horovod, orders of `wrap`, separated by commas; --die is of the last",
    )
    parser.add_argument("optimizer", choices=OPTIMIZERS)
    parser.add_argument("overflow", choices=[*OVERFLOWS, "random"])
    parser.add_argument("model_dir", type=Path)
    add_options(parser)
    args = parser.parse_args()

    # With TF_CONFIG a process can run only one training. In a second training Estimator's copy of the strategy would
    # reuse the numbers of the first one's collectives, and fail, with any optimizer (TensorFlow 2.15.1).
    *whole, last = args.kinds.split(",")
    for kind in whole:
        _train_as(kind, args, dies=False)
    _train_as(last, args, dies=True)


def _train_as(kind: str, args: argparse.Namespace, *, dies: bool) -> None:
    worker = _worker(kind)
    taken = itertools.count(1)

    def tell(state: State) -> None:
        print(f"STATE {kind}/{worker.rank}", json.dumps(state), flush=True)  # noqa: T201 - a command line prints
        if dies:
            die_after(args, next(taken), worker.rank)

    train(args.optimizer, inputs(args.overflow)[args.first : args.last], args.model_dir / kind, worker, tell)


def _worker(kind: str) -> Worker:
    if not kind.startswith("tf_config"):
        horovod = importlib.import_module("horovod.tensorflow")
        horovod.init()
        hooks = [horovod.BroadcastGlobalVariablesHook(0)]
        return Worker(horovod.rank(), horovod.size(), hooks=hooks, wrap=functools.partial(wrap, horovod, kind))
    if kind == "tf_config_v1":
        tf1.disable_v2_behavior()
        strategy = tf1.distribute.experimental.MultiWorkerMirroredStrategy()
    else:
        strategy = tf.distribute.MultiWorkerMirroredStrategy()
    rank, count = strategy.cluster_resolver.task_id, strategy.num_replicas_in_sync
    return Worker(rank, count, strategy, wrap=functools.partial(wrap, None, "plain"))


if __name__ == "__main__":
    main()
