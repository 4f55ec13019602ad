"""The result of a step, which is the same on all replicas."""

from typing import NamedTuple

import tensorflow as tf


class StepResult(NamedTuple):
    """The result of a step, on which all replicas agree.

    Attributes:
        applied: True if the gradients were applied; bool.
        finite: True if no gradient overflowed; bool. This is the same tensor as `applied`, unless an accumulator drops
            overflowing micro-batches one by one: a step can then be applied without them.
        max_abs: The largest magnitude among the unscaled gradients; float32. None if the manager does not need it.
    """

    applied: tf.Tensor
    finite: tf.Tensor
    max_abs: tf.Tensor | None
