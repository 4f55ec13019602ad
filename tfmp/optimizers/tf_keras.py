"""The front-end for optimizers of tf_keras, the package that continues Keras 2."""

import tf_keras

from tfmp.optimizers.keras.files import StateInFiles, register_managers
from tfmp.optimizers.keras2 import LossScaleOptimizerKeras2

register_managers(tf_keras)


class _StateInFiles(StateInFiles, tf_keras.losses.Loss):
    pass


@tf_keras.saving.register_keras_serializable(package="tfmp", name="LossScaleOptimizer")
class LossScaleOptimizerTfKeras(
    LossScaleOptimizerKeras2, tf_keras.optimizers.Optimizer, tf_keras.mixed_precision.LossScaleOptimizer
):
    """The `tfmp.LossScaleOptimizer` around an optimizer of tf_keras.

    `tfmp.LossScaleOptimizer` documents the arguments and methods, and `LossScaleOptimizerKeras2` what differs here.

    Examples:
        >>> import tf_keras, tfmp
        >>> import tensorflow as tf
        >>> w = tf.Variable([1.0, 2.0])
        >>> manager = tfmp.ExponentialUpdateLossScaleManager(1024, 1000, decr_every_n_nan_or_inf=1, decr_ratio=0.5)
        >>> opt = tfmp.LossScaleOptimizer(tf_keras.optimizers.SGD(0.5), manager)
        >>> for factor in (1.0, float("inf")):
        ...     opt.minimize(lambda: tf.reduce_sum(w) * factor, [w])
        ...     print(w.numpy(), float(opt.loss_scale), int(opt.iterations))
        [0.5 1.5] 1024.0 1
        [0.5 1.5] 512.0 1
    """

    _keras = tf_keras
    _state_in_files = _StateInFiles
