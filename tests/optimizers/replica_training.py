"""Trains a model on the replicas of a strategy, feeds each replica other inputs, and returns the state of every step.

Run as a program, this module is one process of such a training, and prints the states. It needs
PYTHONPATH=.:tests:tests/contract.

    python tests/optimizers/replica_training.py tf_keras mirrored ours random loop fit
    TF_CONFIG=... python tests/optimizers/replica_training.py keras,tf_keras workers stock last fit
"""

import argparse
import functools
import importlib
import itertools
import json
import math
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, TypeAlias

import numpy as np
import tensorflow as tf
from kit import checks
from kit.hosts import as_json
from kit.installed import replicated_hosts
from kit.oracle import Rule
from scenarios import REPLICATED, STRUCTURE

import tfmp

#: The values of the variables on each replica of this process: a list of values for each replica.
State: TypeAlias = list[list[Any]]

#: A function that takes a step, given an optimizer, a function that returns the loss, and the variables to train.
Minimize: TypeAlias = Callable[[Any, Callable[[], tf.Tensor], list[Any]], None]

#: The indices of the replicas, of two, that overflow.
OVERFLOWS = {"none": (), "first": (0,), "last": (1,), "both": (0, 1)}


def inputs(overflow: str) -> np.ndarray:
    """Return the inputs of two replicas, a row for each step. The finite ones are powers of two, so sums are exact.

    Args:
        overflow: A key of `OVERFLOWS`: there are four steps, and at the second one these replicas overflow. Or
            "random": there are 200 steps, and each replica overflows in a fifth of them on average.
    """
    if overflow == "random":
        chances = {0.25: 0.3, 0.5: 0.3, -1.0: 0.2, math.inf: 0.1, math.nan: 0.1}
        return np.random.default_rng(0).choice(list(chances), [200, 2], p=list(chances.values()))
    fed = np.ones([4, 2])
    fed[1, list(OVERFLOWS[overflow])] = math.inf
    return fed


def manager() -> tfmp.LossScaleManager:
    """Return a manager whose scale changes often."""
    return tfmp.ExponentialUpdateLossScaleManager(1024, 2, decr_every_n_nan_or_inf=2, decr_ratio=0.5)


def ours(inner_optimizer: Any, **options: Any) -> tfmp.LossScaleOptimizer:
    """Wrap an optimizer in tfmp's wrapper."""
    return tfmp.LossScaleOptimizer(inner_optimizer, manager(), **options)


def command(*arguments: str) -> list[str]:
    """Return the command that runs this module as a program.

    Args:
        arguments: The arguments of the program.
    """
    return [sys.executable, __file__, *arguments]


def values(strategy: tf.distribute.Strategy, variables: list[Any]) -> State:
    """Return the variables' values on each replica of this process."""
    # A variable of Keras 3 contains a variable of TensorFlow.
    of_tensorflow = [variable if isinstance(variable, tf.Variable) else variable.value for variable in variables]
    parts = map(strategy.experimental_local_results, of_tensorflow)
    return [[part.numpy().tolist() for part in replica] for replica in zip(*parts, strict=True)]


class ReplicaTraining:
    """A model with a kernel, whose gradient is the mean input, an embedding with a sparse gradient, and a bias.

    Args:
        keras: The Keras.
        strategy: The strategy to train under. Each of two replicas gets one input; a single replica gets both.
        wrap: Wraps an inner optimizer.
        legacy: Whether the inner optimizer is a legacy optimizer of Keras 2.
    """

    def __init__(
        self,
        keras: ModuleType,
        strategy: tf.distribute.Strategy,
        wrap: Callable[[Any], Any] = ours,
        *,
        legacy: bool = False,
    ) -> None:
        self._keras = keras
        self._strategy = strategy
        self._legacy = legacy
        with strategy.scope():
            self.model = _model(keras)
            self.opt = wrap(keras.optimizers.legacy.Adam(0.125) if legacy else keras.optimizers.Adam(0.125))
            self.model.compile(self.opt)
        self.checkpoint = tf.train.Checkpoint(model=self.model, optimizer=self.opt)

    def state(self) -> State:
        """Return the values of the weights and of the optimizer's variables."""
        # Legacy optimizers do not list the variables of the loss scale, and have a method in place of `variables`.
        of_opt = [*self.opt.weights, *self.opt.manager.variables] if self._legacy else self.opt.variables
        return values(self._strategy, [*self.model.weights, *of_opt])

    def by_loop(
        self, inputs: np.ndarray, *, unscale: bool = False, compiled: bool = True, minimize: Minimize | None = None
    ) -> Iterator[State]:
        """Train by a custom loop, and yield the state after each step.

        Args:
            inputs: The inputs of the replicas, a row for each step.
            unscale: Whether to call `get_scaled_loss` and `get_unscaled_gradients` in place of `scale_loss`.
            compiled: Whether to run the step as a `tf.function`.
            minimize: A function that takes the step in another way.
        """
        weights = self.model.trainable_variables
        if not self._legacy:
            with self._strategy.scope():
                self.opt.build(weights)

        def on_replica(x: tf.Tensor) -> None:
            def loss() -> tf.Tensor:
                return tf.reduce_sum(self.model(x)) / inputs.shape[1]

            if minimize is not None:
                minimize(self.opt, loss, weights)
                return
            with tf.GradientTape() as tape:
                scaled = self.opt.get_scaled_loss(loss()) if unscale else self.opt.scale_loss(loss())
            grads = tape.gradient(scaled, weights)
            if unscale:
                grads = self.opt.get_unscaled_gradients(grads)
            self.opt.apply_gradients(zip(grads, weights, strict=True))

        def step(x: tf.Tensor) -> None:
            self._strategy.run(on_replica, args=(x,))

        run = tf.function(step) if compiled else step
        for x in self._dataset(inputs):
            run(x)
            yield self.state()

    def by_fit(self, inputs: np.ndarray) -> list[State]:
        """Train by `fit`, and return the states after each step.

        Args:
            inputs: The inputs of the replicas, a row for each step.
        """
        states: list[State] = []
        record = self._keras.callbacks.LambdaCallback(
            on_train_batch_end=lambda batch, logs: states.append(self.state())
        )
        settings = {"steps_per_epoch": len(inputs), "shuffle": False, "verbose": 0}
        self.model.fit(self._dataset(inputs), callbacks=[record], **settings)
        return states

    def _dataset(self, inputs: np.ndarray) -> Any:
        # `experimental_distribute_dataset` would not let the test decide which worker gets which row.
        def of_process(context: tf.distribute.InputContext) -> tf.data.Dataset:
            rows = tf.data.Dataset.from_tensor_slices(np.float32(inputs).reshape(-1, 1))
            rows = rows.shard(context.num_input_pipelines, context.input_pipeline_id)
            return rows.batch(context.get_per_replica_batch_size(inputs.shape[1]))

        return self._strategy.distribute_datasets_from_function(of_process)


def _model(keras: ModuleType) -> Any:
    # On several workers `fit` of Keras 3 has two limits (keras#20585; still in 3.15.1). A batch must be a single
    # tensor, so there are no targets and the model adds the loss itself. And the results of a step must have an axis,
    # over which Keras takes their mean.
    class MeanAsLoss(keras.layers.Layer):  # type: ignore[name-defined]
        def call(self, outputs: tf.Tensor) -> tf.Tensor:
            self.add_loss(tf.reduce_mean(outputs))
            return outputs

    class Model(keras.Model):  # type: ignore[name-defined]
        def train_step(self, data: tf.Tensor) -> dict[str, tf.Tensor]:
            return {name: tf.reshape(result, [1]) for name, result in super().train_step(data).items()}

    x = keras.Input([1])
    rows = keras.layers.Embedding(2, 1, embeddings_initializer="ones")(x > 0)
    outputs = keras.layers.Dense(1, kernel_initializer="ones")(x) + keras.layers.Flatten()(rows) * x
    return Model(x, MeanAsLoss()(outputs))


def on_workers() -> list[tuple[str, str]]:
    """Return the hosts and the scenarios that workers run, each of which takes a second or two."""
    return [
        (name, scenario)
        for name in replicated_hosts()
        if name not in {"v1 graph", "v1 eager"} and "compiled" not in name
        for scenario in ("spikes of sums", "micro-batch dropped")
        if REPLICATED[scenario].runs_on(name)
    ]


def _strategy(name: str) -> tf.distribute.Strategy:
    if name == "workers":
        return tf.distribute.MultiWorkerMirroredStrategy()
    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
    return tf.distribute.MirroredStrategy(["cpu:0", "cpu:1"], cross_device_ops=tf.distribute.ReductionToOneDevice())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kerases", type=lambda names: names.split(","), help="keras, tf_keras, or keras,tf_keras")
    parser.add_argument("strategy", choices=["mirrored", "workers"])
    parser.add_argument("wrapper", choices=["ours", "stock"])
    parser.add_argument("overflow", choices=[*OVERFLOWS, "random"])
    ways = (
        'by a loop, or `fit`; "compiled" is a loop whose updates XLA compiles, and "legacy" a loop with a legacy '
        'optimizer, which only Keras 2 has; "scenarios" are those of tests/contract'
    )
    parser.add_argument("ways", choices=["loop", "fit", "compiled", "legacy", "scenarios"], nargs="+", help=ways)
    add_options(parser)
    args = parser.parse_args()

    strategy = _strategy(args.strategy)
    if "scenarios" in args.ways:
        args.ways.remove("scenarios")
        for name, scenario in on_workers():
            host = replicated_hosts()[name].make(STRUCTURE, Rule(), REPLICATED[scenario].settings, strategy=strategy)
            for state in checks.train(host, REPLICATED[scenario].steps()):
                title = f"STATE scenarios/{name}/{scenario}"
                print(title, json.dumps(as_json(state)), flush=True)  # noqa: T201 - a command line prints
    trainings = [
        (keras, way)
        for keras, way in itertools.product(map(importlib.import_module, args.kerases), args.ways)
        if way != "legacy" or not keras.__version__.startswith("3.")
    ]
    for number, (keras, way) in enumerate(trainings, start=1):
        # In the last training checkpoints are saved, and a process may die.
        _train(keras, strategy, way, args, is_last=number == len(trainings))


def _train(
    keras: ModuleType, strategy: tf.distribute.Strategy, way: str, args: argparse.Namespace, *, is_last: bool
) -> None:
    stock = functools.partial(keras.mixed_precision.LossScaleOptimizer, initial_scale=1024, dynamic_growth_steps=2)
    wrap = {"ours": ours, "stock": stock}[args.wrapper]
    if way == "compiled":
        wrap = functools.partial(wrap, jit_compile=True)
    training = ReplicaTraining(keras, strategy, wrap, legacy=way == "legacy")
    if args.restore:
        training.checkpoint.restore(args.restore)
    unscale = not hasattr(training.opt, "scale_loss")
    fed = inputs(args.overflow)[args.first : args.last]
    rank = strategy.cluster_resolver.task_id if args.strategy == "workers" else 0
    states = training.by_fit(fed) if way == "fit" else training.by_loop(fed, unscale=unscale)
    for taken, state in enumerate(states, start=1):
        # Every worker must take part in saving, and each writes to its own directory.
        if args.save and is_last:
            training.checkpoint.save(args.save / str(rank) / "checkpoint")
        print(f"STATE {keras.__name__}/{way}", json.dumps(state), flush=True)  # noqa: T201 - a command line prints
        if is_last:
            die_after(args, taken, rank)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that all programs of these trainings share."""
    parser.add_argument("--first", type=int, default=0, help="the first step")
    parser.add_argument("--last", type=int, help="the step before which to stop")
    parser.add_argument("--die", type=int, help="after how many steps the second process dies")
    parser.add_argument("--restore", help="a checkpoint to start from")
    parser.add_argument("--save", type=Path, help="a directory for a checkpoint after each step")


def die_after(options: argparse.Namespace, taken: int, rank: int) -> None:
    """End the second process at once, without any clean-up, when it has taken `options.die` steps."""
    if taken == options.die and rank == 1:
        os._exit(3)


if __name__ == "__main__":
    main()
