"""The nets that are trained by each recipe, made of layers that can be recomputed."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import keras

import tfmp
from estimator_examples import digits_ranges

#: Numbers of characters that the transformer tells apart: those of ASCII.
VOCABULARY = 128

_CLASSES = 10
_HEAD_WIDTH = 16


class Size(NamedTuple):
    """The size of a net.

    Attributes:
        blocks: The number of blocks.
        width: The features of a token, a multiple of 16; or the channels of an image.
    """

    blocks: int
    width: int


class ConvolutionalBlock(keras.layers.Layer):
    """A convolution of each channel, BatchNormalization and two dense layers of each pixel, beside a shortcut.

    On a CPU, a single gradient of a full convolution in float16 takes 32 MiB of scratch memory, which would hide what
    the recipes save. That of a convolution channel by channel does not.

    Args:
        width: The number of channels.
        name: The name of the block.
    """

    def __init__(self, width: int, name: str) -> None:
        super().__init__(name=name)
        layers = keras.layers
        self.convolution = layers.DepthwiseConv2D(3, padding="same", use_bias=False)
        self.norm = layers.BatchNormalization(momentum=0.9)
        self.dense = [layers.Dense(2 * width, "relu"), layers.Dense(width)]

    def call(self, inputs: Any, training: bool | None = None) -> Any:  # noqa: ANN401 - a tensor of any kind
        """Return the block's results.

        Args:
            inputs: Images.
            training: Whether the statistics of the batch are used.
        """
        x = self.norm(self.convolution(inputs), training=training)
        return inputs + self.dense[1](self.dense[0](x))


class TransformerBlock(keras.layers.Layer):
    """Attention to the tokens so far and two dense layers, each after a layer normalization.

    Args:
        width: The features of a token.
        name: The name of the block.
    """

    def __init__(self, width: int, name: str) -> None:
        super().__init__(name=name)
        layers = keras.layers
        self.norms = [layers.LayerNormalization(), layers.LayerNormalization()]
        self.attention = layers.MultiHeadAttention(width // _HEAD_WIDTH, _HEAD_WIDTH)
        self.dense = [layers.Dense(4 * width, "relu"), layers.Dense(width)]

    def call(self, inputs: Any) -> Any:  # noqa: ANN401 - a tensor of any kind
        """Return the block's results.

        Args:
            inputs: The features of each token.
        """
        x = self.norms[0](inputs)
        x = inputs + self.attention(x, x, use_causal_mask=True)
        return x + self.dense[1](self.dense[0](self.norms[1](x)))


class Positions(keras.layers.Layer):
    """Adds trained features of each position."""

    def build(self, input_shape: Sequence[int]) -> None:
        """Make the features.

        Args:
            input_shape: The shape of the inputs.
        """
        self.features = self.add_weight(shape=input_shape[1:], initializer="uniform", name="features")

    def call(self, inputs: Any) -> Any:  # noqa: ANN401 - a tensor of any kind
        """Return the tokens with the features of their positions.

        Args:
            inputs: The features of each token.
        """
        return inputs + keras.ops.cast(self.features, inputs.dtype)


def convolutional(size: Size, seed: int) -> keras.Model:
    """Return a net that classifies images of 8 x 8 pixels.

    Args:
        size: The size.
        seed: The seed of the weights.
    """
    keras.utils.set_random_seed(seed)
    images = keras.Input([8, 8, 1])
    x = keras.layers.Dense(size.width, name="stem")(images)
    for index in range(size.blocks):
        x = ConvolutionalBlock(size.width, f"block_{index}")(x)
    return keras.Model(images, keras.layers.Dense(_CLASSES, name="head")(keras.layers.GlobalAveragePooling2D()(x)))


def transformer(size: Size, length: int, seed: int) -> keras.Model:
    """Return a net that predicts the next character after each one.

    Args:
        size: The size.
        length: The number of characters.
        seed: The seed of the weights.
    """
    keras.utils.set_random_seed(seed)
    tokens = keras.Input([length], dtype="int32")
    # Features as large as what the blocks add to them: a few steps then suffice to learn which characters follow which.
    spread = keras.initializers.RandomNormal(stddev=1.0)
    x = keras.layers.Embedding(VOCABULARY, size.width, spread, name="embedding")(tokens)
    x = Positions(name="positions")(x)
    for index in range(size.blocks):
        x = TransformerBlock(size.width, f"block_{index}")(x)
    return keras.Model(tokens, keras.layers.Dense(VOCABULARY, name="head")(keras.layers.LayerNormalization()(x)))


def branched(seed: int) -> keras.Model:
    """Return the net of the page on ranges, which repeats an image, and names its digit in a branch of a tiny loss.

    Args:
        seed: The seed of the weights.
    """
    model = digits_ranges.build("float32", seed)
    # This one is not compiled: the optimizers of the recipes are others.
    return keras.Model(model.input, model.output)


def prepared(model: keras.Model, level: str, recompute: bool) -> keras.Model:
    """Return a float32 model at a level of precision, with its blocks recomputed or not.

    Args:
        model: The model, one of those above.
        level: The level.
        recompute: Whether the blocks are recomputed.
    """
    heads = [layer.name for layer in model.layers if layer.name == "head"]
    tfmp.set_precision(model, level, keep_float32=heads)
    return tfmp.recompute_layers(model, r"(block|hidden|branch)_\d") if recompute else model
