"""The properties in which an optimizer or a scaler shows its loss scale and the results of its steps."""

from typing import ClassVar

import tensorflow as tf

from tfmp.core.managers import LossScaleManager
from tfmp.core.overflow.found import OverflowReport
from tfmp.core.spikes.detector import SpikeDetector
from tfmp.core.spikes.watch import SpikeReport
from tfmp.core.step.scaler import LossScaler


class StepProperties:
    """Properties for the loss scale and the results of steps: the base of classes with a manager and a scaler."""

    #: Decides the loss scale.
    manager: LossScaleManager
    _loss_scale_manager: LossScaleManager
    #: Decides which steps are skipped as spikes; None if none are.
    spike_detector: SpikeDetector | None
    _scaler: LossScaler

    def __repr__(self) -> str:
        """Show the manager, the settings that differ from their defaults and, in an eager program, the state."""
        shown = f"tfmp.{self._public_name}({', '.join([*self._settings_to_show(), repr(self._loss_scale_manager)])})"
        with tf.init_scope():
            if not tf.executing_eagerly():
                return f"<{shown}>"
            applied, skipped = int(self.applied_steps), int(self.skipped_steps)
        return f"<{shown}: applied_steps={applied}, skipped_steps={skipped}>"

    #: The name of the public class.
    _public_name: ClassVar[str]

    def _settings_to_show(self) -> list[str]:
        return []

    @property
    def loss_scale(self) -> tf.Tensor:
        """The loss scale, a float32 scalar."""
        return self._loss_scale_manager.get_loss_scale()

    @property
    def last_step_applied(self) -> tf.Tensor:
        """True if the last step was applied, and before the first step; a boolean scalar."""
        return self._loss_scale_manager.get_status().last_step_applied

    @property
    def last_step_finite(self) -> tf.Tensor:
        """True if no gradient of the last step overflowed, and before the first step; a boolean scalar.

        It differs from `last_step_applied` with `overflow_drops="micro_batch"`, where a step can be applied without
        the micro-batches that overflowed, and with `skip_spikes`, where a step can be skipped as a spike.
        """
        return self._loss_scale_manager.get_status().last_step_finite

    @property
    def attempted_steps(self) -> tf.Tensor:
        """The number of steps applied or skipped since the session, or the eager program, began; an int64 scalar."""
        return self._loss_scale_manager.get_status().attempted_steps

    @property
    def applied_steps(self) -> tf.Tensor:
        """The number of steps applied since the session, or the eager program, began; an int64 scalar."""
        return self._loss_scale_manager.get_status().applied_steps

    @property
    def skipped_steps(self) -> tf.Tensor:
        """The number of steps skipped since the session, or the eager program, began; an int64 scalar."""
        return self._loss_scale_manager.get_status().skipped_steps

    @property
    def consecutive_skipped_steps(self) -> tf.Tensor:
        """The number of steps skipped since the last applied one; an int64 scalar."""
        return self._loss_scale_manager.get_status().consecutive_skipped_steps

    @property
    def skipped_spikes(self) -> tf.Tensor:
        """How many of the skipped steps were skipped as spikes, by a `tfmp.SpikeDetector`; an int64 scalar."""
        return tf.constant(0, tf.int64) if self.spike_detector is None else self.spike_detector.skipped_spikes

    @property
    def gradient_norm(self) -> tf.Tensor:
        """The L2 norm of the gradients of the last step; a float64 scalar, NaN before the first step.

        It is the norm of the gradients that the optimizer gets, in true magnitude: of their sum over all replicas, or
        their mean over Horovod's workers; with accumulation, of the mean of the window. It is measured before clipping
        by the optimizer, and by `tfmp.clip_by_norm` and its like. If a gradient overflowed, it is infinite or NaN. With
        a `tfmp.GradScaler`, each call of `step` sets it.

        Steps measure it if `record_gradient_norm` was called before they were built, or if there is a spike detector.
        In a TF1 graph neither is needed, and the property is a tensor to fetch together with the step. If the step is
        in a conditional, as with `accumulation_steps`, or in a function, or if its optimizer sums over replicas itself,
        the norm must be recorded there too, and is fetched in a later `session.run` than the step.

        Raises:
            AttributeError: The norm is not recorded.

        Examples:
            >>> import tfmp
            >>> scaler = tfmp.GradScaler(init_scale=8)
            >>> scaler.record_gradient_norm()
            >>> w, optimizer = tf.Variable([1.0, 1.0]), tf.compat.v1.train.GradientDescentOptimizer(0.5)
            >>> _ = scaler.step(optimizer, [(tf.constant([24.0, 32.0]), w)])
            >>> float(scaler.gradient_norm)
            5.0
        """
        return self._scaler.norms.read()

    def record_gradient_norm(self) -> None:
        """Let the steps that are built from now on measure the norm of their gradients; see `gradient_norm`.

        Call it before a `tf.function` that takes steps is first called.
        """
        self._scaler.norms.record()

    @property
    def records_gradient_norm(self) -> bool:
        """Whether steps that are built now measure the norm of their gradients; see `record_gradient_norm`."""
        return self._scaler.norms.is_recorded

    def spike_reports(self) -> list[SpikeReport]:
        """Return a `tfmp.SpikeReport` on the last spike, for each list of variables with which a step can be one."""
        return self._scaler.norms.spike_reports()

    def overflow_reports(self) -> list[OverflowReport]:
        """Return how often the gradient of each variable overflowed since the session or the eager program began.

        Values are counted on the device, and only on steps in which a gradient overflowed. With several replicas, each
        count is the largest count among the replicas.

        Returns:
            A `tfmp.OverflowReport` for each list of variables with which steps were taken, usually a single one.

        Examples:
            >>> import tfmp
            >>> w = tf.Variable([1.0, 2.0], name="w")
            >>> opt = tfmp.LossScaleOptimizer(
            ...     tf.compat.v1.train.GradientDescentOptimizer(0.5), tfmp.FixedLossScaleManager(1024))
            >>> _ = opt.minimize(lambda: tf.reduce_sum(w * [1.0, float("inf")]), var_list=[w])
            >>> report, = opt.overflow_reports()
            >>> report.names, report.last.numpy().tolist(), report.steps.numpy().tolist()
            (['w:0'], [[1, 0, 0]], [1])
        """
        return self._scaler.overflow_reports()
