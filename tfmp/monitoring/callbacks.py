"""A Keras callback that shows the loss scale in the progress bar and wherever else Keras shows its logs."""

import inspect
import logging
import math
import sys
from typing import Any

import numpy as np
import tensorflow as tf

from tfmp.any_keras.which import keras_of
from tfmp.core import settings
from tfmp.core.managers.step_counters import LossScaleStatus
from tfmp.core.messages import script_line
from tfmp.core.step.properties import StepProperties
from tfmp.hosts.base import LossScaleOptimizer
from tfmp.mixed_precision.keras_layers import called_layers_of, compute_dtype
from tfmp.monitoring.norm_history import NormHistory
from tfmp.monitoring.reporter import Reporter, StepValues, with_values
from tfmp.monitoring.stuck import OnStuck, several_processes
from tfmp.monitoring.summaries import FitSummaries
from tfmp.ranges.history import RangeHistory
from tfmp.ranges.recorders import FitRanges, trace_again

# TensorFlow loads only the Keras that is its `tf.keras`. If tf_keras is loaded, the user has asked for it. A callback
# derived from the base class of one Keras works in the `fit` of another Keras too: `fit` only calls its methods.
if "tf_keras" in sys.modules:
    import tf_keras as keras
else:
    import keras

_logger = logging.getLogger("tfmp")


class LossScaleCallback(keras.callbacks.Callback):
    """Adds `loss_scale`, `skipped_steps` and `gradient_norm` to the logs of `fit`, after each batch and each epoch.

    The progress bar, `History`, `CSVLogger`, `TensorBoard` and other callbacks then show these values as they show the
    loss: the scale after the batch, the total number of skipped steps so far, and the norm of the gradients of the last
    step, unscaled and before clipping. If the optimizer has a `tfmp.SpikeDetector`, there is also `skipped_spikes`: how
    many of the skipped steps were skipped as spikes. The callback moves itself to the front of the list of callbacks,
    so that those before it see the values too. Validation, `evaluate` and `predict` are not changed.

    Every `every_n_steps` batches, and at the end of each epoch, the callback reports: it writes TensorBoard summaries,
    if `summary_dir` is given, and after skipped steps it names the variables whose gradients overflowed at the last
    skipped step, or made the norm of the last spike so large. It warns, once until a step has been applied, if training
    is stuck; `tfmp.LossScaleStuckError` says when it is. At the end of `fit` it logs how often the gradient of each
    variable overflowed during that `fit`. If several processes train together, give the callback to each of them.

    Messages go to `logging.getLogger("tfmp")`. When the callback first names a variable, it sets the level of this
    logger to INFO unless the program has set a level, and adds a handler for standard error if none is set up.

    Values are fetched from the device only for a report, and where Keras reads the logs of a batch anyway. Keras 2
    reads them only with `verbose=1`, or if another callback needs numbers; otherwise it shows them by epoch only. Its
    progress bar, and that of Keras 3 before 3.11, shows means over the epoch. If the model's optimizer is not a
    `tfmp.LossScaleOptimizer` (and no `scaler` is given), the callback shows nothing and warns once.

    Args:
        every_n_steps: The number of batches between two reports of an epoch.
        summary_dir: A directory for TensorBoard summaries, by default none. Each report writes the fields of
            `tfmp.LossScaleStatus` there, `gradient_norm`, and `skipped_spikes` if there is a detector. Their step is
            the optimizer's `iterations`, or, if `scaler` is given, the number of its applied steps.
        on_stuck: What to do when training is stuck: "warn" logs a warning, "stop" logs it and ends `fit`, "raise"
            raises `LossScaleStuckError`.
        stuck_after: Training is stuck after this many back-offs (reductions of the scale) without an applied step.
        ranges_every_n_steps: The number of steps between two recordings of the powers of two of gradients and weights;
            by default there are none. A recording counts the gradients of one step on the device. It adds
            `gradients_zero`, `gradients_lost` and `gradients_subnormal` to the logs: the shares of gradients that are
            0, become 0 in float16 at the present loss scale, and lose bits; NaN before the first recording. It writes
            these, and TensorBoard histograms over exponents, to `summary_dir`. See the property `ranges`.
        ranges_batch: Inputs and labels, as `fit` takes them. With them, each recording also runs this batch forward and
            backward, in the types and at the loss scale of the training, to count activations and their gradients. The
            shares are then those of all these gradients. The model must be compiled with a loss.
        gradient_norm: Whether the norm of the gradients is measured and shown. It costs little on a single replica, and
            with Keras 2, which sums gradients before the check; otherwise the replicas sum all gradients once more. If
            several processes train together, it is shown only if the optimizer's `record_gradient_norm` was called in
            each of them, or if there is a detector.
        scaler: The `tfmp.GradScaler` or the `tfmp.LossScaleOptimizer` of a model whose own `train_step` scales the
            loss. By default the callback reads the model's optimizer, which must then be a `tfmp.LossScaleOptimizer`.

    Raises:
        TypeError: `every_n_steps` or `stuck_after` is not a number, or `scaler` is neither a `tfmp.GradScaler`
            nor a `tfmp.LossScaleOptimizer`.
        ValueError: An argument is out of range.
        LossScaleStuckError: At a report, if training is stuck and `on_stuck` is "raise".

    Examples:
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
        ranges_every_n_steps: int | None = None,
        ranges_batch: Any = None,  # noqa: ANN401 - whatever the model takes
        gradient_norm: bool = True,
        scaler: StepProperties | None = None,
    ) -> None:
        super().__init__()
        if scaler is not None and not isinstance(scaler, StepProperties):
            raise TypeError(
                f"scaler must be a tfmp.GradScaler or a tfmp.LossScaleOptimizer, got "
                f"{scaler!r} of type {type(scaler).__name__}."
            )
        self._scaler = scaler
        self.params: dict[str, Any] = {}
        self._every_n_steps = settings.count("every_n_steps", every_n_steps)
        self._summaries = FitSummaries(summary_dir)
        self._reporter = Reporter(on_stuck, stuck_after)
        self._batches = 0
        if ranges_batch is not None and ranges_every_n_steps is None:
            raise ValueError("ranges_batch is looked at every ranges_every_n_steps steps: pass that, too.")
        self._ranges = None if ranges_every_n_steps is None else FitRanges(ranges_every_n_steps, ranges_batch)
        self._shows_norm = settings.flag("gradient_norm", gradient_norm)
        self._warned_about_optimizer = False

    @property
    def norms(self) -> NormHistory:
        """The norms of the gradients, after each batch whose logs Keras reads and at each report.

        `callback.norms.plot("norms.png")` draws them.
        """
        return self._reporter.norms

    @property
    def ranges(self) -> RangeHistory:
        """The recorded powers of two; `callback.ranges.plot("ranges.png")` draws it.

        Raises:
            ValueError: `ranges_every_n_steps` was not given.
        """
        if self._ranges is None:
            raise ValueError("no ranges are looked at: pass ranges_every_n_steps to LossScaleCallback.")
        return self._reporter.ranges

    def set_params(self, params: dict[str, Any]) -> None:
        """Store the parameters of `fit`, and tell Keras 2 whether it must read the logs of each batch."""
        super().set_params(params)
        # Private API of Keras 2: it converts the logs of each batch to numbers, and so waits for the device, unless
        # this is True for all callbacks when this method returns. With verbose=1 the progress bar waits anyway.
        self._supports_tf_logs = params.get("verbose", 1) != 1

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Move to the front of the callbacks, and warn if the model has no loss scale."""
        del logs
        _put_in_front(self)
        opt = self._opt
        if opt is not None:
            several = several_processes(self.model.distribute_strategy)
            # If replicas sum gradients to measure the norm, all processes must, and perhaps only one has a callback.
            if self._shows_norm and not several:
                opt.record_gradient_norm()
                if math.isnan(float(opt.gradient_norm)):
                    trace_again(self.model)
            self._batches = 0
            self._reporter.begin(self._summaries, [self._values(with_counts=True)], several=several)
            if self._ranges is not None:
                self._ranges.begin(self.model, opt)
        elif not self._warned_about_optimizer:
            self._warned_about_optimizer = True
            _logger.warning("%s", _advice(self.model, self.model.optimizer, script_line()))

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Request the ranges of the coming step's gradients, if it is a step to record."""
        del batch, logs
        if self._ranges is not None and self._opt is not None:
            self._ranges.before_step()

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Add the values to the logs of a batch if Keras reads these logs, and report if a report is due."""
        # Counted by the index, because with `steps_per_execution` Keras calls this method for some batches only.
        before = self._batches if self._batches <= batch else 0
        self._batches = batch + 1
        if self._ranges is not None and self._opt is not None:
            recording = self._ranges.after_steps(self._batches - before)
            if recording is not None:
                self._reporter.record(recording, self._step())
        # Keras 2 passes tensors, in a dictionary that becomes the logs of the epoch if anything is added to it.
        is_read = not any(isinstance(value, tf.Tensor) for value in (logs or {}).values())
        is_due = self._batches // self._every_n_steps > before // self._every_n_steps
        self._tell(logs, is_read=is_read, is_due=is_due)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Add the values to the logs of an epoch, and report."""
        del epoch
        self._tell(logs, is_read=True, is_due=True)

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        """Log how often the gradient of each variable overflowed since `fit` began."""
        del logs
        if self._opt is not None:
            self._reporter.finish([self._values(with_counts=True)])

    @property
    def _opt(self) -> Any:  # noqa: ANN401 - an object of any Keras
        """The scaler if one was given, else the model's optimizer if tfmp wraps it, else None."""
        if self._scaler is not None:
            return self._scaler
        return self.model.optimizer if isinstance(self.model.optimizer, LossScaleOptimizer) else None

    def _tell(self, logs: dict[str, Any] | None, *, is_read: bool, is_due: bool) -> None:
        """Add the values of the last step to the logs if Keras reads these, and report them if a report is due."""
        if self._opt is None or not (is_read or is_due):
            return
        values = self._values(with_counts=is_due)
        if is_read and logs is not None:
            self._reporter.see(values)
            logs.update(loss_scale=values.status.loss_scale, skipped_steps=values.status.skipped_steps)
            logs.update(values.shown())
            if self._ranges is not None:
                logs.update(self._reporter.ranges._scalars())
        if is_due:
            losses = [float(logs["loss"])] if logs and "loss" in logs else []
            if self._reporter.report([values._replace(losses=losses)], self._step()):
                self.model.stop_training = True

    def _values(self, *, with_counts: bool) -> StepValues:
        """Return what is known of the last step; the counts are for reports only."""
        opt, detector = self._opt, self._opt.spike_detector
        # From the manager: a GradScaler takes a read of its own `loss_scale` as a sign that the script scales by hand.
        status = LossScaleStatus(*(np.asarray(value).item() for value in opt.manager.get_status()))
        norm = float(opt.gradient_norm) if self._shows_norm and opt.records_gradient_norm else None
        values = StepValues(opt.manager, status, norm, None if detector is None else int(opt.skipped_spikes))
        if not with_counts:
            return values
        return values._replace(
            overflows=[with_values(report, map(np.asarray, report[1:])) for report in opt.overflow_reports()],
            spikes=[with_values(report, map(np.asarray, report[1:])) for report in opt.spike_reports()],
            lasting_changes=0 if detector is None else int(detector.lasting_changes),
            max_consecutive_skips=0 if detector is None else detector.max_consecutive_skips,
        )

    def _step(self) -> int:
        """Return the step of summaries."""
        # A train_step with a scaler may use several optimizers, so none of their `iterations` counts its steps.
        step = self._opt.iterations if self._scaler is None else self._opt.applied_steps
        # Of a variable with copies on replicas, int() makes no number.
        return int(tf.convert_to_tensor(step))

    # Private API of Keras 2, which asks each callback for which batches it must be called. A callback whose base class
    # is that of Keras 3 would not have these methods.
    def _implements_train_batch_hooks(self) -> bool:
        return True

    def _implements_test_batch_hooks(self) -> bool:
        return False

    def _implements_predict_batch_hooks(self) -> bool:
        return False


def _put_in_front(callback: LossScaleCallback) -> None:
    """Move a callback to the front of the list of callbacks that Keras is calling, if that list can be found.

    A `CSVLogger` in front of it would miss our values: it takes its columns from the first logs that it sees.
    """
    # Keras gives a callback no access to the others, but one frame of the call stack is a method of its `CallbackList`.
    frame = inspect.currentframe()
    while frame is not None:
        caller = frame.f_locals.get("self")
        callbacks = getattr(caller, "callbacks", []) if type(caller).__name__ == "CallbackList" else []
        if any(each is callback for each in callbacks):
            # The callbacks in front of this one were called already, so Keras' loop over the list calls none twice.
            callbacks[:] = [callback, *(each for each in callbacks if each is not callback)]
            return
        frame = frame.f_back


def _advice(model: Any, opt: Any, line: str) -> str:  # noqa: ANN401 - an object of any Keras
    inner = getattr(opt, "inner_optimizer", None)
    keras = keras_of(model, "layers.Layer")
    in_float16 = keras is not None and any(
        compute_dtype(keras, layer) == "float16" for layer in called_layers_of(keras, model)
    )
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
