"""Counts the steps that were applied and those that were skipped."""

from typing import NamedTuple

import numpy as np
import tensorflow as tf


class LossScaleStatus(NamedTuple):
    """The loss scale and the counts of the steps: what monitors show. They use the fields' names as their tags.

    Attributes:
        loss_scale: The loss scale; float32.
        last_step_applied: Whether the last step was applied; True before the first step; bool.
        last_step_finite: Whether no gradient of the last step overflowed; True before the first step; bool. The
            property `last_step_finite` of `tfmp.LossScaleOptimizer` says when it differs from `last_step_applied`.
        attempted_steps: Steps that were applied or skipped; int64.
        applied_steps: Steps that were applied; int64.
        skipped_steps: Steps that were not applied; int64.
        consecutive_skipped_steps: Skipped steps since the last applied one; int64.
    """

    loss_scale: tf.Tensor
    last_step_applied: tf.Tensor
    last_step_finite: tf.Tensor
    attempted_steps: tf.Tensor
    applied_steps: tf.Tensor
    skipped_steps: tf.Tensor
    consecutive_skipped_steps: tf.Tensor


class StepCounters(NamedTuple):
    """What is stored of the steps since the session, or the eager program, began; the names are those of the status."""

    applied_steps: tf.Tensor
    skipped_steps: tf.Tensor
    consecutive_skipped_steps: tf.Tensor
    last_step_applied: tf.Tensor


class LastDifference(NamedTuple):
    """When a step last was finite and skipped, as a spike; or applied without micro-batches, which had overflowed."""

    #: The number of attempted steps then; -1 if there was no such step; int64.
    at_step: tf.Tensor


#: The states before the first step.
NO_STEPS = StepCounters(np.int64(0), np.int64(0), np.int64(0), np.True_)
NO_DIFFERENCE = LastDifference(np.int64(-1))


def status_of(loss_scale: tf.Tensor, counters: StepCounters, last_difference: LastDifference) -> LossScaleStatus:
    """Return the status that a loss scale and counters make."""
    # Computed, not stored: a file that Keras saved has a place for each stored variable, and none for this one.
    attempted_steps = counters.applied_steps + counters.skipped_steps
    differs = tf.equal(attempted_steps, last_difference.at_step)
    last_step_finite = tf.not_equal(counters.last_step_applied, differs)
    return LossScaleStatus(
        loss_scale, last_step_finite=last_step_finite, attempted_steps=attempted_steps, **counters._asdict()
    )
