"""Trains a net of blocks in each of several ways to save memory, and measures the memory and the time of the steps."""

import contextlib
import re
import statistics
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import keras
import numpy as np
import tensorflow as tf

import tfmp
from benchmarks.harness import block_nets, contest, peak_memory

#: Micro-batches of a step, for the contenders that accumulate gradients.
MICRO_BATCHES = 4

#: Steps whose time is not counted: the first one traces and compiles.
_WARM_UP = 2

_SCALE = 2.0**10


class Case(NamedTuple):
    """What is trained.

    Attributes:
        model: The net, a key of `block_nets.NETS`.
        policy: The dtype policy.
        mode: "graph", "xla" or "eager".
        size: The size, a key of `block_nets.SIZES`.
        steps: The number of steps, at least 3: the first two are not timed.
    """

    model: str
    policy: str
    mode: str
    size: str
    steps: int

    def __str__(self) -> str:
        """Return the heading of the case."""
        return f"{self.model}, {self.policy}, {self.mode}"


class Way(NamedTuple):
    """A way to save memory.

    Attributes:
        wrap: What the net calls instead of each block.
        micro_batches: The micro-batches that make a step.
        base: The contender whose weights this one should end with. A window of micro-batches has other masks of Dropout
            and other statistics of BatchNormalization than one large batch.
        scope: Whether the net is made in a `keras.RematScope` that names its blocks.
    """

    wrap: block_nets.Wrap = lambda block: block
    micro_batches: int = 1
    base: str = "plain"
    scope: bool = False


class _ByRecomputeGrad(keras.layers.Layer):
    """Calls a block in `tf.recompute_grad`."""

    def __init__(self, block: keras.layers.Layer) -> None:
        super().__init__(name=block.name)
        self.block = block

    def build(self, input_shape: tuple[int | None, ...]) -> None:
        """Build the block, which could make no variables in its second run.

        Args:
            input_shape: The shape of its inputs.
        """
        self.block(keras.KerasTensor(input_shape, self.compute_dtype))

    def call(self, inputs: Any, training: bool | None = None) -> Any:  # noqa: ANN401 - a tensor of any kind
        """Return the block's results.

        Args:
            inputs: What the block takes.
            training: Whether the model is trained.
        """
        return tf.recompute_grad(lambda x: self.block(x, training=training))(inputs)


#: The contenders. "plain" is the first: the others are compared with it.
WAYS = {
    "plain": Way(),
    "Recompute": Way(tfmp.Recompute),
    "accumulation": Way(micro_batches=MICRO_BATCHES),
    "both": Way(tfmp.Recompute, MICRO_BATCHES, base="accumulation"),
    "keras.RematScope": Way(scope=True),
    "tf.recompute_grad": Way(_ByRecomputeGrad),
}

#: What a process hands back: "weights" before and after the training, and figures that can be written as JSON; or an
#: "error".
Measured: TypeAlias = dict[str, Any]


def measure(name: str, case: Case) -> Measured:
    """Train a net in a new process, and return what was measured there.

    Args:
        name: The contender, a key of `WAYS`.
        case: What is trained.
    """
    return peak_memory.in_fresh_process(train, name, case)


def train(name: str, case: Case) -> Measured:
    """Train a net in this process, which should do nothing else, and measure it.

    Args:
        name: The contender, a key of `WAYS`.
        case: What is trained.
    """
    # TensorFlow warns of an optimizer's function that is traced twice, and of what the contenders cannot do.
    tf.get_logger().setLevel("ERROR")
    try:
        return _train(WAYS[name], case)
    # What a contender raises is a result.
    except Exception as error:
        return {"error": f"{type(error).__name__}: {_essence(str(error))}"}


def _essence(message: str) -> str:
    """Return the line of an error's message that says what is wrong.

    Example:
        >>> _essence("Exception encountered when calling A.call().\\n\\n\\x1b[1mNo.\\x1b[0m\\n\\nArguments received by A:\\n  x=1")
        'No.'
    """
    said = re.sub(r"\x1b\[\d*m", "", message.partition("Arguments received by")[0])
    return said.strip().splitlines()[-1] if said.strip() else ""


def _train(way: Way, case: Case) -> Measured:
    step, weights = _training(way, case)
    first = weights()
    seconds: list[float] = []

    def steps() -> None:
        seconds.extend(contest.seconds_of(step) for _ in range(case.steps))

    allocator = peak_memory.Allocator()
    process = peak_memory.during(steps)
    return {
        "process_bytes": process,
        "allocator_bytes": allocator.peak(),
        "first_step_seconds": seconds[0],
        "step_seconds": statistics.median(seconds[_WARM_UP:]),
        "weights": [first, weights()],
    }


def _training(way: Way, case: Case) -> tuple[Callable[[], object], Callable[[], list[np.ndarray]]]:
    """Return a function that takes a step, and one that returns the weights and statistics."""
    size = block_nets.SIZES[case.size][case.model]
    keras.utils.set_random_seed(0)
    keras.config.set_dtype_policy(case.policy)
    names = [f"block_{index}" for index in range(size.blocks)]
    scope = keras.RematScope(mode="list_of_layers", layer_names=names) if way.scope else contextlib.nullcontext()
    with scope:
        model = block_nets.NETS[case.model](size, way.wrap)
    # All contenders scale the loss, in float32 too: a power of two changes no digit. And not by Adam, which makes much
    # of differences in rounding.
    opt = tfmp.LossScaleOptimizer(
        keras.optimizers.SGD(0.01, momentum=0.9),
        tfmp.FixedLossScaleManager(_SCALE),
        accumulation_steps=way.micro_batches,
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(opt, loss, jit_compile=case.mode == "xla", run_eagerly=case.mode == "eager")
    opt.build(model.trainable_variables)
    inputs, classes = block_nets.batch(case.model, size)
    parts = [np.split(array, way.micro_batches) for array in (inputs, classes)]

    def step() -> None:
        for part in zip(*parts, strict=True):
            model.train_on_batch(*part)

    return step, model.get_weights
