"""What is found of gradients: of one replica's, on which all replicas then agree; and before their step."""

from typing import NamedTuple

import tensorflow as tf

from tfmp.types import Gradients


class Found(NamedTuple):
    """What is found of the gradients of a step, on one replica or, after the replicas have agreed, on all of them."""

    #: True if the gradients may be applied; bool.
    usable: tf.Tensor
    #: The largest magnitude of the unscaled gradients; float32. None if the manager does not need it.
    max_abs: tf.Tensor | None = None
    #: False if micro-batches that overflowed were left out of the mean, on any replica; bool. None if that cannot be.
    complete: tf.Tensor | None = None
    #: True if the norm of the gradients is above the bound of a spike detector; bool. None if there is no detector.
    is_above: tf.Tensor | None = None
    #: True if the gradients may be applied, but are not, because the step is a spike; bool. None if it cannot be one.
    spike: tf.Tensor | None = None

    @property
    def applied(self) -> tf.Tensor:
        """True if the gradients are applied; bool."""
        return self.usable if self.spike is None else tf.logical_and(self.usable, tf.logical_not(self.spike))

    @property
    def finite(self) -> tf.Tensor:
        """True if no gradient overflowed; bool."""
        return self.usable if self.complete is None else tf.logical_and(self.usable, self.complete)


class Checked(NamedTuple):
    """What is known of gradients before their step, from `GradScaler.unscale` or from the micro-batches of a window."""

    #: What was found of them on this replica.
    found: Found
    #: The gradients that were checked. A step that gets the same tensors does not read them again.
    grads: Gradients = ()
    #: True if the gradients are the mean of micro-batches, each of which the detector has checked. The mean is then
    #: checked only for infinities, NaN and overflow in the sum over the replicas, whatever the detector asks for: a
    #: replica's part of the mean can be larger than any of its micro-batches.
    of_window: bool = False
    #: The numbers of values that overflowed in the micro-batches on this replica, as `OverflowDetector.counts` returns
    #: them. None if there are no micro-batches.
    window_counts: tf.Tensor | None = None
    #: The gradients before the user clipped them, not necessarily one for each of those of the step; None if it is not
    #: known whether the user did.
    unclipped: Gradients | None = None
