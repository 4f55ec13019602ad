"""The front-end for optimizers of tf_keras, the package that continues Keras 2."""

import tf_keras

from tfmp.optimizers.keras2 import with_bases_of

# Saved models hold the names of this module and of the class.
LossScaleOptimizerTfKeras = with_bases_of(tf_keras, "LossScaleOptimizerTfKeras", __name__)
