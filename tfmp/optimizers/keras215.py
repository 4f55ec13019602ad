"""The front-end for optimizers of Keras 2.15, which is `tf.keras` in TensorFlow 2.15."""

import keras

from tfmp.optimizers.keras2 import with_bases_of

# Saved models hold the names of this module and of the class.
LossScaleOptimizerKeras215 = with_bases_of(keras, "LossScaleOptimizerKeras215", __name__)
