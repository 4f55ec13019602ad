"""The critic and the generator; their dense layers compute in float16 and store float32 weights."""

import keras
import tensorflow as tf

PIXELS = 64
NOISE = 32
HIDDEN = 256


class Dense(keras.layers.Layer):
    """A dense layer that multiplies as on Tensor Cores: float16 inputs, float32 sums, float16 results.

    Keras' own dense layer multiplies in this way on a GPU. On a CPU, TensorFlow 2.15's float16 product is about 30
    times slower than this layer.

    Args:
        units: The width of the output.
        dtype: A Keras policy: `mixed_float16` computes in float16, `float32` computes in float32.
    """

    def __init__(self, units: int, dtype: str) -> None:
        super().__init__(dtype=dtype)
        self.units = units

    def build(self, input_shape: tuple[int | None, ...]) -> None:
        """Create the weights in float32."""
        self.kernel = self.add_weight(shape=(input_shape[-1], self.units), initializer="glorot_uniform", name="kernel")
        self.bias = self.add_weight(shape=(self.units,), initializer="zeros", name="bias")
        self.built = True

    def call(self, inputs: tf.Tensor) -> tf.Tensor:
        """Return `inputs @ kernel + bias`; the inputs, the weights and the result have the layer's compute dtype."""
        # Keras has cast the inputs to the compute dtype, and casts the weights when they are read here.
        kernel, bias = tf.convert_to_tensor(self.kernel), tf.convert_to_tensor(self.bias)
        product = tf.matmul(tf.cast(inputs, tf.float32), tf.cast(kernel, tf.float32))
        return tf.cast(product, inputs.dtype) + bias


def critic(dtype: str) -> keras.Sequential:
    """Build the net that maps images, float32 [n, 64], to one number per image, float32 [n, 1].

    It has no batch norm, because the penalty needs the gradient of each number with respect to its own image alone.
    """
    return keras.Sequential(
        [
            keras.Input([PIXELS]),
            *_hidden(dtype),
            # Keras advises to compute the last layer in float32.
            Dense(1, dtype="float32"),
        ]
    )


def generator(dtype: str) -> keras.Sequential:
    """Build the net that maps noise, float32 [n, 32], to images, float32 [n, 64] with values from 0 to 1."""
    return keras.Sequential(
        [
            keras.Input([NOISE]),
            *_hidden(dtype),
            Dense(PIXELS, dtype="float32"),
            keras.layers.Activation("sigmoid", dtype="float32"),
        ]
    )


def _hidden(dtype: str) -> list[keras.layers.Layer]:
    leaky = tf.nn.leaky_relu
    return [
        Dense(HIDDEN, dtype),
        keras.layers.Activation(leaky, dtype=dtype),
        Dense(HIDDEN, dtype),
        keras.layers.Activation(leaky, dtype=dtype),
    ]
