"""Nets of twelve equal blocks, in which activations take more memory than weights."""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import keras
import numpy as np

#: Takes a block, which is not built yet, and returns the layer that the net calls instead.
Wrap: TypeAlias = Callable[[keras.layers.Layer], keras.layers.Layer]

_RATE = 0.1


class Size(NamedTuple):
    """The size of a net and of its batch.

    Attributes:
        blocks: The number of blocks.
        batch: The number of examples in a step.
        length: Tokens of an example, or pixels on a side of an image.
        width: The features of a token, a multiple of 32; or the channels of an image.
    """

    blocks: int
    batch: int
    length: int
    width: int


#: The sizes by model: those that are measured, and those for trying a command out.
SIZES = {
    "full": {"transformer": Size(12, 8, 128, 128), "convolutional": Size(12, 16, 32, 32)},
    "tiny": {"transformer": Size(2, 8, 4, 32), "convolutional": Size(2, 8, 6, 4)},
}

_VOCABULARY = 256
_CLASSES = 10


class TransformerBlock(keras.layers.Layer):
    """Attention and two dense layers, each after a layer normalization, and with Dropout.

    Args:
        width: The features of a token.
        name: The name of the block.
    """

    def __init__(self, width: int, name: str) -> None:
        super().__init__(name=name)
        layers = keras.layers
        self.norms = [layers.LayerNormalization(), layers.LayerNormalization()]
        self.attention = layers.MultiHeadAttention(width // 32, 32, dropout=_RATE)
        self.dense = [layers.Dense(4 * width, "gelu"), layers.Dense(width)]
        self.dropout = [layers.Dropout(_RATE), layers.Dropout(_RATE)]

    def call(self, inputs: Any, training: bool | None = None) -> Any:  # noqa: ANN401 - a tensor of any kind
        """Return the block's results.

        Args:
            inputs: The features of each token.
            training: Whether Dropout is active.
        """
        x = self.norms[0](inputs)
        x = inputs + self.dropout[0](self.attention(x, x, training=training), training=training)
        inner = self.dense[1](self.dense[0](self.norms[1](x)))
        return x + self.dropout[1](inner, training=training)


class ResidualBlock(keras.layers.Layer):
    """Two convolutions, each with BatchNormalization, beside a shortcut.

    Args:
        width: The number of channels.
        name: The name of the block.
    """

    def __init__(self, width: int, name: str) -> None:
        super().__init__(name=name)
        layers = keras.layers
        self.convolutions = [layers.Conv2D(width, 3, padding="same", use_bias=False) for _ in range(2)]
        self.norms = [layers.BatchNormalization(), layers.BatchNormalization()]

    def call(self, inputs: Any, training: bool | None = None) -> Any:  # noqa: ANN401 - a tensor of any kind
        """Return the block's results.

        Args:
            inputs: Images.
            training: Whether the statistics of the batch are used.
        """
        x = keras.ops.relu(self.norms[0](self.convolutions[0](inputs), training=training))
        return keras.ops.relu(inputs + self.norms[1](self.convolutions[1](x), training=training))


def transformer(size: Size, wrap: Wrap) -> keras.Model:
    """Return a transformer that predicts a token for each token.

    Args:
        size: The size.
        wrap: What to call instead of each block.
    """
    tokens = keras.Input([size.length], dtype="int32")
    x = keras.layers.Embedding(_VOCABULARY, size.width)(tokens)
    for index in range(size.blocks):
        x = wrap(TransformerBlock(size.width, f"block_{index}"))(x)
    return keras.Model(tokens, keras.layers.Dense(_VOCABULARY, dtype="float32")(keras.layers.LayerNormalization()(x)))


def convolutional(size: Size, wrap: Wrap) -> keras.Model:
    """Return a residual net that classifies images.

    Args:
        size: The size.
        wrap: What to call instead of each block.
    """
    images = keras.Input([size.length, size.length, 3])
    x = keras.layers.Conv2D(size.width, 3, padding="same", activation="relu")(images)
    for index in range(size.blocks):
        x = wrap(ResidualBlock(size.width, f"block_{index}"))(x)
    return keras.Model(images, keras.layers.Dense(_CLASSES, dtype="float32")(keras.layers.GlobalAveragePooling2D()(x)))


#: The nets by name.
NETS: dict[str, Callable[[Size, Wrap], keras.Model]] = {"transformer": transformer, "convolutional": convolutional}


def batch(model: str, size: Size) -> tuple[np.ndarray, np.ndarray]:
    """Return a batch for a net: its inputs and the numbers of the classes to predict.

    Args:
        model: The name of the net.
        size: The size.

    Examples:
        >>> inputs, classes = batch("transformer", SIZES["tiny"]["transformer"])
        >>> inputs.shape, classes.shape
        ((8, 4), (8, 4))
    """
    numbers = np.random.default_rng(0)
    if model == "transformer":
        tokens = numbers.integers(_VOCABULARY, size=[size.batch, size.length + 1])
        return tokens[:, :-1], tokens[:, 1:]
    images = numbers.standard_normal([size.batch, size.length, size.length, 3], np.float32)
    return images, numbers.integers(_CLASSES, size=size.batch)
