"""A Keras callback that shows the loss scale: in the progress bar, and wherever else Keras shows its logs."""

import sys
from typing import Any

import tensorflow as tf

from tfmp.optimizers.base import LossScaleOptimizer

# TensorFlow has loaded the Keras that is `tf.keras`; where tf_keras is loaded too, the user asked for it. Either serves
# in the `fit` of both: a Keras calls its callbacks' methods, whatever they derive from.
if "tf_keras" in sys.modules:
    import tf_keras as keras
else:
    import keras


class LossScaleCallback(keras.callbacks.Callback):
    """Adds `loss_scale` and `skipped_steps` to the logs of `fit`, at every batch and every epoch.

    Put it first: the progress bar, `History`, `CSVLogger`, `TensorBoard` and other callbacks behind it show the two as
    they show the loss. They are the optimizer's own after that batch, `skipped_steps` the total so far. Validation and
    `evaluate` are left as they are.

    Keras 2 (tf_keras too) shows in its progress bar the mean over the epoch of all that is no metric of the model. For
    the values themselves put `keras.callbacks.ProgbarLogger("steps", stateful_metrics=["loss_scale", "skipped_steps"])`
    behind this callback, or use `verbose=2`.

    Keras 2 reads the logs of a batch only with `verbose=1` or for a callback that needs numbers. Where it does not,
    nothing is read or added for a batch: `TensorBoard(update_freq="batch")` alone shows the two by epochs.

    Raises:
        TypeError: When training begins: the model was not compiled with a `tfmp.LossScaleOptimizer`.

    Example:
        >>> import keras, tfmp
        >>> model = keras.Sequential([keras.layers.Dense(1)])
        >>> manager = tfmp.ExponentialUpdateLossScaleManager(1024, incr_every_n_steps=2)
        >>> model.compile(tfmp.LossScaleOptimizer(keras.optimizers.SGD(0.01), manager), loss="mse")
        >>> history = model.fit(tf.ones([8, 3]), tf.ones([8, 1]), batch_size=4, epochs=2, verbose=0,
        ...                     callbacks=[tfmp.LossScaleCallback()])
        >>> history.history["loss_scale"], history.history["skipped_steps"]
        ([2048.0, 4096.0], [0, 0])
    """

    def __init__(self) -> None:
        super().__init__()
        self.params: dict[str, Any] = {}

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Refuse a model that has no loss scale.

        Args:
            logs: Not used.
        """
        del logs
        opt = self.model.optimizer
        if not isinstance(opt, LossScaleOptimizer):
            raise TypeError(
                f"LossScaleCallback shows the scale of a tfmp.LossScaleOptimizer, got a model with {opt!r} of type "
                f"{type(opt).__module__}.{type(opt).__qualname__}: compile it with "
                "tfmp.LossScaleOptimizer(optimizer, manager)."
            )

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Add the two to the logs of a batch, if those are read.

        Args:
            batch: Not used.
            logs: The logs.
        """
        del batch
        # Tensors come in Keras 2's own dict, which it takes for the epoch's logs once it holds more than the metrics.
        if not any(isinstance(value, tf.Tensor) for value in (logs or {}).values()):
            self._add_to(logs)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Add the two to the logs of an epoch.

        Args:
            epoch: Not used.
            logs: The logs.
        """
        del epoch
        self._add_to(logs)

    def _add_to(self, logs: dict[str, Any] | None) -> None:
        if logs is not None:
            opt = self.model.optimizer
            logs.update(loss_scale=float(opt.loss_scale), skipped_steps=int(opt.skipped_steps))

    # Private API of Keras 2, whose own answers would have it wait for every batch's logs; with verbose=1 it does so
    # anyway. A callback is called all the same when another one says yes. The other two are for Keras 3's base, which
    # has none of them.
    def _implements_train_batch_hooks(self) -> bool:
        return self.params.get("verbose", 1) == 1

    def _implements_test_batch_hooks(self) -> bool:
        return False

    def _implements_predict_batch_hooks(self) -> bool:
        return False
