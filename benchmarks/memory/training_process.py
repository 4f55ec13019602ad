"""Trains a net of blocks in each of several ways to save memory, and measures the memory and the time of the steps."""

import contextlib
import multiprocessing
import re
from collections.abc import Callable
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any, NamedTuple, TypeAlias

import keras
import numpy as np
import tensorflow as tf

import tfmp
from benchmarks.harness import contest, peak_memory
from benchmarks.memory import nets

#: Micro-batches of a step, for the contenders that accumulate gradients.
MICRO_BATCHES = 4

_SCALE = 2.0**10


class Case(NamedTuple):
    """What is trained.

    Attributes:
        model: The net, a key of `nets.NETS`.
        policy: The dtype policy.
        mode: "graph", "xla" or "eager".
        size: The size, a key of `nets.SIZES`.
        steps: The number of steps after which weights are compared.
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

    wrap: nets.Wrap = lambda block: block
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
    # What differs between two runs of the same: TensorFlow's sums on several threads have no fixed order.
    "plain, again": Way(),
    "Recompute": Way(tfmp.Recompute),
    "accumulation": Way(micro_batches=MICRO_BATCHES),
    "both": Way(tfmp.Recompute, MICRO_BATCHES, base="accumulation"),
    "keras.RematScope": Way(scope=True),
    "tf.recompute_grad": Way(_ByRecomputeGrad),
}

#: What a process hands back: "weights" before and after the training, and figures that can be written as JSON; or an
#: "error".
Measured: TypeAlias = dict[str, Any]


class TrainingProcess:
    """A process of its own, which trains a net in one of the ways, and then takes more steps when it is asked to.

    Args:
        name: The contender, a key of `WAYS`.
        case: What is trained.

    Attributes:
        measured: What was measured.
    """

    def __init__(self, name: str, case: Case) -> None:
        # A forked process would have the memory of this one.
        spawning = multiprocessing.get_context("spawn")
        self._connection, theirs = spawning.Pipe()
        self._process = spawning.Process(target=_serve, args=(theirs, name, case), daemon=True)
        self._process.start()
        # So that the end of the process ends the connection.
        theirs.close()
        try:
            self.measured: Measured = self._connection.recv()
        except EOFError:
            self._process.join()
            self.measured = {"error": f"the process ended with {self._process.exitcode}, perhaps for want of memory"}

    def __enter__(self) -> "TrainingProcess":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._connection.close()
        self._process.join()

    def step(self) -> float:
        """Take one more step, and return its seconds."""
        self._connection.send("step")
        return float(self._connection.recv())


def _serve(connection: Connection, name: str, case: Case) -> None:
    # TensorFlow warns of what some contenders cannot do.
    tf.get_logger().setLevel("ERROR")
    # What a contender raises is a result.
    try:
        step, weights = training(WAYS[name], case)
        connection.send(measure(step, weights, case.steps))
    except Exception as error:
        connection.send({"error": f"{type(error).__name__}: {_essence(str(error))}"})
        return
    with contextlib.suppress(EOFError):
        while connection.recv():
            connection.send(contest.seconds_of(step))


def measure(step: Callable[[], object], weights: Callable[[], list[np.ndarray]], steps: int) -> Measured:
    """Train in this process, which should have done nothing else before, and measure the memory.

    Args:
        step: A function that takes a step.
        weights: A function that returns the weights.
        steps: The number of steps.
    """
    first = weights()
    seconds: list[float] = []
    allocator = peak_memory.Allocator()
    process = peak_memory.during(lambda: seconds.extend(contest.seconds_of(step) for _ in range(steps)))
    return {
        "process_bytes": process,
        "allocator_bytes": allocator.peak(),
        "first_step_seconds": seconds[0],
        "weights": [first, weights()],
    }


def training(way: Way, case: Case) -> tuple[Callable[[], object], Callable[[], list[np.ndarray]]]:
    """Return a function that takes a step, and one that returns the weights and statistics.

    Args:
        way: The way to save memory.
        case: What is trained.
    """
    size = nets.SIZES[case.size][case.model]
    keras.utils.set_random_seed(0)
    keras.config.set_dtype_policy(case.policy)
    names = [f"block_{index}" for index in range(size.blocks)]
    scope = keras.RematScope(mode="list_of_layers", layer_names=names) if way.scope else contextlib.nullcontext()
    with scope:
        model = nets.NETS[case.model](size, way.wrap)
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
    inputs, classes = nets.batch(case.model, size)
    parts = [np.split(array, way.micro_batches) for array in (inputs, classes)]

    def step() -> None:
        for part in zip(*parts, strict=True):
            model.train_on_batch(*part)
        # The loss is there before the weights are updated.
        tf.test.experimental.sync_devices()

    return step, model.get_weights


def _essence(message: str) -> str:
    r"""Return the line of an error's message that says what is wrong.

    Examples:
        >>> _essence("Exception encountered.\n\n\x1b[1mNo.\x1b[0m\n\nArguments received by A:\n  x=1")
        'No.'
    """
    said = re.sub(r"\x1b\[\d*m", "", message.partition("Arguments received by")[0])
    return said.strip().splitlines()[-1] if said.strip() else ""
