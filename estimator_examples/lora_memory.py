"""Fine-tune a language model of keras-hub with LoRA, in less and less memory, and compare the results.

Run `python -m estimator_examples.lora_memory`.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import sys
import time
import warnings
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import keras
import numpy as np
import tensorflow as tf

import tfmp
from benchmarks.harness import peak_memory
from estimator_examples import arguments

#: The tokens are the numbers below this one, and after them the operations.
NUMBERS = 32
#: What each operation adds to a number: what the base model learns, and what the fine-tuned models do.
BASE_STRIDES = (1, 2, 3, 5)
NEW_STRIDES = (2, 3, 5, 1)

HEADS = 4
LEARNING_RATES = MappingProxyType({"base": 3e-3, "all weights": 3e-3, "LoRA": 2e-2})
TEST_BATCHES = 4
#: The first steps of a model, which are left out of the medians.
WARM_UP = 3


@dataclasses.dataclass(frozen=True)
class Way:
    """A way to fine-tune: which weights, at which level of precision, and with which savings of memory."""

    lora: bool = True
    level: str = "O2"
    recompute: bool = False
    half_state: bool = False


WAYS: Mapping[str, Way] = MappingProxyType(
    {
        "all weights, float32": Way(lora=False, level="O0"),
        "LoRA, float32": Way(level="O0"),
        "LoRA, O2": Way(),
        "LoRA, O2, recomputed": Way(recompute=True),
        "LoRA, O2, recomputed, half state": Way(recompute=True, half_state=True),
        "LoRA, O3, recomputed": Way(level="O3", recompute=True),
    }
)


class Batch(NamedTuple):
    """Calculations, each of which alternates numbers and operations.

    Attributes:
        inputs: What keras-hub's model takes.
        labels: The token after each input.
        weights: 1 where the label is a number, which can be predicted, and 0 where it is an operation, which cannot.
    """

    inputs: dict[str, np.ndarray]
    labels: np.ndarray
    weights: np.ndarray


@dataclasses.dataclass
class Training:
    """A model that is fine-tuned, and what was measured.

    Attributes:
        model: The compiled model.
        optimizer: The optimizer without loss scaling.
        seconds: The time of each step.
        peaks: The most memory that each step had in use beyond what was in use before it, in bytes; 0 if TensorFlow's
            allocator has no figures, or counts no tensor as small as those of the model.
    """

    model: keras.Model
    optimizer: keras.optimizers.Optimizer
    seconds: list[float] = dataclasses.field(default_factory=list)
    peaks: list[int] = dataclasses.field(default_factory=list)

    def step(self, batch: Batch) -> None:
        """Take a step, and measure it."""
        allocator = peak_memory.Allocator()
        # Right after the reset, the peak is what is in use: weights and slots.
        before, start = allocator.peak(), time.perf_counter()
        self.model.train_on_batch(*batch)
        self.seconds.append(time.perf_counter() - start)
        self.peaks.append((allocator.peak() or 0) - (before or 0))

    def trained_weights(self) -> int:
        """Return the number of weights that are trained."""
        return sum(int(np.prod(weight.shape)) for weight in self.model.trainable_variables)

    def weight_bytes(self) -> int:
        """Return the bytes of all weights."""
        return _bytes(self.model.weights)

    def state_bytes(self) -> int:
        """Return the bytes of the optimizer's slots."""
        return _bytes([each for each in self.optimizer.variables if len(each.shape) > 0])


def _bytes(variables: Sequence[keras.Variable]) -> int:
    return sum(int(np.prod(each.shape)) * tf.as_dtype(each.dtype).size for each in variables)


def main(argv: Sequence[str] | None = None) -> int:
    """Train a base model, fine-tune it in each way, and print the comparison.

    Args:
        argv: The command-line arguments; None means those of the process.

    Returns:
        The exit status.
    """
    options = _parser().parse_args(argv)
    start = time.perf_counter()
    try:
        import keras_hub  # noqa: F401
        from tqdm import tqdm
    except ImportError as error:
        print(
            "lora_memory: error: this example needs keras-hub and tqdm: "
            f"`pip install keras-hub==0.32.0 keras==3.15.1 tensorflow-cpu==2.21.0 tqdm` ({error}).",
            file=sys.stderr,
        )
        return 2
    # TensorFlow takes the functions of several models for one that is traced again and again, and warns.
    tf.get_logger().setLevel("ERROR")
    keras.utils.set_random_seed(options.seed)
    rng = np.random.default_rng(options.seed)
    base = language_model(options)
    compiled(base, keras.optimizers.Adam(LEARNING_RATES["base"]))
    for _ in tqdm(range(options.base_steps), desc="base model", unit="step", leave=False):
        base.train_on_batch(*drawn(BASE_STRIDES, options, rng))
    tests = {
        strides: [drawn(strides, options, rng) for _ in range(TEST_BATCHES)] for strides in (BASE_STRIDES, NEW_STRIDES)
    }
    print(f"Llama of {base.count_params()} weights, batches of {options.batch_size} rows of {options.length} tokens")
    for task, strides in (("task that it has learned", BASE_STRIDES), ("new task", NEW_STRIDES)):
        loss, accuracy = scores(base, tests[strides])
        print(f"  {task:24}   loss {loss}, accuracy {accuracy}")
    print(f"\nFine-tuned on the new task, {options.steps} steps", flush=True)
    trainings = {name: prepared(way, base, options) for name, way in WAYS.items()}
    with tqdm(total=options.steps * len(trainings), desc="fine-tuning", unit="step", leave=False) as progress:
        for _ in range(options.steps):
            batch = drawn(NEW_STRIDES, options, rng)
            # In turns, so that another program that uses the machine for a while does not slow down only one of them.
            for training in trainings.values():
                training.step(batch)
                progress.update()
    print(table(trainings, tests[NEW_STRIDES]))
    print(f"\n{time.perf_counter() - start:.0f} seconds")
    return 0


def language_model(options: argparse.Namespace) -> keras.Model:
    """Return a small Llama of random weights, in float32."""
    import keras_hub

    backbone = keras_hub.models.LlamaBackbone(
        vocabulary_size=NUMBERS + len(BASE_STRIDES),
        num_layers=options.layers,
        num_query_heads=HEADS,
        num_key_value_heads=HEADS,
        hidden_dim=options.width,
        intermediate_dim=4 * options.width,
    )
    return keras_hub.models.LlamaCausalLM(backbone)


def compiled(model: keras.Model, optimizer: keras.optimizers.Optimizer) -> None:
    """Compile a model with the loss of a language model."""
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="mean_with_sample_weight")
    # Compiling by XLA would take longer than these few steps.
    model.compile(optimizer, loss, weighted_metrics=["accuracy"], jit_compile=False)


def prepared(way: Way, base: keras.Model, options: argparse.Namespace) -> Training:
    """Return a copy of the base model that is ready to be fine-tuned in a way."""
    keras.utils.set_random_seed(options.seed)
    # Only a model that is made at O3 has weights in float16.
    with tfmp.precision("O3" if way.level == "O3" else "O0"), warnings.catch_warnings():
        # keras-hub compiles a task where it is made, with an optimizer that does not scale the loss.
        warnings.filterwarnings("ignore", "the model .* computes in float16", UserWarning)
        model = language_model(options)
    model.set_weights(base.get_weights())
    if way.lora:
        model.backbone.enable_lora(options.rank)
    adam = keras.optimizers.Adam(LEARNING_RATES["LoRA" if way.lora else "all weights"])
    if way.half_state:
        adam = tfmp.half_state(adam)
    # Before the level is set, so that the model has an optimizer that scales the loss by then.
    compiled(model, adam if way.level == "O0" else tfmp.LossScaleOptimizer(adam))
    if way.level == "O2":
        tfmp.set_precision(model, "O2")
    if way.recompute:
        model = tfmp.recompute_layers(model, r".*/transformer_layer_\d+")
    model.optimizer.build(model.trainable_variables)
    return Training(model, adam)


def drawn(strides: Sequence[int], options: argparse.Namespace, rng: np.random.Generator) -> Batch:
    """Draw a batch of calculations: a number, an operation, the number that it leads to, and so on."""
    shape = options.batch_size, options.length // 2
    operations = rng.integers(len(strides), size=shape)
    firsts = rng.integers(NUMBERS, size=[options.batch_size, 1])
    numbers = (firsts + np.cumsum(np.asarray(strides)[operations], axis=1)) % NUMBERS
    tokens = np.empty([options.batch_size, 2 * shape[1] + 1], np.int32)
    tokens[:, ::2] = np.concatenate([firsts, numbers], axis=1)
    tokens[:, 1::2] = NUMBERS + operations
    labels = tokens[:, 1:]
    inputs = {"token_ids": tokens[:, :-1], "padding_mask": np.ones_like(labels)}
    return Batch(inputs, labels, np.float32(labels < NUMBERS))


def scores(model: keras.Model, tests: Sequence[Batch]) -> tuple[str, str]:
    """Return the loss and the accuracy of predicted numbers."""
    results = [model.test_on_batch(*batch, return_dict=True) for batch in tests]
    # All batches have as many numbers.
    loss, accuracy = (statistics.mean(result[name] for result in results) for name in ("loss", "accuracy"))
    return f"{loss:.3f}", f"{100 * accuracy:.1f} %"


def table(trainings: Mapping[str, Training], tests: Sequence[Batch]) -> str:
    """Return the comparison as text.

    Args:
        trainings: The trainings by the names of their ways.
        tests: Batches that no model was trained on.
    """
    heads = ("trained", "weights KiB", "state KiB", "step MiB", "loss", "accuracy", "ms a step")
    lines = [" " * 34 + "".join(f"{head:>12}" for head in heads)]
    for name, training in trainings.items():
        # The first steps trace the model, and make what is kept for later steps.
        memory, seconds = (statistics.median(each[WARM_UP:] or each) for each in (training.peaks, training.seconds))
        cells = (
            f"{training.trained_weights()}",
            f"{training.weight_bytes() / 2**10:.0f}",
            f"{training.state_bytes() / 2**10:.0f}",
            f"{memory / 2**20:.1f}" if memory else "unknown",
            *scores(training.model, tests),
            f"{1000 * seconds:.0f}",
        )
        lines.append(f"  {name:32}" + "".join(f"{cell:>12}" for cell in cells))
    return "\n".join(lines)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="lora_memory",
        usage="python -m estimator_examples.lora_memory [options]",
        description="Fine-tune a small Llama of keras-hub with LoRA: in float32, at O2, recomputed, with half state.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument(
        "--base-steps", type=arguments.positive_int, default=200, help="steps that train the base model"
    )
    parser.add_argument("--steps", type=arguments.positive_int, default=100, help="steps of each fine-tuning")
    parser.add_argument("--rank", type=arguments.positive_int, default=8, help="rank of LoRA's matrices")
    parser.add_argument("--layers", type=arguments.positive_int, default=4, help="layers of the model")
    parser.add_argument("--width", type=arguments.positive_int, default=64, help="features of a token, a multiple of 8")
    parser.add_argument("--length", type=arguments.positive_int, default=64, help="tokens of a row")
    parser.add_argument("--batch-size", type=arguments.positive_int, default=32, help="rows of a batch")
    parser.add_argument("--seed", type=arguments.count, default=0, help="seed of weights and batches")
    return parser


if __name__ == "__main__":
    sys.exit(main())
