"""Keeps on the device what `unscale` and `step` find between two updates of the loss scale."""

from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np
import tensorflow as tf

from tfmp.core.overflow.found import Found
from tfmp.core.storage.state_variables import NotCheckpointed, StateVariables
from tfmp.types import Done

#: Adjusts the loss scale by what was found, and counts a step if the boolean scalar is true or None.
Adjust: TypeAlias = Callable[[Found, tf.Tensor | None], Done]


class Counts(NamedTuple):
    """What was found since the last update, as numbers of results; float64."""

    #: The number of earlier iterations in which some steps were applied and others skipped.
    partial_iterations: tf.Tensor
    #: All, of steps and of `unscale`.
    results: tf.Tensor
    #: Those that were skipped, or would have been, because of an overflow.
    unusable: tf.Tensor
    not_finite: tf.Tensor
    #: Only of steps, as are `spikes`.
    applied: tf.Tensor
    spikes: tf.Tensor
    #: The largest magnitude of the gradients; 0 if the manager does not need it.
    max_abs: tf.Tensor

    @property
    def of_step(self) -> tf.Tensor:
        """True if the iteration counts as a step, as it does unless the user dropped all steps and all was finite."""
        return self.applied + self.unusable + self.spikes > 0


class _State(NamedTuple):
    counts: tf.Tensor


class Findings(NotCheckpointed):
    """What calls have found since the last update, in a variable, since they and `update` may be in two functions.

    A step finds again what `unscale` found. `unscale` counts too, since the user may drop the step.
    """

    def __init__(self, *, needs_max_abs: bool = False, has_detector: bool = False) -> None:
        super().__init__()
        # One vector: in eager code, each variable costs as much as all of its values.
        self._counts = StateVariables(_State(np.zeros([len(Counts._fields)], np.float64)), saved=False)
        self._counts.create()
        self._needs_max_abs, self._has_detector = needs_max_abs, has_detector
        # True once a step was built that can be applied although a gradient overflowed.
        self._may_drop = False

    def read(self) -> Counts:
        """Return the numbers of results."""
        return Counts(*tf.unstack(self._counts.get("counts")))

    def add(self, found: Found, *, of_step: bool, after: Sequence[tf.Operation] = ()) -> Done:
        """Add what all replicas have agreed on, after these ops; `of_step` is False for `unscale`."""
        self._may_drop |= found.complete is not None
        no = tf.constant(False)
        added = Counts(
            partial_iterations=no,
            results=tf.constant(True),
            unusable=tf.logical_not(found.usable),
            not_finite=tf.logical_not(found.finite),
            applied=found.applied if of_step else no,
            spikes=no if found.spike is None else found.spike,
            max_abs=no,
        )
        with tf.control_dependencies(after):
            counts = self._counts.get("counts") + tf.cast(tf.stack(added), tf.float64)
            if found.max_abs is not None:
                largest = tf.maximum(tf.cast(counts[-1], tf.float32), found.max_abs)
                counts = tf.concat([counts[:-1], [tf.cast(largest, tf.float64)]], axis=0)
            return self._counts.assign(_State(counts))

    def take(self, adjust: Adjust, *, is_certain: bool = False, after: Sequence[tf.Operation] = ()) -> Done:
        """Adjust the loss scale by what was found of all gradients together, and begin the next iteration.

        A step is counted if it `is_certain` that the iteration has one, and otherwise if the results say so.
        """
        with tf.control_dependencies(after):
            counts = self.read()
            found = Found(
                tf.equal(counts.unusable, 0),
                tf.cast(counts.max_abs, tf.float32) if self._needs_max_abs else None,
                tf.equal(counts.not_finite, 0) if self._may_drop else None,
                spike=counts.spikes > 0 if self._has_detector else None,
            )
            adjusted = adjust(found, None if is_certain else counts.of_step)
        is_partial = tf.logical_and(counts.applied > 0, counts.unusable > 0)
        partial = counts.partial_iterations + tf.cast(is_partial, tf.float64)
        with tf.control_dependencies([*counts, *([] if adjusted is None else [adjusted])]):
            nothing = tf.zeros([len(Counts._fields) - 1], tf.float64)
            return self._counts.assign(_State(tf.concat([[partial], nothing], axis=0)))
