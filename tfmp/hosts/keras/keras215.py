"""The front-ends for optimizers of Keras 2.15, which is `tf.keras` in TensorFlow 2.15."""

import keras

from tfmp.hosts.keras.legacy import front_ends_of

LossScaleOptimizerKeras215, LossScaleOptimizerLegacyKeras215 = front_ends_of(keras, __name__, "Keras215")
