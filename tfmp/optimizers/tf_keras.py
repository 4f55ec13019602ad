"""The front-end for optimizers of tf_keras, the package that continues Keras 2."""

import tf_keras

from tfmp.optimizers import keras2, keras_legacy

# Saved models hold the names of this module and of the classes.
LossScaleOptimizerTfKeras = keras2.with_bases_of(tf_keras, "LossScaleOptimizerTfKeras", __name__)
LossScaleOptimizerLegacyTfKeras = keras_legacy.with_bases_of(tf_keras, "LossScaleOptimizerLegacyTfKeras", __name__)
# The name that `model_to_estimator` looks up, for the legacy front-end that it makes of the other one.
tf_keras.utils.get_custom_objects()[LossScaleOptimizerTfKeras.__name__.lower()] = LossScaleOptimizerLegacyTfKeras
