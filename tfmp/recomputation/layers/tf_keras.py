"""Recompute for layers and models of tf_keras, the package that continues Keras 2."""

import tf_keras

from tfmp.recomputation.layers.keras2 import RecomputeKeras2


@tf_keras.saving.register_keras_serializable(package="tfmp", name="Recompute")
class Recompute(RecomputeKeras2, tf_keras.layers.Wrapper):
    """`tfmp.Recompute` for tf_keras; `RecomputeKeras2`, the base class, documents it."""

    _keras = tf_keras
