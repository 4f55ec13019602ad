"""Recompute for layers and models of Keras 2.15, which is `tf.keras` in TensorFlow 2.15."""

import keras

from tfmp.recomputation.layers.keras2 import RecomputeKeras2


@keras.saving.register_keras_serializable(package="tfmp", name="Recompute")
class Recompute(RecomputeKeras2, keras.layers.Wrapper):
    """`tfmp.Recompute` for Keras 2.15; `RecomputeKeras2`, the base class, documents it."""

    _keras = keras
