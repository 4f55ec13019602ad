"""The front-ends for optimizers of tf_keras, the package that continues Keras 2."""

import tf_keras

from tfmp.hosts.keras.legacy import front_ends_of

LossScaleOptimizerTfKeras, LossScaleOptimizerLegacyTfKeras = front_ends_of(tf_keras, __name__, "TfKeras")
