"""The results of checking gradients: on one replica, before a step, and those on which all replicas agree."""

from typing import NamedTuple

import tensorflow as tf

from tfmp.types import Gradients


class LocalResult(NamedTuple):
    """The result of checking one replica's gradients."""

    #: True if the gradients of this replica may be applied; bool.
    usable: tf.Tensor
    #: The largest magnitude of the unscaled gradients; float32. None if nobody needs it, or if it is not known yet.
    max_abs: tf.Tensor | None = None
    #: False if the gradients are the mean of micro-batches without those that overflowed, on any replica; bool. None if
    #: a single overflow makes the mean unusable, or if there are no micro-batches.
    complete: tf.Tensor | None = None


class EarlierCheck(NamedTuple):
    """The check of gradients that a step gets later, perhaps clipped: by `GradScaler.unscale` or by an accumulator."""

    result: LocalResult
    #: The gradients that were checked. A step that gets the same tensors does not read them again.
    checked: Gradients = ()
    #: True if the gradients are the mean of micro-batches, each of which the detector has checked. The mean is then
    #: checked only for infinities, NaN and overflow in the sum over the replicas, whatever the detector asks for: a
    #: replica's part of the mean can be larger than any of its micro-batches.
    of_micro_batches: bool = False
    #: The numbers of values that overflowed in the micro-batches on this replica, as `OverflowDetector.counts` returns
    #: them. None if there are no micro-batches.
    overflow_counts: tf.Tensor | None = None
    #: The gradients before the user clipped them, not necessarily one for each of those of the step; None if it is not
    #: known whether the user did.
    unclipped: Gradients | None = None


class StepResult(NamedTuple):
    """The result of a step, on which all replicas agree; after `GradScaler.unscale`, of a step that may follow."""

    #: True if the gradients may be applied on every replica; bool.
    usable: tf.Tensor
    #: The largest magnitude among the unscaled gradients; float32. None if the manager does not need it.
    max_abs: tf.Tensor | None = None
    #: False if an accumulator dropped micro-batches that overflowed, without which the step may be applied; bool. None
    #: if that cannot be.
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
