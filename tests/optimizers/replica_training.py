"""What trainings on several replicas share: inputs, scenarios, options of programs; and a model that `fit` trains."""

import argparse
import math
import os
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, TypeAlias

import numpy as np
import tensorflow as tf
from faults import healthy
from kit.keras_hosts import of_tensorflow
from kit.oracle import Rule
from kit.structures import Fed
from scenarios import REPLICATED, Scenario

import tfmp

#: The values of the variables on each replica of this process: a list of values for each replica.
State: TypeAlias = list[list[Any]]


def inputs() -> np.ndarray:
    """Return the inputs of two replicas in 200 steps, of which each replica overflows in a fifth on average.

    The finite ones are powers of two, so sums are exact.
    """
    chances = {0.25: 0.3, 0.5: 0.3, -1.0: 0.2, math.inf: 0.1, math.nan: 0.1}
    return np.random.default_rng(0).choice(list(chances), [200, 2], p=list(chances.values()))


def _random() -> Scenario:
    """Return a scenario in which each of two replicas often overflows, and the scale often changes."""

    def fed(step: int, place: int, value: float) -> Fed:
        faulty = {} if math.isfinite(value) else {"kernel": np.float32([0.5, value, 0])}
        return {**healthy(step % 8, place), **faulty}

    steps = [[fed(step, *each) for each in enumerate(row)] for step, row in enumerate(inputs()[:60])]
    # At the highest scale the sum of two gradients fits into float16.
    return Scenario(steps, (2, 14), rule=Rule(256, 2, 2, max_loss_scale=4096))


#: What two processes are fed.
SCENARIOS = REPLICATED | {"random": _random()}


def ours(inner_optimizer: Any, **options: Any) -> tfmp.LossScaleOptimizer:
    """Wrap an optimizer in tfmp's wrapper, with a manager whose scale changes often."""
    manager = tfmp.ExponentialUpdateLossScaleManager(1024, 2, decr_every_n_nan_or_inf=2, decr_ratio=0.5)
    return tfmp.LossScaleOptimizer(inner_optimizer, manager, **options)


def values(strategy: tf.distribute.Strategy, variables: list[Any]) -> State:
    """Return the variables' values on each replica of this process."""
    parts = map(strategy.experimental_local_results, map(of_tensorflow, variables))
    return [[part.numpy().tolist() for part in replica] for replica in zip(*parts, strict=True)]


class FitOnReplicas:
    """A model with a kernel, whose gradient is the mean input, an embedding with a sparse gradient, and a bias.

    Each of two replicas of the strategy gets one input; a single replica gets both.
    """

    def __init__(self, keras: ModuleType, strategy: tf.distribute.Strategy, wrap: Callable[[Any], Any] = ours) -> None:
        self._keras, self._strategy = keras, strategy
        with strategy.scope():
            self.model = _model(keras)
            self.opt = wrap(keras.optimizers.Adam(0.125))
            self.model.compile(self.opt)

    def train(self, inputs: np.ndarray) -> list[State]:
        """Train, and return the values of the weights and of the optimizer's variables after each step."""

        def note(batch: int, logs: Any) -> None:
            states.append(values(self._strategy, [*self.model.weights, *self.opt.variables]))

        # `experimental_distribute_dataset` would not let the test decide which worker gets which row.
        def of_process(context: tf.distribute.InputContext) -> tf.data.Dataset:
            rows = tf.data.Dataset.from_tensor_slices(np.float32(inputs).reshape(-1, 1))
            rows = rows.shard(context.num_input_pipelines, context.input_pipeline_id)
            return rows.batch(context.get_per_replica_batch_size(inputs.shape[1]))

        states: list[State] = []
        settings = {"steps_per_epoch": len(inputs), "shuffle": False, "verbose": 0}
        callbacks = [self._keras.callbacks.LambdaCallback(on_train_batch_end=note)]
        rows = self._strategy.distribute_datasets_from_function(of_process)
        self.model.fit(rows, callbacks=callbacks, **settings)
        return states


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


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that all programs of trainings in several processes share."""
    parser.add_argument("--first", type=int, default=0, help="the first step")
    parser.add_argument("--last", type=int, help="the step before which to stop")
    parser.add_argument("--die", type=int, help="after how many steps the second process dies")
    parser.add_argument("--restore", type=Path, help="a directory with a checkpoint to start from")
    parser.add_argument("--save", type=Path, help="a directory for a checkpoint after each step")


def die_after(options: argparse.Namespace, taken: int, rank: int) -> None:
    """End the second process at once, without any clean-up, when it has taken `options.die` steps."""
    if taken == options.die and rank == 1:
        os._exit(3)
