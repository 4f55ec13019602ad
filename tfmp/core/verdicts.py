"""What is found of gradients: on one replica before a step, and on all by it."""

from typing import NamedTuple

import tensorflow as tf


class Seen(NamedTuple):
    """What was found of a replica's gradients before a step is attempted with them.

    Attributes:
        usable: Whether this replica's may be applied; bool.
        complete: Whether nothing overflowed on any replica; bool. None where that is the same question.
        overflows: What did on this one, as `OverflowDetector.counts` tells, where that is known already; int64.
        done: The op that a step must not go without.
        largest: The largest magnitude that this replica has seen in what it keeps; float32. None where the gradients
            themselves tell.
        judged: Whether they are of a window, whose micro-batches were looked at one by one. Their mean must be finite;
            no detector that asks for more needs to see it: a replica's part may be larger than any micro-batch.
    """

    usable: tf.Tensor
    complete: tf.Tensor | None = None
    overflows: tf.Tensor | None = None
    done: tf.Operation | None = None
    largest: tf.Tensor | None = None
    judged: bool = False


class Verdict(NamedTuple):
    """What was found of a step's gradients, on all replicas together.

    Attributes:
        applied: Whether they were applied; bool.
        finite: Whether nothing overflowed; bool. Both are the same, but where an overflow drops a micro-batch only.
        max_abs: The largest magnitude, float32; None where the manager does not ask for it.
    """

    applied: tf.Tensor
    finite: tf.Tensor
    max_abs: tf.Tensor | None
