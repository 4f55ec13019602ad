"""Compares accumulated steps with steps of the large batch, in float32.

    python -m benchmarks.accumulation

The same net is trained on the same batches twice: by a plain optimizer on whole batches, and by tfmp on windows of
micro-batches, on one device and on two replicas (logical CPU devices under MirroredStrategy). A figure is the largest
difference between the two nets' weights, divided by the largest weight. Where a micro-batch of one replica overflows,
the examples of that micro-batch are left out of the large batch too; where an overflow drops the whole window, the
training on large batches leaves that step out.
"""

import argparse
import contextlib
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import tfmp
from benchmarks.harness import report

_SCALE = 2.0**10
_OVERFLOWING = (1, 2)  # the index of the window that has an overflow, and of the micro-batch within the window
_CASES = ("no overflow", "overflow drops the micro-batch", "overflow drops the window")


def main(argv: Sequence[str] | None = None) -> int:
    """Compare and print.

    Args:
        argv: The arguments; by default those of the process.

    Returns:
        The exit status.
    """
    options = _parser().parse_args(argv)
    conditions = report.printed_conditions()
    strategies = {"1 device": None, "2 replicas": two_replicas()}
    figures: dict[str, dict[str, float]] = {}
    for name, training in _TRAININGS.items():
        for devices, strategy in strategies.items():
            row = figures.setdefault(f"{name}, {devices}", {})
            for case in _CASES:
                row[case] = difference(training, strategy, case, options)
    rows = [[name, *(f"{figure:.1e}" for figure in row.values())] for name, row in figures.items()]
    print(f"\n{report.table(['largest difference', *_CASES], rows)}")
    report.write_json(options.json, {"conditions": conditions, "figures": figures})
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--windows", type=int, default=20, help="steps of each training (default: %(default)s)")
    parser.add_argument("--micro-batches", type=int, default=4, help="micro-batches of a window (default: %(default)s)")
    parser.add_argument("--batch-size", type=int, default=16, help="examples of a micro-batch (default: %(default)s)")
    parser.add_argument("--json", type=Path, help="a file to write the figures to")
    return parser


def two_replicas() -> tf.distribute.Strategy:
    """Return a strategy of two logical devices of the CPU, which TensorFlow allows before it has started."""
    tf.config.set_visible_devices([], "GPU")
    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
    return tf.distribute.MirroredStrategy(["cpu:0", "cpu:1"], cross_device_ops=tf.distribute.ReductionToOneDevice())


class _Net:
    """A dense net with one hidden layer; each instance starts from the same weights."""

    def __init__(self) -> None:
        numbers = np.random.default_rng(1)
        shapes = ([64, 32], [32], [32, 10], [10])
        self.variables = [tf.Variable(0.2 * numbers.standard_normal(shape), dtype=tf.float32) for shape in shapes]

    def loss(self, images: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
        kernel, bias, kernel_out, bias_out = self.variables
        logits = tf.tanh(images @ kernel + bias) @ kernel_out + bias_out
        return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits))

    def weights(self) -> np.ndarray:
        return np.concatenate([variable.numpy().ravel() for variable in self.variables])


#: Takes a net and the settings of the accumulation; returns a function that trains on one micro-batch. The function's
#: third argument is a factor for the loss.
_Training = Callable[[_Net, dict[str, Any]], Callable[[tf.Tensor, tf.Tensor, float], None]]


def _of_tf1() -> tf.compat.v1.train.Optimizer:
    # Not Adam: its update hardly depends on the gradients' magnitude, so a wrong divisor would hardly show.
    return tf.compat.v1.train.MomentumOptimizer(0.1, 0.9)


def _of_keras() -> keras.optimizers.Optimizer:
    return keras.optimizers.SGD(0.1, momentum=0.9)


def by_tf1(net: _Net, accumulation: dict[str, Any]) -> Callable[[tf.Tensor, tf.Tensor, float], None]:
    """Return a function that trains on one micro-batch with a TF1 optimizer."""
    opt = tfmp.LossScaleOptimizer(_of_tf1(), tfmp.FixedLossScaleManager(_SCALE), **accumulation)

    def take(images: tf.Tensor, labels: tf.Tensor, share: float) -> None:
        opt.minimize(lambda: net.loss(images, labels) * share, var_list=net.variables)

    return take


def by_keras(net: _Net, accumulation: dict[str, Any]) -> Callable[[tf.Tensor, tf.Tensor, float], None]:
    """Return a function that trains on one micro-batch with a Keras optimizer."""
    opt = tfmp.LossScaleOptimizer(_of_keras(), tfmp.FixedLossScaleManager(_SCALE), **accumulation)
    opt.build(net.variables)

    def take(images: tf.Tensor, labels: tf.Tensor, share: float) -> None:
        with tf.GradientTape() as tape:
            loss = opt.scale_loss(net.loss(images, labels) * share)
        opt.apply_gradients(zip(tape.gradient(loss, net.variables), net.variables, strict=True))

    return take


_TRAININGS: dict[str, _Training] = {"TF1": by_tf1, "Keras": by_keras}


def difference(
    training: _Training, strategy: tf.distribute.Strategy | None, case: str, options: argparse.Namespace
) -> float:
    """Return the largest difference between the weights of the two trainings, divided by the largest weight."""
    replicas = 1 if strategy is None else strategy.num_replicas_in_sync
    images, labels = _examples(options.windows, options.micro_batches, replicas, options.batch_size)
    keeps = np.ones(images.shape[:3], bool)
    if case != _CASES[0]:
        keeps[(*_OVERFLOWING, replicas - 1)] = False
    drops = "window" if case == _CASES[2] else "micro_batch"
    accumulation = {"accumulation_steps": options.micro_batches, "overflow_drops": drops}
    with contextlib.nullcontext() if strategy is None else strategy.scope():
        net = _Net()
        take = training(net, accumulation)
    run = _on_replicas(take, strategy)
    for window, micro_batch in np.ndindex(*images.shape[:2]):
        given = np.where(keeps[window, micro_batch, :, None, None], images[window, micro_batch], np.float32(np.inf))
        run(tf.constant(given), tf.constant(labels[window, micro_batch]))

    large = _Net()
    optimizer = _of_tf1() if training is by_tf1 else _of_keras()
    for window in range(options.windows):
        kept = keeps[window]
        if drops == "window" and not kept.all():
            continue
        with tf.GradientTape() as tape:
            loss = large.loss(images[window][kept].reshape(-1, 64), labels[window][kept].reshape(-1))
        optimizer.apply_gradients(zip(tape.gradient(loss, large.variables), large.variables, strict=True))
    return float(np.abs(net.weights() - large.weights()).max() / np.abs(large.weights()).max())


def _on_replicas(
    take: Callable[[tf.Tensor, tf.Tensor, float], None], strategy: tf.distribute.Strategy | None
) -> Callable[[tf.Tensor, tf.Tensor], None]:
    """Return a function that takes the examples of all replicas and trains each replica on its own examples.

    The optimizers sum gradients over the replicas, so each loss is divided by the number of replicas.
    """

    def take_own(images: tf.Tensor, labels: tf.Tensor) -> None:
        context = tf.distribute.get_replica_context()
        replica = 0 if strategy is None else context.replica_id_in_sync_group
        take(images[replica], labels[replica], 1 if strategy is None else 1 / context.num_replicas_in_sync)

    @tf.function
    def run(images: tf.Tensor, labels: tf.Tensor) -> None:
        if strategy is None:
            take_own(images, labels)
        else:
            strategy.run(take_own, args=(images, labels))

    return run


def _examples(windows: int, micro_batches: int, replicas: int, size: int) -> tuple[np.ndarray, np.ndarray]:
    numbers = np.random.default_rng(0)
    shape = (windows, micro_batches, replicas, size)
    return numbers.standard_normal([*shape, 64], dtype=np.float32), numbers.integers(0, 10, shape)


if __name__ == "__main__":
    sys.exit(main())
