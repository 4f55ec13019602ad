"""Trains a net by a recipe for several seeds, and measures the accuracy, the memory and the time of a step."""

import functools
import gc
import statistics
from typing import Any, NamedTuple, TypeAlias

import keras
import numpy as np
import tensorflow as tf

import tfmp
from benchmarks.harness import contest, peak_memory
from benchmarks.recipes import nets
from benchmarks.recipes.tasks import TASKS, Examples, Task

#: Micro-batches of a step, for the recipes that accumulate gradients.
MICRO_BATCHES = 4

_WARM_UP = 0.1


class Cell(NamedTuple):
    """A net and a recipe for it.

    Attributes:
        net: The net, a key of the tasks.
        precision: A key of `PRECISIONS`.
        way: A key of `WAYS`.
        state: One of `STATES`.
    """

    net: str
    precision: str
    way: str
    state: str

    def __str__(self) -> str:
        """Return the name of the cell."""
        return f"{self.net}, {self.precision}, {self.way}, {self.state} state"


class Precision(NamedTuple):
    """What a net is computed in.

    Attributes:
        level: The level of precision.
        scaled: Whether tfmp scales the loss, with its defaults.
    """

    level: str
    scaled: bool = False


class Way(NamedTuple):
    """A way to save memory.

    Attributes:
        recompute: Whether the blocks are recomputed.
        micro_batches: The micro-batches that make a step.
    """

    recompute: bool = False
    micro_batches: int = 1


PRECISIONS = {
    "float32": Precision("O0"),
    "float16-unscaled": Precision("O2"),
    "float16-tfmp": Precision("O2", scaled=True),
    "bfloat16": Precision("O2-bfloat16"),
}

WAYS = {
    "plain": Way(),
    "accumulation": Way(micro_batches=MICRO_BATCHES),
    "recomputation": Way(recompute=True),
    "both": Way(recompute=True, micro_batches=MICRO_BATCHES),
}

#: What the moments of Adam are stored in.
STATES = ("float32", "half")

#: The figures of a cell, as JSON can hold them; or an "error".
Measured: TypeAlias = dict[str, Any]


def measure(cell: Cell, size: str, seeds: int) -> Measured:
    """Train by a recipe for several seeds.

    The step is traced once: each training begins with other weights, and with the optimizer as it was at first.

    Args:
        cell: The net and the recipe.
        size: The size, a key of the tasks.
        seeds: The number of trainings.
    """
    # TensorFlow keeps some constants of what was traced before: they are no memory of this cell.
    gc.collect()
    before = peak_memory.Allocator().peak()
    training = Training(cell, size)
    trained = [training.run(seed) for seed in range(seeds)]
    return {
        "accuracies": [each.accuracy for each in trained],
        "peak_bytes": [each.peak - before for each in trained if each.peak is not None and before is not None],
        "state_bytes": training.state_bytes(),
        "step_seconds": [each.step_seconds for each in trained],
    }


class Trained(NamedTuple):
    """The result of a training.

    Attributes:
        accuracy: The part of the held-out examples that are classified correctly, in %.
        peak: The peak memory in bytes; None if it is not known.
        step_seconds: The median time of a step.
    """

    accuracy: float
    peak: int | None
    step_seconds: float


class Training:
    """A net and a step by a recipe, which is traced once for the trainings of all seeds.

    Args:
        cell: The net and the recipe.
        size: The size, a key of the tasks.
    """

    def __init__(self, cell: Cell, size: str) -> None:
        self._task = TASKS[size][cell.net]
        self._training, self._held_out = self._task.examples()
        way = WAYS[cell.way]
        self._micro_batches = way.micro_batches
        self._model = nets.prepared(self._task.build(0), PRECISIONS[cell.precision].level, way.recompute)
        self._optimizer = optimizer(cell, self._task.steps, self._task.learning_rate)
        self._optimizer.build(self._model.trainable_variables)
        self._first_state = [variable.numpy() for variable in self._optimizer.variables]
        self._micro_step = tf.function(self._untraced_micro_step)
        # The first step also traces.
        self._step(next(self._task.batches(self._training, 0)))

    def run(self, seed: int) -> Trained:
        """Train from the weights of a seed.

        Args:
            seed: The seed of the weights and of the batches.
        """
        self._model.set_weights(_initial_weights(self._task, seed))
        for variable, value in zip(self._optimizer.variables, self._first_state, strict=True):
            variable.assign(value)
        gc.collect()
        allocator = peak_memory.Allocator()
        seconds = [
            contest.seconds_of(functools.partial(self._step, batch))
            for batch in self._task.batches(self._training, seed)
        ]
        peak = allocator.peak()
        return Trained(self._accuracy(), peak, statistics.median(seconds))

    def state_bytes(self) -> int:
        """Return the memory of the optimizer's variables."""
        return sum(variable.numpy().nbytes for variable in self._optimizer.variables)

    def _step(self, batch: Examples) -> None:
        for inputs, classes in zip(*(np.split(part, self._micro_batches) for part in batch), strict=True):
            loss = self._micro_step(inputs, classes)
        # The step is done when its loss can be read: on a GPU the call returns before.
        loss.numpy()

    def _untraced_micro_step(self, inputs: tf.Tensor, classes: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = self._task.loss(inputs, classes, self._model(inputs, training=True))
            scaled = self._optimizer.scale_loss(loss)
        variables = self._model.trainable_variables
        self._optimizer.apply_gradients(zip(tape.gradient(scaled, variables), variables, strict=True))
        return loss

    def _accuracy(self) -> float:
        logits = self._task.logits(self._model(self._held_out.inputs, training=False))
        predicted = tf.argmax(tf.cast(logits, tf.float32), axis=-1)
        return 100 * float(np.mean(predicted.numpy() == self._held_out.classes))


# Making a model takes as long as many steps.
@functools.lru_cache(maxsize=16)
def _initial_weights(task: Task, seed: int) -> list[np.ndarray]:
    return task.build(seed).get_weights()


def optimizer(cell: Cell, steps: int, learning_rate: float) -> keras.optimizers.Optimizer:
    """Return Adam as a recipe has it.

    Args:
        cell: The recipe.
        steps: The number of steps, in which the learning rate rises and falls to 0.
        learning_rate: The highest learning rate.
    """
    rising = max(1, int(_WARM_UP * steps))
    schedule = keras.optimizers.schedules.CosineDecay(
        0.0, max(1, steps - rising), warmup_target=learning_rate, warmup_steps=rising
    )
    adam = keras.optimizers.Adam(schedule)
    if cell.state == "half":
        adam = tfmp.half_state(adam, momentum="bfloat16", velocity="bfloat16", rounding="stochastic")
    micro_batches = WAYS[cell.way].micro_batches
    if PRECISIONS[cell.precision].scaled:
        return tfmp.LossScaleOptimizer(adam, accumulation_steps=micro_batches)
    # A scale of 1 scales nothing: here the wrapper only accumulates.
    if micro_batches == 1:
        return adam
    return tfmp.LossScaleOptimizer(adam, tfmp.FixedLossScaleManager(1), accumulation_steps=micro_batches)
