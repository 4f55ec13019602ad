"""The two nets, of dense layers that compute in float16 over float32 weights."""

import keras
import tensorflow as tf

PIXELS = 64
NOISE = 32
HIDDEN = 256


class Dense(keras.layers.Layer):
    """A dense layer that multiplies as Tensor Cores do: float16 in, float32 sums, float16 out.

    Keras' own does too on a GPU; on a CPU, TensorFlow 2.15's float16 product is some 30 times slower than this.

    Args:
        units: The width of its output.
        dtype: A policy: `mixed_float16` computes in float16, `float32` in float32.
    """

    def __init__(self, units: int, dtype: str) -> None:
        super().__init__(dtype=dtype)
        self.units = units

    def build(self, input_shape: tuple[int | None, ...]) -> None:
        """Make the weights, in float32."""
        self.kernel = self.add_weight(shape=(input_shape[-1], self.units), initializer="glorot_uniform", name="kernel")
        self.bias = self.add_weight(shape=(self.units,), initializer="zeros", name="bias")
        self.built = True

    def call(self, inputs: tf.Tensor) -> tf.Tensor:
        """Return `inputs @ kernel + bias`, all three and the result in the layer's compute dtype."""
        # Keras casts the inputs, and what it reads of the weights here.
        kernel, bias = tf.convert_to_tensor(self.kernel), tf.convert_to_tensor(self.bias)
        product = tf.matmul(tf.cast(inputs, tf.float32), tf.cast(kernel, tf.float32))
        return tf.cast(product, inputs.dtype) + bias


def critic(dtype: str) -> keras.Sequential:
    """Build the net that maps images, float32 [n, 64], to a number each, float32 [n, 1].

    It has no batch norm: the penalty is one for each image by itself.
    """
    return keras.Sequential(
        [
            keras.Input([PIXELS]),
            *_hidden(dtype),
            # In float32, as Keras advises for what comes last.
            Dense(1, dtype="float32"),
        ]
    )


def generator(dtype: str) -> keras.Sequential:
    """Build the net that maps noise, float32 [n, 32], to images, float32 [n, 64] from 0 to 1."""
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
