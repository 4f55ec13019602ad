"""A Keras callback that shows the loss scale: in the progress bar, and wherever else Keras shows its logs."""

import inspect
import logging
import sys
from typing import Any

import numpy as np
import tensorflow as tf

from tfmp.core import settings
from tfmp.core.call_sites import line_of_call
from tfmp.core.outcomes import LossScaleStatus
from tfmp.core.overflow_counts import OverflowReport
from tfmp.core.step_properties import StepProperties
from tfmp.monitoring.log import visible_logger
from tfmp.monitoring.overflow_messages import GuiltyVariables
from tfmp.monitoring.stuck import LossScaleStuckError, OnStuck, StuckWatch, several_processes
from tfmp.optimizers.base import LossScaleOptimizer

# TensorFlow has loaded the Keras that is `tf.keras`; where tf_keras is loaded too, the user asked for it. Either serves
# in the `fit` of both: a Keras calls its callbacks' methods, whatever they derive from.
if "tf_keras" in sys.modules:
    import tf_keras as keras
else:
    import keras

_logger = logging.getLogger("tfmp")

_SCALAR = tf.compat.v1.SummaryMetadata(
    plugin_data=tf.compat.v1.SummaryMetadata.PluginData(plugin_name="scalars"),
    data_class=1,  # DATA_CLASS_SCALAR, which TensorFlow does not export
)


class LossScaleCallback(keras.callbacks.Callback):
    """Adds `loss_scale` and `skipped_steps` to the logs of `fit`, at every batch and every epoch.

    The progress bar, `History`, `CSVLogger`, `TensorBoard` and other callbacks show the two as they show the loss: this
    callback puts itself in front of those that `fit` was given before it. The values are the optimizer's own after that
    batch, `skipped_steps` the total so far. Validation and `evaluate` are left as they are.

    Keras 2 (tf_keras too), and Keras 3 before 3.11, show in the progress bar the mean over the epoch of all that is no
    metric of the model. For the values themselves use `verbose=2`, or in Keras 2 put
    `keras.callbacks.ProgbarLogger("steps", stateful_metrics=["loss_scale", "skipped_steps"])` behind this callback.

    Keras 2 reads the logs of a batch only with `verbose=1` or for a callback that needs numbers. Where it does not,
    nothing is added for a batch: `TensorBoard(update_freq="batch")` alone shows the two by epochs.

    A report comes every N batches and at the end of each epoch. There, and where the logs are read anyway, numbers are
    fetched from the device; nowhere else. A report writes summaries, and after skipped steps it names the variables
    whose gradients overflowed on the last of them; the end of `fit` tells how often each did since it began. And it
    says, once, when training is stuck: the scale sits at its floor and steps are skipped all the same, it was lowered
    again and again without one applied step, or the loss itself is infinite or NaN. Where several processes train
    together, give the callback to each of them: the loss, which is one process's own, is then only warned of.

    All that is said goes to `logging.getLogger("tfmp")`, as the hook's reports do.

    A model whose optimizer is none of tfmp's is warned of, once, and left alone: in float16 because it needs loss
    scaling, in float32 or bfloat16 because the callback then shows nothing, as where a switch turns float16 off.

    Args:
        every_n_steps: Batches between two reports of an epoch.
        summary_dir: A directory for TensorBoard summaries: the fields of `tfmp.LossScaleStatus`, over
            the optimizer's `iterations`, or the scaler's applied steps. By default none are written.
        on_stuck: What to do when training is stuck: "warn", "stop" (warn, and end `fit`), or "raise".
        stuck_after: After how many back-offs in a row without an applied step it is stuck.
        scaler: The `tfmp.GradScaler` of a model whose own `train_step` scales the loss; by default the model's
            optimizer, a `tfmp.LossScaleOptimizer`.

    Raises:
        TypeError: A number is none, or `scaler` is no scaler.
        ValueError: An argument is out of range.
        LossScaleStuckError: At a report: training is stuck, and `on_stuck` is "raise".

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

    def __init__(
        self,
        *,
        every_n_steps: int = 100,
        summary_dir: str | None = None,
        on_stuck: OnStuck = "warn",
        stuck_after: int = 64,
        scaler: StepProperties | None = None,
    ) -> None:
        super().__init__()
        if scaler is not None and not isinstance(scaler, StepProperties):
            raise TypeError(f"scaler must be a tfmp.GradScaler, got {scaler!r} of type {type(scaler).__name__}.")
        self._scaler = scaler
        self.params: dict[str, Any] = {}
        self._every_n_steps = settings.count("every_n_steps", every_n_steps)
        self._summary_dir = summary_dir
        self._writer: tf.summary.SummaryWriter | None = None
        self._stuck = StuckWatch(on_stuck, stuck_after)
        self._batches = 0
        self._guilty = GuiltyVariables()
        self._told_of_optimizer = False

    def set_params(self, params: dict[str, Any]) -> None:
        """Take note of how `fit` was called.

        Args:
            params: The parameters, `verbose` among them.
        """
        super().set_params(params)
        # Private API of Keras 2, which waits for every batch's logs unless all callbacks that it calls for a batch say
        # this (its CallbackList asks after it set the parameters). With verbose=1 the progress bar waits anyway, and
        # is to show what is added here.
        self._supports_tf_logs = params.get("verbose", 1) != 1

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Go to the front of the callbacks; warn of a model that has no loss scale.

        Args:
            logs: Not used.
        """
        del logs
        _put_in_front(self)
        self._stuck.start(several=several_processes(self.model.distribute_strategy))
        self._batches = 0
        opt = self.model.optimizer
        if self._opt is not None:
            self._guilty = GuiltyVariables(self._overflow_reports())
            return
        if not self._told_of_optimizer:
            self._told_of_optimizer = True
            _logger.warning("%s", _advice(self.model, opt, line_of_call()))

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Add the two to the logs of a batch, if those are read; report if it is time to.

        Args:
            batch: Its index in the epoch.
            logs: The logs.
        """
        # The index, since `steps_per_execution` leaves batches out.
        before = self._batches if self._batches <= batch else 0
        self._batches = batch + 1
        # Tensors come in Keras 2's own dict, which it takes for the epoch's logs once it holds more than the metrics.
        if not any(isinstance(value, tf.Tensor) for value in (logs or {}).values()):
            self._add_to(logs)
        if self._batches // self._every_n_steps > before // self._every_n_steps:
            self._report(logs)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Add the two to the logs of an epoch, and report.

        Args:
            epoch: Not used.
            logs: The logs.
        """
        del epoch
        self._add_to(logs)
        self._report(logs)

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        """Tell which variables overflowed how often since `fit` began.

        Args:
            logs: Not used.
        """
        del logs
        if self._opt is not None:
            self._show_tables()

    @property
    def _opt(self) -> Any:  # noqa: ANN401 - of any Keras
        """The scaler, or the model's optimizer if it is one of ours."""
        if self._scaler is not None:
            return self._scaler
        return self.model.optimizer if isinstance(self.model.optimizer, LossScaleOptimizer) else None

    def _add_to(self, logs: dict[str, Any] | None) -> None:
        if logs is not None and self._opt is not None:
            # The manager's, since a scaler takes a read of its own `loss_scale` for scaling by hand.
            loss_scale = self._opt._loss_scale_manager.get_loss_scale()
            logs.update(loss_scale=float(loss_scale), skipped_steps=int(self._opt.skipped_steps))

    def _report(self, logs: dict[str, Any] | None) -> None:
        if self._opt is None:
            return
        manager = self._opt._loss_scale_manager
        status = _numbers(manager.get_status())
        if self._summary_dir is not None:
            self._write_summaries(status)
        for sentence in self._guilty.sentences(self._overflow_reports()):
            visible_logger().info("%s", sentence)
        losses = [float(logs["loss"])] if logs and "loss" in logs else []
        try:
            if self._stuck.wants_stop(manager, status, losses):
                self.model.stop_training = True
        except LossScaleStuckError:
            # Keras ends no callback after an error.
            self._show_tables()
            raise

    def _overflow_reports(self) -> list[OverflowReport]:
        return [
            OverflowReport(report.names, np.asarray(report.last), np.asarray(report.steps))
            for report in self._opt.overflow_reports()
        ]

    def _show_tables(self) -> None:
        for table in self._guilty.tables(self._overflow_reports()):
            visible_logger().info("%s", table)

    def _write_summaries(self, status: LossScaleStatus) -> None:
        if self._writer is None:
            self._writer = tf.summary.create_file_writer(self._summary_dir)
        # Keras' TensorBoard says for all of `fit` what may be written.
        # A loop's own step may have several optimizers.
        step = self._opt.iterations if self._scaler is None else status.applied_steps
        with self._writer.as_default(int(step)), tf.summary.record_if(True):
            for tag, value in status._asdict().items():
                # What tf.summary.scalar writes, which itself needs TensorBoard to be installed.
                tf.summary.write(tag, np.float32(value), metadata=_SCALAR)
        self._writer.flush()

    # Private API of Keras 2, whose own answer would be that all three are implemented; Keras 3's base has none of them.
    def _implements_train_batch_hooks(self) -> bool:
        return True

    def _implements_test_batch_hooks(self) -> bool:
        return False

    def _implements_predict_batch_hooks(self) -> bool:
        return False


def _numbers(status: LossScaleStatus) -> LossScaleStatus:
    """Return a status as numbers of Python."""
    loss_scale, last_step_finite, *counts = status
    return LossScaleStatus(float(loss_scale), bool(last_step_finite), *map(int, counts))


def _computes_in_float16(layer: Any) -> bool:  # noqa: ANN401 - of any Keras
    return getattr(layer, "compute_dtype", None) == "float16" or any(
        _computes_in_float16(part) for part in getattr(layer, "layers", ())
    )


def _put_in_front(callback: LossScaleCallback) -> None:
    """Move a callback to the front of the list that is calling it, if it can be found.

    `CSVLogger` takes its columns from the first logs that it sees.
    """
    # Keras gives a callback no way to see the others, so they are read from the `CallbackList` among the callers.
    frame = inspect.currentframe()
    while frame is not None:
        caller = frame.f_locals.get("self")
        callbacks = getattr(caller, "callbacks", []) if type(caller).__name__ == "CallbackList" else []
        if any(each is callback for each in callbacks):
            # Those before it were called already, so the loop over the list calls none twice.
            callbacks[:] = [callback, *(each for each in callbacks if each is not callback)]
            return
        frame = frame.f_back


def _advice(model: Any, opt: Any, line: str) -> str:  # noqa: ANN401 - of any Keras
    inner = getattr(opt, "inner_optimizer", None)
    in_float16 = _computes_in_float16(model)
    if inner is not None:
        found = "Keras' own LossScaleOptimizer, which tfmp does not watch"
    elif in_float16:
        found = f"{type(opt).__name__} alone: small gradients become zero"
    else:
        found = f"{type(opt).__name__} alone, which is enough for float32 and bfloat16"
    return (
        f"the model that {line} trains {'computes in float16' if in_float16 else 'was compiled'} with {found}. "
        f"{'Write' if in_float16 else 'To train it in float16, write'} model.compile(tfmp.LossScaleOptimizer("
        f"{type(inner or opt).__name__}(...)), ...). LossScaleCallback shows nothing here."
    )
