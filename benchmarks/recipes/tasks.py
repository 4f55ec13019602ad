"""What the nets are trained on: images that scikit-learn includes, and a text that Python includes."""

import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from benchmarks.recipes import nets
from estimator_examples import digits_ranges, digits_session


class Examples(NamedTuple):
    """Inputs of a net, and the classes that it should predict for them; the first axis of both is that of examples."""

    inputs: np.ndarray
    classes: np.ndarray


class Task(NamedTuple):
    """A net, what it learns, and how long.

    Attributes:
        build: Returns the net in float32, given the seed of its weights.
        loss: Returns the loss, given the inputs, the classes and the outputs of the net.
        logits: Returns the logits of the classes, given the outputs of the net.
        examples: Returns those for the training, and those that are held out.
        batch: The number of examples in a step.
        steps: The number of steps.
        learning_rate: The highest learning rate.
    """

    build: Callable[[int], keras.Model]
    loss: Callable[[Any, Any, Any], tf.Tensor]
    logits: Callable[[Any], Any]
    examples: Callable[[], tuple[Examples, Examples]]
    batch: int
    steps: int
    learning_rate: float

    def batches(self, training: Examples, seed: int) -> Iterator[Examples]:
        """Yield the batches of a training, each of which is drawn from all examples.

        Args:
            training: The examples for the training.
            seed: The seed of the order.
        """
        numbers = np.random.default_rng(seed)
        for _ in range(self.steps):
            chosen = numbers.permutation(len(training.inputs))[: self.batch]
            yield Examples(training.inputs[chosen], training.classes[chosen])


def digits(flat: bool) -> tuple[Examples, Examples]:
    """Return the images of digits for the training, which are three quarters of all, and those that are held out.

    Args:
        flat: Whether the pixels of an image are on one axis.

    Examples:
        >>> import pytest
        >>> _ = pytest.importorskip("sklearn")
        >>> [part.inputs.shape for part in digits(flat=True)]
        [(1347, 64), (450, 64)]
    """
    parts = digits_session.load_digits(seed=0, batch_size=1)
    training, held_out = (
        Examples(part.images.reshape(len(part.images), -1) if flat else part.images, part.labels) for part in parts
    )
    return training, held_out


def text(length: int) -> tuple[Examples, Examples]:
    """Return pieces of Python's help topics for the training, and some of the last tenth, which is held out.

    The class of each character is the number of the next one.

    Args:
        length: The number of characters in a piece.

    Examples:
        >>> training, held_out = text(length=32)
        >>> training.inputs.shape == training.classes.shape, held_out.inputs.shape
        (True, (256, 32))
    """
    from pydoc_data import topics

    whole = "\n".join(topics.topics[name] for name in sorted(topics.topics))
    numbers = np.frombuffer(whole.encode("ascii", "replace"), np.uint8).astype(np.int32)
    pieces = numbers[: len(numbers) // (length + 1) * (length + 1)].reshape(-1, length + 1)
    first_held_out = len(pieces) * 9 // 10
    parts = pieces[:first_held_out], pieces[first_held_out:][:256]
    training, held_out = (Examples(part[:, :-1], part[:, 1:]) for part in parts)
    return training, held_out


def _cross_entropy(inputs: Any, classes: Any, outputs: Any) -> tf.Tensor:  # noqa: ANN401 - tensors of any kind
    each = tf.nn.sparse_softmax_cross_entropy_with_logits(labels=classes, logits=tf.cast(outputs, tf.float32))
    return tf.reduce_mean(each)


def _loss_of_branches(inputs: Any, classes: Any, outputs: Any) -> tf.Tensor:  # noqa: ANN401 - tensors of any kind
    of_image = tf.reduce_mean(tf.square(tf.cast(outputs["image"], tf.float32) - inputs))
    return of_image + digits_ranges.DIGIT_WEIGHT * _cross_entropy(inputs, classes, outputs["digit"])


def _same(outputs: Any) -> Any:  # noqa: ANN401 - a tensor of any kind
    return outputs


def _of_digit(outputs: Any) -> Any:  # noqa: ANN401 - tensors of any kind
    return outputs["digit"]


def _of_images(size: nets.Size, batch: int, steps: int) -> Task:
    build = functools.partial(nets.convolutional, size)
    return Task(build, _cross_entropy, _same, functools.partial(digits, flat=False), batch, steps, 1e-2)


def _of_text(size: nets.Size, length: int, batch: int, steps: int) -> Task:
    build = functools.partial(nets.transformer, size, length)
    return Task(build, _cross_entropy, _same, functools.partial(text, length), batch, steps, 1e-2)


def _of_branches(batch: int, steps: int) -> Task:
    examples = functools.partial(digits, flat=True)
    return Task(nets.branched, _loss_of_branches, _of_digit, examples, batch, steps, 1e-2)


#: The tasks by size and by the name of the net: those that are measured, and those for trying a command out.
TASKS = {
    "full": {
        "convolutional": _of_images(nets.Size(blocks=3, width=32), batch=64, steps=120),
        "transformer": _of_text(nets.Size(blocks=4, width=48), length=64, batch=16, steps=80),
        "branched": _of_branches(batch=1344, steps=500),
    },
    "tiny": {
        "convolutional": _of_images(nets.Size(blocks=1, width=4), batch=8, steps=2),
        "transformer": _of_text(nets.Size(blocks=1, width=16), length=8, batch=8, steps=2),
        "branched": _of_branches(batch=8, steps=2),
    },
}

#: The names of the nets.
NETS = tuple(TASKS["full"])
