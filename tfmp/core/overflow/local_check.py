"""What one replica knows of its gradients before all replicas agree on a step."""

from typing import NamedTuple

import tensorflow as tf

from tfmp.types import Gradients


class LocalCheck(NamedTuple):
    """What one replica knows of its gradients before a step is attempted with them.

    Attributes:
        usable: Whether the gradients of this replica may be applied; bool.
        complete: Whether no micro-batch of the window overflowed, on any replica; bool. None if the gradients are not
            those of a window.
        overflow_counts: What overflowed in the window's micro-batches on this replica, as `OverflowDetector.counts`
            counts it; int64. None if the gradients are not those of a window.
        max_abs: The largest magnitude in the window's micro-batches on this replica; float32. None if it is to be found
            from the gradients themselves.
        emptied: The op that empties the window, which the step must run; None if there is no window.
        checked: The gradients that `usable` is about. Those that reach the step unchanged are not read again.
        already_checked: True if each micro-batch was already checked by the detector; only the mean's finiteness is
            checked now, since a replica's part of the mean can be larger than any micro-batch.
    """

    usable: tf.Tensor
    complete: tf.Tensor | None = None
    overflow_counts: tf.Tensor | None = None
    max_abs: tf.Tensor | None = None
    emptied: tf.Operation | None = None
    checked: Gradients = ()
    already_checked: bool = False
