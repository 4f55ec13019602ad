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


#: Before the first step.
NO_STEPS = StepOutcomes(np.int64(0), np.int64(0), np.int64(0), np.True_)


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
