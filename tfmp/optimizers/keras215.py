"""The front-end for optimizers of Keras 2.15, which is `tf.keras` in TensorFlow 2.15."""

import keras

from tfmp.optimizers import keras2, keras_legacy

# Saved models hold the names of this module and of the classes.
LossScaleOptimizerKeras215 = keras2.with_bases_of(keras, "LossScaleOptimizerKeras215", __name__)
LossScaleOptimizerLegacyKeras215 = keras_legacy.with_bases_of(keras, "LossScaleOptimizerLegacyKeras215", __name__)
# The name that `model_to_estimator` looks up, for the legacy front-end that it makes of the other one.
keras.utils.get_custom_objects()[LossScaleOptimizerKeras215.__name__.lower()] = LossScaleOptimizerLegacyKeras215
