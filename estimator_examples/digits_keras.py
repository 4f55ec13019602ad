"""Train a small dense net on scikit-learn's digits in mixed_float16 with Keras' `fit`, on one replica or several.

Run `python -m estimator_examples.digits_keras`.
"""

from __future__ import annotations

import argparse
import dataclasses
import logging
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import tfmp
from estimator_examples import arguments, digits_session
from estimator_examples.digits_keras_picture import draw

CLASSES = 10
# Keras' own wrapper has this rule. tfmp's wrapper gets the same one here, so that the two differ only in how they
# handle overflow.
STEPS_TO_DOUBLE = 2000
RATIO_ON_OVERFLOW = 0.5
OVERFLOWING_PIXEL = 1e5  # infinite in float16, whose largest number is 65504


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The result of a training.

    Attributes:
        accuracy: The accuracy on the test images, from 0 to 1.
        loss_scale: The loss scale at the end of the training.
        steps: The numbers of applied and skipped steps; None if the optimizer does not count them.
        weights: The weights of the net, as a list for each replica.
    """

    accuracy: float
    loss_scale: float
    steps: tuple[int, int] | None
    weights: list[list[np.ndarray]]

    @property
    def finite(self) -> bool:
        """Whether every weight of every replica is finite."""
        return all(np.isfinite(weight).all() for replica in self.weights for weight in replica)

    @property
    def equal(self) -> bool:
        """Whether all replicas hold the same weights."""
        first, *others = self.weights
        return all(
            np.array_equal(weight, first_weight, equal_nan=True)
            for replica in others
            for weight, first_weight in zip(replica, first, strict=True)
        )


class StepRecorder(keras.callbacks.Callback):
    """Records the accuracy on the test images and the loss scale after each step of `fit`.

    Args:
        test: The test images.

    Attributes:
        accuracies: The accuracies, from 0 to 1.
        scales: The loss scales.
    """

    def __init__(self, test: digits_session.Digits) -> None:
        super().__init__()
        self._test = test
        self.accuracies: list[float] = []
        self.scales: list[float] = []

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:  # noqa: ANN401 - Keras' logs
        """Record both."""
        self.accuracies.append(accuracy_of(self.model, self._test))
        self.scales.append(loss_scale_of(self.model.optimizer))


def main(argv: Sequence[str] | None = None) -> int:
    """Train and test the net, and print the results.

    Args:
        argv: The command-line arguments; None means those of the process.

    Returns:
        The exit status.
    """
    options = parse_options(argv)
    try:
        training, test = digits_session.load_digits(options.seed, options.batch_size)
    except (ImportError, ValueError) as error:
        print(f"digits_keras: error: {error}", file=sys.stderr)
        return 2
    # tfmp's log goes to the stream to which Keras prints, so that the lines appear in the order of the events.
    logging.basicConfig(stream=sys.stdout, format="%(message)s")
    if options.inject_overflow:
        where = f", on the last replica of {options.replicas}" if options.replicas > 1 else ""
        print(f"One image of the first epoch overflows float16{where}.")
    keras.mixed_precision.set_global_policy("mixed_float16")
    strategy = strategy_of(options.device, options.replicas)
    outcomes = {}
    recorded = {}
    for stock in (True, False) if options.compare else (options.stock,):
        name = f"Keras {keras.__version__}" if stock else "tfmp"
        if options.compare:
            print(f"\nWith the loss scaling of {name}:", flush=True)
        keras.utils.set_random_seed(options.seed)
        with strategy.scope():
            model = build(options, stock)
        recorder = StepRecorder(test)
        train(model, training, options, [recorder] if options.plot else [])
        recorded[name] = recorder.accuracies, recorder.scales
        outcomes[name] = outcome_of(model, test, strategy)
    if options.plot:
        draw(recorded, options.plot)
    print(comparison_text(outcomes) if options.compare else summary_text(*outcomes.values()))
    return 0


def parse_options(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line; a wrong argument ends the program with an error message."""
    parser = _parser()
    options = parser.parse_args(argv)
    if options.batch_size % options.replicas:
        parser.error(
            "argument --batch-size: must be a multiple of --replicas, so that all replicas get equally many images, "
            f"got {options.batch_size} for {options.replicas} replicas."
        )
    gpus = len(tf.config.list_physical_devices("GPU"))
    if options.device == "gpu" and gpus < options.replicas:
        parser.error(f"argument --device: TensorFlow must see a GPU for each replica, got {gpus}.")
    return options


def strategy_of(device: str, replicas: int) -> tf.distribute.Strategy:
    """Choose the devices to train on; TensorFlow allows this only before it creates its devices.

    Args:
        device: "cpu", which is split into one logical device per replica, or "gpu", for one GPU per replica.
        replicas: The number of replicas.
    """
    if device == "cpu":
        tf.config.set_visible_devices([], "GPU")
        cpu = tf.config.list_physical_devices("CPU")[0]
        if replicas > 1:
            tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * replicas)
    if replicas == 1:
        return tf.distribute.get_strategy()
    devices = [f"{device}:{replica}" for replica in range(replicas)]
    # The default, collective operations, hangs on CPUs under Estimator.
    return tf.distribute.MirroredStrategy(devices, cross_device_ops=tf.distribute.ReductionToOneDevice())


def build(options: argparse.Namespace, stock: bool) -> keras.Model:
    """Build and compile the net, with Keras' own loss scaling if `stock`, otherwise with tfmp's."""
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
    adam = keras.optimizers.Adam(options.learning_rate)
    scaling = stock_optimizer if stock else tfmp_optimizer
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(scaling(adam, options.init_loss_scale), loss, metrics=["accuracy"])
    return model


def tfmp_optimizer(inner: keras.optimizers.Optimizer, init_loss_scale: float) -> keras.optimizers.Optimizer:
    """Wrap an optimizer in `tfmp.LossScaleOptimizer`."""
    manager = tfmp.ExponentialUpdateLossScaleManager(
        init_loss_scale, STEPS_TO_DOUBLE, decr_every_n_nan_or_inf=1, decr_ratio=RATIO_ON_OVERFLOW
    )
    return tfmp.LossScaleOptimizer(inner, manager)


def stock_optimizer(inner: keras.optimizers.Optimizer, init_loss_scale: float) -> keras.optimizers.Optimizer:
    """Wrap an optimizer in Keras' own `LossScaleOptimizer`, as `compile` does by default under mixed_float16."""
    return keras.mixed_precision.LossScaleOptimizer(
        inner, initial_scale=init_loss_scale, dynamic_growth_steps=STEPS_TO_DOUBLE
    )


def train(
    model: keras.Model,
    digits: digits_session.Digits,
    options: argparse.Namespace,
    callbacks: Sequence[keras.callbacks.Callback] = (),
) -> None:
    """Train the net; Keras prints the progress."""
    first_images = with_overflow(digits.images, options.batch_size) if options.inject_overflow else digits.images
    first_epoch = _batches(first_images, digits.labels, options.batch_size)
    next_epochs = _batches(digits.images, digits.labels, options.batch_size).repeat()
    model.fit(
        first_epoch.concatenate(next_epochs),
        epochs=options.epochs,
        steps_per_epoch=len(digits.labels) // options.batch_size,
        shuffle=False,
        verbose=2,
        callbacks=[
            *([tfmp.LossScaleCallback()] if isinstance(model.optimizer, tfmp.LossScaleOptimizer) else []),
            *callbacks,
        ],
    )


def with_overflow(images: np.ndarray, batch_size: int) -> np.ndarray:
    """Return the images, of which one in the middle of the epoch overflows float16.

    It is the last image of its batch. Keras splits a batch over the replicas in order, so the last replica gets it.
    """
    batch = len(images) // batch_size // 2
    images = images.copy()
    images[(batch + 1) * batch_size - 1] = OVERFLOWING_PIXEL
    return images


def outcome_of(model: keras.Model, test: digits_session.Digits, strategy: tf.distribute.Strategy) -> Outcome:
    """Test the net, and return the accuracy with the final state of the training."""
    optimizer = model.optimizer
    steps = None
    if isinstance(optimizer, tfmp.LossScaleOptimizer):
        steps = int(optimizer.applied_steps), int(optimizer.skipped_steps)
    weights = weights_of_replicas(model, strategy)
    return Outcome(accuracy_of(model, test), loss_scale_of(optimizer), steps, weights)


def accuracy_of(model: keras.Model, test: digits_session.Digits) -> float:
    """Return the accuracy on images, from 0 to 1."""
    # `evaluate` is not used: in Keras 3.15 it fails if the images cannot be split evenly over the replicas.
    return float(np.mean(np.argmax(model(test.images), axis=-1) == test.labels))


def loss_scale_of(optimizer: Any) -> float:  # noqa: ANN401 - a wrapper of tfmp or of any Keras
    """Return the loss scale of tfmp's wrapper or of Keras' own."""
    # Keras 3's wrapper names the scale `dynamic_scale`; the wrappers of tfmp and Keras 2 name it `loss_scale`.
    scale = optimizer.loss_scale if hasattr(optimizer, "loss_scale") else optimizer.dynamic_scale
    return float(tf.convert_to_tensor(scale))


def weights_of_replicas(model: keras.Model, strategy: tf.distribute.Strategy) -> list[list[np.ndarray]]:
    """Return the weights of the net on each replica."""

    @tf.function
    def read() -> list[tf.Tensor]:
        return strategy.run(lambda: [tf.convert_to_tensor(weight) for weight in model.weights])

    by_weight = [strategy.experimental_local_results(weight) for weight in read()]
    return [[weight.numpy() for weight in replica] for replica in zip(*by_weight, strict=True)]


def summary_text(outcome: Outcome) -> str:
    """Return the result of one training as text."""
    return "\n".join(["\nSummary", *(f"  {name:<14}  {value}" for name, value in _rows(outcome).items())])


def comparison_text(outcomes: dict[str, Outcome]) -> str:
    """Return the results of two trainings as text, side by side.

    Args:
        outcomes: The results, by the name of the library that scaled the loss.
    """
    columns = [_rows(outcome) for outcome in outcomes.values()]
    lines = [("", *outcomes), *((name, *(column[name] for column in columns)) for name in columns[0])]
    return "\n".join(["\nComparison", *("  {:<14}  {:<20}  {}".format(*line) for line in lines)])


def _rows(outcome: Outcome) -> dict[str, str]:
    applied, skipped = outcome.steps or ("not counted by Keras", "not counted by Keras")
    return {
        "test accuracy": f"{outcome.accuracy:.1%}",
        "loss scale": f"{outcome.loss_scale:g}",
        "steps applied": f"{applied}",
        "steps skipped": f"{skipped}",
        "weights finite": _yes(outcome.finite),
        "replicas equal": _yes(outcome.equal) if len(outcome.weights) > 1 else "there is only one",
    }


def _batches(images: np.ndarray, labels: np.ndarray, size: int) -> tf.data.Dataset:
    return tf.data.Dataset.from_tensor_slices((images, labels)).batch(size, drop_remainder=True)


def _yes(value: bool) -> str:
    return "yes" if value else "no"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="digits_keras",
        usage="python -m estimator_examples.digits_keras [options]",
        description="Train a small net in mixed_float16 with Keras, on one device or on several replicas.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--device", choices=["cpu", "gpu"], default="cpu", help="the kind of device to train on")
    parser.add_argument(
        "--replicas",
        type=arguments.positive_int,
        default=1,
        help="number of logical CPUs, or GPUs, that train together",
    )
    parser.add_argument(
        "--inject-overflow",
        action="store_true",
        help="change one image of the first epoch so that it overflows float16 on the last replica",
    )
    scaling = parser.add_mutually_exclusive_group()
    scaling.add_argument("--stock", action="store_true", help="use Keras' own loss scaling, not tfmp's")
    scaling.add_argument("--compare", action="store_true", help="train with both, and print the results side by side")
    parser.add_argument("--plot", type=Path, help="an image file to draw accuracy and loss scale in, step by step")
    parser.add_argument(
        "--epochs", type=arguments.positive_int, default=10, help="number of passes over the training images"
    )
    parser.add_argument(
        "--batch-size",
        type=arguments.positive_int,
        default=64,
        help="number of images per step, on all replicas together",
    )
    parser.add_argument("--learning-rate", type=arguments.positive, default=0.005, help="learning rate of Adam")
    parser.add_argument("--init-loss-scale", type=arguments.loss_scale, default="2**15", help="initial loss scale")
    parser.add_argument("--seed", type=arguments.count, default=1, help="random seed of the test split and the weights")
    return parser


if __name__ == "__main__":
    sys.exit(main())
