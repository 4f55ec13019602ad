"""What became of the steps: applied, or skipped."""

from typing import NamedTuple

import numpy as np
import tensorflow as tf


class StepOutcomes(NamedTuple):
    """What became of the steps since the session, or the eager program, began.

    Attributes:
        applied_steps: Steps whose gradients were finite on every replica; int64.
        skipped_steps: Steps that were not applied; int64.
        consecutive_skipped_steps: Skipped steps since the last applied one; int64.
        last_step_finite: Whether the last step was applied, True before the first; bool.
    """

    applied_steps: tf.Tensor
    skipped_steps: tf.Tensor
    consecutive_skipped_steps: tf.Tensor
    last_step_finite: tf.Tensor


class LossScaleStatus(NamedTuple):
    """The loss scale, and what became of the steps: what monitors show. The names are the tags that they show it by.

    Attributes:
        loss_scale: The loss scale; float32.
        last_step_finite: Whether the last step was applied, True before the first; bool.
        attempted_steps: Steps applied or skipped; int64.
        applied_steps: Steps whose gradients were finite on every replica; int64.
        skipped_steps: Steps that were not applied; int64.
        consecutive_skipped_steps: Skipped steps since the last applied one; int64.
    """

    loss_scale: tf.Tensor
    last_step_finite: tf.Tensor
    attempted_steps: tf.Tensor
    applied_steps: tf.Tensor
    skipped_steps: tf.Tensor
    consecutive_skipped_steps: tf.Tensor


#: Before the first step.
NO_STEPS = StepOutcomes(np.int64(0), np.int64(0), np.int64(0), np.True_)


def status_of(loss_scale: tf.Tensor, outcomes: StepOutcomes) -> LossScaleStatus:
    """Return the status that a scale and the outcomes make.

    Args:
        loss_scale: The loss scale.
        outcomes: What became of the steps.

    Example:
        >>> status_of(8.0, StepOutcomes(5, 3, 2, False)).attempted_steps
        8
    """
    # Not kept in a variable: files that Keras saved hold those that there are.
    attempted_steps = outcomes.applied_steps + outcomes.skipped_steps
    return LossScaleStatus(loss_scale=loss_scale, attempted_steps=attempted_steps, **outcomes._asdict())


def next_outcomes(outcomes: StepOutcomes, finite: tf.Tensor) -> StepOutcomes:
    """Return the outcomes after one more step.

    Args:
        outcomes: The outcomes before it.
        finite: A boolean scalar, whether the step was applied.

    Returns:
        The outcomes after it.

    Example:
        >>> zero = tf.constant(0, tf.int64)
        >>> [int(field) for field in next_outcomes(StepOutcomes(zero, zero, zero, True), tf.constant(False))]
        [0, 1, 1, 0]
    """
    applied = tf.cast(finite, tf.int64)
    skipped = 1 - applied
    return StepOutcomes(
        applied_steps=outcomes.applied_steps + applied,
        skipped_steps=outcomes.skipped_steps + skipped,
        consecutive_skipped_steps=(outcomes.consecutive_skipped_steps + 1) * skipped,
        last_step_finite=finite,
    )
