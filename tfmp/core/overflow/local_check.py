"""The result of checking one replica's gradients, before all replicas agree on a step."""

from typing import NamedTuple

import tensorflow as tf

from tfmp.types import Done, Gradients


class LocalCheck(NamedTuple):
    """The result of checking one replica's gradients.

    Gradients may be the mean of a window, the micro-batches that an accumulator has added up. Several attributes are
    only for that case.

    Attributes:
        usable: True if the gradients of this replica may be applied; bool.
        complete: True if no micro-batch of the window overflowed on any replica; bool. None if there is no window, or
            if any overflow drops the whole window, since `usable` then says the same.
        overflow_counts: The numbers of values that overflowed in the window's micro-batches on this replica, in the
            form of `OverflowDetector.counts`; int64. None if there is no window.
        max_abs: The largest magnitude in the window's micro-batches on this replica; float32. None if the step must
            compute the magnitude from the gradients.
        emptied: The op that empties the window, which the step must run; None if there is no window.
        checked: The gradients that `GradScaler.unscale` has checked. The step does not check them again if it gets the
            same tensors. Empty if there was no such check.
        already_checked: True if these gradients are the mean of micro-batches that the detector checked one by one. The
            mean is then checked only for infinities, NaN and overflow in the sum over the replicas, whatever the
            detector asks for: a replica's part of the mean can be larger than any of its micro-batches.
    """

    usable: tf.Tensor
    complete: tf.Tensor | None = None
    overflow_counts: tf.Tensor | None = None
    max_abs: tf.Tensor | None = None
    emptied: Done = None
    checked: Gradients = ()
    already_checked: bool = False
