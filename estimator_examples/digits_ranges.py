"""Show on scikit-learn's digits that float16 needs a loss scale, and that `tfmp.check_precision` finds it.

Run `python -m estimator_examples.digits_ranges`.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import tfmp
from estimator_examples import arguments, digits_session

#: The weight of the loss of the digits. A second task has a small one, so that it does not disturb the first.
DIGIT_WEIGHT = 1e-3
CLASSES = 10


def main(argv: Sequence[str] | None = None) -> int:
    """Check the net, train it in three ways for several seeds, and print the accuracies.

    Args:
        argv: The command-line arguments; None means those of the process.

    Returns:
        The exit status.
    """
    options = _parser().parse_args(argv)
    try:
        from tqdm import tqdm

        training, test = digits_session.load_digits(seed=0, batch_size=1)
    except (ImportError, ValueError) as error:
        print(f"digits_ranges: error: {error}", file=sys.stderr)
        return 2
    batch, test_batch = whole_batch(training), whole_batch(test)
    report = tfmp.check_precision(build("float32", seed=0), None, [batch])
    print(report, flush=True)
    if options.plots is not None:
        options.plots.mkdir(parents=True, exist_ok=True)
        report.plot(options.plots / "ranges_before.png", loss_scale=1)
        report.plot(options.plots / "ranges_after.png")
        print(f"\nPictures: {options.plots / 'ranges_before.png'}, {options.plots / 'ranges_after.png'}")
    ways = {
        "float32": ("float32", 1.0),
        "float16, no loss scale": ("mixed_float16", 1.0),
        f"float16, loss scale {report.suggested_loss_scale:g}": ("mixed_float16", report.suggested_loss_scale),
    }
    print(
        f"\nAccuracy on {len(test_batch[0])} test images after {options.steps} steps, {options.seeds} seeds", flush=True
    )
    for name, (policy, loss_scale) in ways.items():
        accuracies = [
            accuracy_of(trained(policy, seed, loss_scale, batch, options.steps), test_batch)
            for seed in tqdm(range(options.seeds), desc=name, unit="training", leave=False)
        ]
        deviation = statistics.stdev(accuracies) if len(accuracies) > 1 else 0.0
        print(f"  {name:28} {statistics.mean(accuracies):5.1f} % ± {deviation:.1f}", flush=True)
    return 0


def whole_batch(data: Any) -> tuple[np.ndarray, dict[str, np.ndarray]]:  # noqa: ANN401 - an object of that example
    """Return all images as one batch: flat images, and what the net is to say of them."""
    images = data.images.reshape(len(data.images), -1).astype(np.float32)
    return images, {"image": images, "digit": data.labels}


def build(policy: str, seed: int, loss_scale: float = 1.0) -> keras.Model:
    """Build and compile a net that repeats an image, and has a second, deeper branch that names the digit.

    Args:
        policy: "float32" or "mixed_float16".
        seed: The seed of the weights.
        loss_scale: The loss scale, for "mixed_float16".
    """
    keras.utils.set_random_seed(seed)
    keras.mixed_precision.set_global_policy(policy)
    inputs = keras.Input([64])
    hidden = inputs
    for index in range(2):
        hidden = keras.layers.Dense(64, "relu", name=f"hidden_{index}")(hidden)
    image = keras.layers.Dense(64, name="image")(hidden)
    for index in range(3):
        hidden = keras.layers.Dense(64, "sigmoid", name=f"branch_{index}")(hidden)
    model = keras.Model(inputs, {"image": image, "digit": keras.layers.Dense(CLASSES, name="digit")(hidden)})
    adam = keras.optimizers.Adam(5e-3)
    fixed = tfmp.FixedLossScaleManager(loss_scale)
    model.compile(
        adam if policy == "float32" else tfmp.LossScaleOptimizer(adam, fixed),
        {"image": "mse", "digit": keras.losses.SparseCategoricalCrossentropy(from_logits=True)},
        loss_weights={"image": 1.0, "digit": DIGIT_WEIGHT},
        steps_per_execution=25,
    )
    return model


def trained(policy: str, seed: int, loss_scale: float, batch: Any, steps: int) -> keras.Model:  # noqa: ANN401
    """Return a net after some steps, each on all training images."""
    model = build(policy, seed, loss_scale)
    model.fit(tf.data.Dataset.from_tensors(batch).repeat(), steps_per_epoch=steps, shuffle=False, verbose=0)
    return model


def accuracy_of(model: keras.Model, batch: tuple[np.ndarray, dict[str, np.ndarray]]) -> float:
    """Return the percentage of images whose digit the net names."""
    images, labels = batch
    logits = np.asarray(model(images)["digit"], np.float32)
    return 100 * float(np.mean(logits.argmax(axis=1) == labels["digit"]))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="digits_ranges", description=__doc__)
    parser.add_argument("--seeds", type=arguments.positive_int, default=5, help="trainings of each kind")
    parser.add_argument("--steps", type=arguments.positive_int, default=250, help="steps of each training")
    parser.add_argument("--plots", type=Path, help="a directory for pictures of the ranges")
    return parser


if __name__ == "__main__":
    sys.exit(main())
