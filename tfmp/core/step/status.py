"""What users read of the steps of an optimizer or a scaler."""

from typing import ClassVar

import tensorflow as tf

from tfmp.core.managers import LossScaleManager
from tfmp.core.overflow.overflow_counts import OverflowReport
from tfmp.core.step.scaler import LossScaler


class StepProperties:
    """The loss scale, and what became of the steps, for a class that has a manager and a scaler."""

    #: Decides the loss scale.
    manager: LossScaleManager
    _loss_scale_manager: LossScaleManager
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
        """Whether the last step was applied, a boolean scalar; True before the first step."""
        return self._loss_scale_manager.get_status().last_step_applied

    @property
    def last_step_finite(self) -> tf.Tensor:
        """Whether no gradient of the last step overflowed, a boolean scalar; True before the first step.

        Differs from `last_step_applied` only with `overflow_drops="micro_batch"`, where a step is applied without the
        micro-batches that overflowed.
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

    def overflow_reports(self) -> list[OverflowReport]:
        """Return whose gradients overflowed since the session, or the eager program, began.

        Counted on skipped steps only, on the device. With several replicas a count is the largest of theirs.

        Returns:
            A report for each list of variables that steps were taken for, of which there is one as a rule: `names`,
            and the int64 tensors `last` (a row for each variable: how many values were infinite, NaN, saturated on the
            last skipped step) and `steps` (on how many skipped steps it had any).

        Example:
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
