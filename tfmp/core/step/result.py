"""What all replicas agree on about a step."""

from typing import NamedTuple

import tensorflow as tf


class StepResult(NamedTuple):
    """What all replicas agree on about a step.

    Attributes:
        applied: Whether the gradients were applied; bool.
        finite: Whether no gradient overflowed; bool. Differs from `applied` only when overflowing micro-batches are
            dropped; it is then another tensor.
        max_abs: The largest magnitude, float32; None if the manager does not ask for it.
    """

    applied: tf.Tensor
    finite: tf.Tensor
    max_abs: tf.Tensor | None
