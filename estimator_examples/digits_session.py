"""Train a small convolutional net on scikit-learn's digits in float16, in a `sess.run` loop.

Run `python -m estimator_examples.digits_session`.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import sys
from collections.abc import Iterator, Sequence

import numpy as np
import tensorflow as tf

import tfmp
from estimator_examples import arguments

tf1 = tf.compat.v1

CLASSES = 10
MOMENTUM = 0.9
MOVING_AVERAGE_DECAY = 0.9


@dataclasses.dataclass(frozen=True)
class Digits:
    """Images, float32 [n, 8, 8, 1] with values from 0 to 1, and their labels, int32 [n]."""

    images: np.ndarray
    labels: np.ndarray

    def batches(self, size: int, rng: np.random.Generator) -> Iterator[Digits]:
        """Yield shuffled batches without end; each pass leaves out the images that do not fill a batch."""
        while True:
            order = rng.permutation(len(self.labels))
            for i in range(0, len(order) - size + 1, size):
                chosen = order[i : i + size]
                yield Digits(self.images[chosen], self.labels[chosen])


@dataclasses.dataclass(frozen=True)
class Network:
    """The tensors of the training graph."""

    images: tf.Tensor
    labels: tf.Tensor
    training: tf.Tensor
    loss: tf.Tensor
    accuracy: tf.Tensor
    train_op: tf.Operation
    optimizer: tfmp.LossScaleOptimizer


def main(argv: Sequence[str] | None = None) -> int:
    """Train the net, print the progress, and test the net.

    Args:
        argv: The command-line arguments; None means those of the process.

    Returns:
        The exit status.
    """
    options = _parser().parse_args(argv)
    try:
        training, test = load_digits(options.seed, options.batch_size)
    except (ImportError, ValueError) as error:
        print(f"digits_session: error: {error}", file=sys.stderr)
        return 2
    with tf.Graph().as_default(), tf1.Session() as session:
        tf1.set_random_seed(options.seed)
        network = build(options.learning_rate, options.init_loss_scale)
        train(session, network, training, options)
        accuracy = session.run(network.accuracy, {network.images: test.images, network.labels: test.labels})
        print(f"test accuracy {accuracy:.1%}")
    return 0


def load_digits(seed: int, batch_size: int) -> tuple[Digits, Digits]:
    """Load the 1797 images of digits that scikit-learn includes, split into a training and a test part.

    Raises:
        ImportError: scikit-learn is not installed.
        ValueError: The training images do not fill one batch.
    """
    try:
        from sklearn import datasets, model_selection
    except ImportError as error:
        raise ImportError(
            "this example needs scikit-learn: install tfmp with its extra, "
            f"e.g. `pip install '.[examples]'` from the clone ({error})."
        ) from error
    bunch = datasets.load_digits()
    images = bunch.images.astype(np.float32)[..., np.newaxis] / 16
    parts = model_selection.train_test_split(images, bunch.target.astype(np.int32), test_size=0.25, random_state=seed)
    train_images, test_images, train_labels, test_labels = parts
    if batch_size > len(train_labels):
        raise ValueError(f"a batch holds at most the {len(train_labels)} training images, got {batch_size}.")
    return Digits(train_images, train_labels), Digits(test_images, test_labels)


def build(learning_rate: float, init_loss_scale: float) -> Network:
    """Build the net and its training step in the current graph."""
    images = tf1.placeholder(tf.float32, [None, 8, 8, 1])
    labels = tf1.placeholder(tf.int32, [None])
    training = tf1.placeholder_with_default(False, [])
    # The getter stores the weights in float32, and gives the layers a float16 copy.
    with tf1.variable_scope("net", dtype=tf.float16, custom_getter=tfmp.float32_variable_storage_getter):
        logits = _logits(tf.cast(images, tf.float16), training)
    loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels=labels, logits=logits))
    manager = tfmp.ExponentialUpdateLossScaleManager(
        init_loss_scale, incr_every_n_steps=100, decr_every_n_nan_or_inf=2, decr_ratio=0.5
    )
    optimizer = tfmp.LossScaleOptimizer(tf1.train.MomentumOptimizer(learning_rate, MOMENTUM), manager)
    # UPDATE_OPS holds the updates of the batch norm's moving averages. They run on skipped steps too. If activations
    # overflowed, this would make the averages infinite, so `_moving_average` ignores values that are not finite.
    with tf.control_dependencies(tf1.get_collection(tf1.GraphKeys.UPDATE_OPS)):
        train_op = optimizer.minimize(loss, tf1.train.get_or_create_global_step())
    right = tf.equal(tf.argmax(logits, -1, tf.int32), labels)
    accuracy = tf.reduce_mean(tf.cast(right, tf.float32))
    return Network(images, labels, training, loss, accuracy, train_op, optimizer)


def train(session: tf1.Session, network: Network, digits: Digits, options: argparse.Namespace) -> None:
    """Attempt the steps, and print the state of the loss scaling at intervals."""
    # These are fetched in a `session.run` of their own. Together with the train op, they could be read before or after
    # the step.
    optimizer = network.optimizer
    state = {
        "scale": optimizer.loss_scale,
        "applied": optimizer.applied_steps,
        "skipped": optimizer.skipped_steps,
    }
    session.run(tf1.global_variables_initializer())
    batches = digits.batches(options.batch_size, np.random.default_rng(options.seed))
    for attempt in range(1, options.steps + 1):
        batch = next(batches)
        feed = {network.images: batch.images, network.labels: batch.labels, network.training: True}
        loss, _ = session.run([network.loss, network.train_op], feed)
        if attempt % options.log_every == 0 or attempt == options.steps:
            now = session.run(state)
            print(
                f"attempt {attempt}: loss {loss:.4f}, loss scale 2^{math.log2(now['scale']):g}, "
                f"applied {now['applied']}, skipped {now['skipped']}"
            )


def _logits(x: tf.Tensor, training: tf.Tensor) -> tf.Tensor:
    for i, (channels, stride) in enumerate([(16, 1), (32, 2)]):
        with tf1.variable_scope(f"conv_{i}"):
            x = tf.nn.conv2d(x, _kernel([3, 3, _width(x), channels]), strides=stride, padding="SAME")
            x = tf.nn.relu(_batch_norm(x, training))
    with tf1.variable_scope("output"):
        x = tf.reshape(x, [-1, math.prod(x.shape.as_list()[1:])])
        bias = tf1.get_variable("bias", [CLASSES], initializer=tf1.zeros_initializer())
        return tf.cast(_matmul(x, _kernel([_width(x), CLASSES])) + bias, tf.float32)


def _batch_norm(x: tf.Tensor, training: tf.Tensor) -> tf.Tensor:
    width = [_width(x)]
    # Computed in float16, the statistics of float16 values would overflow, and small changes of a moving average would
    # be rounded away.
    gamma = tf1.get_variable("gamma", width, tf.float32, tf1.ones_initializer())
    beta = tf1.get_variable("beta", width, tf.float32, tf1.zeros_initializer())
    mean, variance = tf.nn.moments(tf.cast(x, tf.float32), [0, 1, 2])
    mean = _moving_average("moving_mean", mean, training, tf1.zeros_initializer())
    variance = _moving_average("moving_variance", variance, training, tf1.ones_initializer())
    normal = tf.nn.batch_normalization(tf.cast(x, tf.float32), mean, variance, beta, gamma, 1e-3)
    return tf.cast(normal, x.dtype)


def _moving_average(
    name: str,
    current: tf.Tensor,
    training: tf.Tensor,
    initializer: tf1.keras.initializers.Initializer,
) -> tf.Tensor:
    average = tf1.get_variable(name, current.shape, tf.float32, initializer, trainable=False)
    step = (1 - MOVING_AVERAGE_DECAY) * (current - average)
    step = tf.where(tf.math.is_finite(step), step, tf.zeros_like(step))
    tf1.add_to_collection(tf1.GraphKeys.UPDATE_OPS, average.assign_add(step, read_value=False))
    return tf.where(training, current, average)


def _kernel(shape: Sequence[int]) -> tf.Tensor:
    fan_in = math.prod(shape[:-1])
    initializer = tf1.truncated_normal_initializer(stddev=math.sqrt(2 / fan_in))
    return tf1.get_variable("kernel", shape, initializer=initializer)


def _width(x: tf.Tensor) -> int:
    return x.shape.as_list()[-1]


def _matmul(a: tf.Tensor, b: tf.Tensor) -> tf.Tensor:
    # Multiply as on Tensor Cores: float16 inputs, float32 sums, float16 results. TensorFlow 2.15's own float16 product
    # is about 250 times slower on a CPU.
    return tf.cast(tf.matmul(tf.cast(a, tf.float32), tf.cast(b, tf.float32)), a.dtype)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="digits_session",
        usage="python -m estimator_examples.digits_session [options]",
        description="Train a small convolutional net in float16 with a sess.run loop.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--steps", type=arguments.positive_int, default=400, help="number of attempted steps")
    parser.add_argument("--batch_size", type=arguments.positive_int, default=64, help="number of images per step")
    parser.add_argument("--learning_rate", type=arguments.positive, default=0.05, help="learning rate of momentum")
    parser.add_argument("--init_loss_scale", type=arguments.loss_scale, default="2**32", help="initial loss scale")
    parser.add_argument(
        "--log_every", type=arguments.positive_int, default=20, help="number of steps between two lines of output"
    )
    parser.add_argument(
        "--seed", type=arguments.count, default=1, help="random seed of the test split, the batches and the weights"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
