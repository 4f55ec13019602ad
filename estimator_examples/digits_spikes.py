"""Train on scikit-learn's digits with corrupt batches, and compare skipping their steps with clipping them.

Run `python -m estimator_examples.digits_spikes`.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import tfmp
from estimator_examples import arguments, digits_session
from estimator_examples.digits_keras import CLASSES, RATIO_ON_OVERFLOW, STEPS_TO_DOUBLE, accuracy_of
from estimator_examples.digits_spikes_picture import draw

MOMENTUM = 0.9
LEARNING_RATES = MappingProxyType({"sgd": 0.05, "adam": 0.005})
#: In a picture, the accuracy is drawn every so many steps, and after each corrupt batch.
STEPS_PER_POINT = 10
CLEAN = "clean batches only"
SKIPPED = "spikes skipped"


@dataclasses.dataclass(frozen=True)
class Way:
    """A way to train: on which batches, and with which protection from the corrupt ones."""

    corrupt: bool
    clip_norm: float | None
    skips: bool


class StepRecorder(keras.callbacks.Callback):
    """Records the gradient norm and what became of each step of `fit`, and the accuracy after some steps.

    Args:
        test: The test images.
        measured: The steps after which the accuracy is measured, counted from 1.
        with_bounds: Whether the bound is recorded. Reading it takes longer than a step of the net.

    Attributes:
        accuracies: The accuracies, from 0 to 1, by step.
        norms: The norm of the gradients of each step; infinite or NaN if they overflowed.
        bounds: The bounds for all steps and for the one that would follow; infinite while there was no bound.
        skipped: The steps that were skipped as spikes.
        overflowed: The steps that were skipped because their gradients overflowed.
    """

    def __init__(self, test: digits_session.Digits, measured: set[int], *, with_bounds: bool) -> None:
        super().__init__()
        self._test = test
        self._measured = measured
        self._with_bounds = with_bounds
        self._skipped_before = 0
        self.accuracies: dict[int, float] = {}
        self.norms: list[float] = []
        self.bounds = [math.inf]
        self.skipped: set[int] = set()
        self.overflowed: set[int] = set()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:  # noqa: ANN401 - Keras' logs
        """Record them."""
        step, optimizer = batch + 1, self.model.optimizer
        self.norms.append(float(optimizer.gradient_norm))
        skipped = int(optimizer.skipped_spikes)
        if skipped > self._skipped_before:
            self.skipped.add(step)
        self._skipped_before = skipped
        if not optimizer.last_step_finite:
            self.overflowed.add(step)
        detector = optimizer.spike_detector
        if self._with_bounds and detector is not None:
            # The state is the one after this step, so this is the bound for the next step.
            self.bounds.append(float(detector.bound(detector.state_of(0).read())))
        if step in self._measured:
            self.accuracies[step] = accuracy_of(self.model, self._test)


def main(argv: Sequence[str] | None = None) -> int:
    """Train the net in each way for several seeds, and print the accuracies.

    Args:
        argv: The command-line arguments; None means those of the process.

    Returns:
        The exit status.
    """
    options = _parser().parse_args(argv)
    try:
        from tqdm import tqdm

        digits_session.load_digits(seed=0, batch_size=options.batch_size)
    except (ImportError, ValueError) as error:
        print(f"digits_spikes: error: {error}", file=sys.stderr)
        return 2
    start = time.perf_counter()
    keras.mixed_precision.set_global_policy("mixed_float16")
    print(
        f"{options.steps} steps with {options.optimizer}, {len(corrupt_steps(options))} of them with a corrupt batch. "
        f"Accuracies are means of {options.seeds} seeds, counts are sums."
    )
    reference = None
    for corruption in options.corruptions:
        runs = {} if reference is None else {CLEAN: reference}
        for name, way in ways_of(options.clip_norm).items():
            if name not in runs:
                seeds = tqdm(range(options.seeds), desc=f"{corruption}, {name}", unit="training", leave=False)
                runs[name] = [trained(way, corruption, seed, options) for seed in seeds]
        reference = runs[CLEAN]  # these trainings are the same for each corruption
        print(f"\n{table(corruption, runs, corrupt_steps(options))}", flush=True)
        if options.plot and corruption == options.corruptions[0]:
            draw({name: of_seeds[0] for name, of_seeds in runs.items()}, SKIPPED, corrupt_steps(options), options.plot)
    print(f"\n{time.perf_counter() - start:.0f} seconds")
    return 0


def ways_of(clip_norm: float) -> dict[str, Way]:
    """Return the ways to train, by their names."""
    return {
        CLEAN: Way(corrupt=False, clip_norm=None, skips=False),
        "nothing done": Way(corrupt=True, clip_norm=None, skips=False),
        f"clipped at {clip_norm:g}": Way(corrupt=True, clip_norm=clip_norm, skips=False),
        SKIPPED: Way(corrupt=True, clip_norm=None, skips=True),
        "both": Way(corrupt=True, clip_norm=clip_norm, skips=True),
    }


def trained(way: Way, corruption: str, seed: int, options: argparse.Namespace) -> StepRecorder:
    """Train a net in one way, and return what was recorded.

    The seed decides the test split, the weights, the order of the batches and the corruption, so that all ways start
    from the same weights and see the same batches.
    """
    training, test = digits_session.load_digits(seed, options.batch_size)
    keras.utils.set_random_seed(seed)
    corrupt = corrupt_steps(options)
    measured = corrupt | {options.steps}
    is_drawn = options.plot is not None and seed == 0
    if is_drawn:
        measured |= set(range(1, options.steps + 1, STEPS_PER_POINT))
    batches = stacked_batches(training, seed, options)
    if way.corrupt:
        batches = with_corruption(batches, corruption, corrupt, seed)
    recorder = StepRecorder(test, measured, with_bounds=is_drawn)
    dataset = tf.data.Dataset.from_tensor_slices((batches.images, batches.labels))
    build(way, options).fit(dataset, shuffle=False, verbose=0, callbacks=[recorder])
    return recorder


def build(way: Way, options: argparse.Namespace) -> keras.Model:
    """Build and compile the net, whose optimizer clips by global norm, skips spikes, both or neither."""
    model = keras.Sequential(
        [
            keras.Input([8, 8, 1]),
            keras.layers.Flatten(),
            keras.layers.Dense(64, activation="relu"),
            keras.layers.Dense(64, activation="relu"),
            # Keras advises to compute the logits in float32.
            keras.layers.Dense(CLASSES, dtype="float32"),
        ]
    )
    rate = options.learning_rate or LEARNING_RATES[options.optimizer]
    if options.optimizer == "sgd":
        inner = keras.optimizers.SGD(rate, momentum=MOMENTUM, global_clipnorm=way.clip_norm)
    else:
        inner = keras.optimizers.Adam(rate, global_clipnorm=way.clip_norm)
    manager = tfmp.ExponentialUpdateLossScaleManager(
        options.init_loss_scale, STEPS_TO_DOUBLE, decr_every_n_nan_or_inf=1, decr_ratio=RATIO_ON_OVERFLOW
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    optimizer = tfmp.LossScaleOptimizer(inner, manager, skip_spikes=tfmp.SpikeDetector() if way.skips else None)
    optimizer.record_gradient_norm()
    model.compile(optimizer, loss)
    return model


def corrupt_steps(options: argparse.Namespace) -> set[int]:
    """Return the steps with a corrupt batch, counted from 1."""
    firsts = range(options.every, options.steps + 1, options.every)
    steps = {step for first in firsts for step in range(first, first + options.in_a_row)}
    return {step for step in steps if options.start < step <= options.steps}


def stacked_batches(digits: digits_session.Digits, seed: int, options: argparse.Namespace) -> digits_session.Digits:
    """Return the batches of all steps, stacked along a new first axis."""
    batches = digits.batches(options.batch_size, np.random.default_rng(seed))
    chosen = [next(batches) for _ in range(options.steps)]
    return digits_session.Digits(
        np.stack([batch.images for batch in chosen]), np.stack([batch.labels for batch in chosen])
    )


def with_corruption(batches: digits_session.Digits, name: str, steps: set[int], seed: int) -> digits_session.Digits:
    """Return the batches, of which those of some steps are corrupt."""
    rng = np.random.default_rng(seed)
    images, labels = batches.images.copy(), batches.labels.copy()
    for step in sorted(steps):
        images[step - 1], labels[step - 1] = CORRUPTIONS[name](images[step - 1], labels[step - 1], rng)
    return digits_session.Digits(images, labels)


def noise(images: np.ndarray, labels: np.ndarray, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """A decoder that fails: random pixels in the range of the file, 0 to 16, which nobody divided by 16."""
    return rng.uniform(0, 16, images.shape).astype(images.dtype), labels


def byte_order(images: np.ndarray, labels: np.ndarray, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """16-bit pixels with their two bytes swapped: each small value is 256 times too large."""
    return images * 256, labels


def wrong_labels(images: np.ndarray, labels: np.ndarray, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Every label is wrong, at random."""
    return images, (labels + rng.integers(1, CLASSES, labels.shape).astype(labels.dtype)) % CLASSES


def next_labels(images: np.ndarray, labels: np.ndarray, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Every label is too large by 1, as if the classes were counted from another number."""
    return images, (labels + 1) % CLASSES


_Corruption = Callable[[np.ndarray, np.ndarray, np.random.Generator], tuple[np.ndarray, np.ndarray]]
CORRUPTIONS: Mapping[str, _Corruption] = MappingProxyType(
    {"noise": noise, "byte-order": byte_order, "labels": wrong_labels, "next-labels": next_labels}
)


def table(corruption: str, runs: Mapping[str, Sequence[StepRecorder]], corrupt: set[int]) -> str:
    """Return the results for one corruption as text.

    Args:
        corruption: Its name.
        runs: What was recorded for each seed, by the name of the way to train.
        corrupt: The steps with a corrupt batch.
    """
    heads = ("at the end", "after corrupt", "spikes skipped", "overflows", "clean skipped")
    lines = [f"{f'Corruption: {corruption}':22}" + "".join(f"{head:>16}" for head in heads)]
    for name, recorders in runs.items():
        total = 0 if name == CLEAN else len(corrupt) * len(recorders)
        cells = (
            _mean([run.accuracies[max(run.accuracies)] for run in recorders]),
            _mean([_accuracy_after(corrupt, run) for run in recorders]),
            f"{sum(len(run.skipped & corrupt) for run in recorders)} of {total}" if total else "-",
            f"{sum(len(run.overflowed & corrupt) for run in recorders)} of {total}" if total else "-",
            f"{sum(len(run.skipped - corrupt) for run in recorders)}",
        )
        lines.append(f"  {name:20}" + "".join(f"{cell:>16}" for cell in cells))
    return "\n".join(lines)


def _accuracy_after(corrupt: set[int], run: StepRecorder) -> float:
    """Return the mean accuracy right after the corrupt batches of the second half; NaN if there are none."""
    late = [run.accuracies[step] for step in corrupt if step > len(run.norms) // 2]
    return statistics.mean(late) if late else math.nan


def _mean(accuracies: Sequence[float]) -> str:
    deviation = statistics.stdev(accuracies) if len(accuracies) > 1 else 0.0
    return f"{100 * statistics.mean(accuracies):.1f} % ± {100 * deviation:.1f}"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="digits_spikes",
        usage="python -m estimator_examples.digits_spikes [options]",
        description="Train a small net in mixed_float16 with corrupt batches: nothing done, clipped, skipped, or both.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--seeds", type=arguments.positive_int, default=5, help="trainings of each kind")
    parser.add_argument("--steps", type=arguments.positive_int, default=800, help="steps of each training")
    parser.add_argument(
        "--every", type=arguments.positive_int, default=50, help="steps from one corrupt batch to the next"
    )
    parser.add_argument("--start", type=arguments.count, default=0, help="steps at the start without a corrupt batch")
    parser.add_argument("--in-a-row", type=arguments.positive_int, default=1, help="corrupt batches that come together")
    parser.add_argument(
        "--corruptions", nargs="+", choices=CORRUPTIONS, default=["noise", "labels"], help="what is wrong with a batch"
    )
    parser.add_argument("--optimizer", choices=LEARNING_RATES, default="sgd", help="SGD with momentum, or Adam")
    parser.add_argument(
        "--learning-rate", type=arguments.positive, help="learning rate; by default 0.05 for sgd, 0.005 for adam"
    )
    parser.add_argument("--clip-norm", type=arguments.positive, default=1.0, help="norm to which gradients are clipped")
    parser.add_argument("--batch-size", type=arguments.positive_int, default=64, help="number of images per step")
    parser.add_argument("--init-loss-scale", type=arguments.loss_scale, default="2**15", help="initial loss scale")
    parser.add_argument("--plot", type=Path, help="an image file to draw the first corruption in, with the first seed")
    return parser


if __name__ == "__main__":
    sys.exit(main())
