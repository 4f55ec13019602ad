"""Keeps on the device what `unscale` and `step` find between two updates of the loss scale."""

from typing import NamedTuple

import numpy as np
import tensorflow as tf

from tfmp.core.overflow.found import Found
from tfmp.core.storage.state_variables import NotCheckpointed, StateVariables
from tfmp.types import Done


class Counts(NamedTuple):
    """What was found since the last update, as numbers of results; int64."""

    #: All, of steps and of `unscale`.
    results: tf.Tensor
    #: Those that were skipped, or would have been, because of an overflow.
    unusable: tf.Tensor
    #: Those in which a gradient overflowed.
    not_finite: tf.Tensor
    #: Steps that were applied.
    applied: tf.Tensor
    #: Steps that were skipped as spikes.
    spikes: tf.Tensor
    #: The number of earlier iterations in which some steps were applied and others skipped.
    partial_iterations: tf.Tensor


class _State(NamedTuple):
    counts: tf.Tensor


class _MaxAbs(NamedTuple):
    max_abs: tf.Tensor


class Findings(NotCheckpointed):
    """What calls have found since the last update, in variables, since they and `update` may be in different functions.

    A step that follows `unscale` finds the same overflow again, which changes nothing. But the user may drop the step,
    for example because the norm of the gradients is too large: then only `unscale` has a result.

    Examples:
        >>> findings = Findings()
        >>> for usable in [tf.constant(True), tf.constant(False)]:
        ...     findings.add(Found(usable), of_step=True)
        >>> counts = findings.read()
        >>> int(counts.results), bool(findings.found(counts).finite)
        (2, False)
    """

    def __init__(self, *, needs_max_abs: bool = False, has_detector: bool = False) -> None:
        super().__init__()
        # One vector: in eager code, each variable costs as much as all of its values.
        self._counts = StateVariables(_State(np.zeros([len(Counts._fields)], np.int64)), saved=False)
        self._counts.create()
        self._max_abs = StateVariables(_MaxAbs(np.float32(0)), saved=False) if needs_max_abs else None
        if self._max_abs is not None:
            self._max_abs.create()
        self._has_detector = has_detector
        # True once a step was built that can be applied although a gradient overflowed.
        self._may_drop = False

    def read(self) -> Counts:
        """Return the numbers of results."""
        return Counts(*tf.unstack(self._counts.get("counts")))

    def add(self, found: Found, *, of_step: bool) -> Done:
        """Add what all replicas have agreed on; `of_step` is False for `unscale`, which applies nothing."""
        self._may_drop |= found.complete is not None
        no = tf.constant(False)
        added = Counts(
            results=tf.constant(True),
            unusable=tf.logical_not(found.usable),
            not_finite=tf.logical_not(found.finite),
            applied=found.applied if of_step else no,
            spikes=no if found.spike is None else found.spike,
            partial_iterations=no,
        )
        counted = self._counts.assign(_State(self._counts.get("counts") + tf.cast(tf.stack(added), tf.int64)))
        if self._max_abs is None or found.max_abs is None:
            return counted
        largest = tf.maximum(self._max_abs.get("max_abs"), found.max_abs)
        return tf.group(counted, self._max_abs.assign(_MaxAbs(largest)))

    def found(self, counts: Counts) -> Found:
        """Return what was found of all gradients together."""
        return Found(
            tf.equal(counts.unusable, 0),
            None if self._max_abs is None else self._max_abs.get("max_abs"),
            tf.equal(counts.not_finite, 0) if self._may_drop else None,
            spike=counts.spikes > 0 if self._has_detector else None,
        )

    def is_step(self, counts: Counts) -> tf.Tensor:
        """Return whether the iteration counts as a step: a step was applied, or skipped because of what was found.

        It does not count if the user dropped all steps although their gradients were finite.
        """
        return counts.applied + counts.unusable + counts.spikes > 0

    def clear(self, counts: Counts, *, after: Done) -> Done:
        """Begin the next iteration, after these were read and an op has run."""
        is_partial = tf.logical_and(counts.applied > 0, counts.unusable > 0)
        partial = counts.partial_iterations + tf.cast(is_partial, tf.int64)
        with tf.control_dependencies([*counts, *([] if after is None else [after])]):
            nothing = tf.concat([tf.zeros([len(Counts._fields) - 1], tf.int64), [partial]], axis=0)
            cleared = self._counts.assign(_State(nothing))
            if self._max_abs is None:
                return cleared
            return tf.group(cleared, self._max_abs.assign(_MaxAbs(tf.zeros([]))))
