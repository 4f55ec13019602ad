"""Counts, on the device, the values that overflowed in the gradient of each variable."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import tensorflow as tf

from tfmp.core.overflow.detectors import KINDS
from tfmp.core.storage.state_variables import StateVariables
from tfmp.types import Done


class OverflowReport(NamedTuple):
    """How often the gradient of each variable overflowed since the session or the eager program began.

    Attributes:
        names: The names of the variables, or their paths in Keras 3.
        last: For each variable the numbers of values in its gradient that were infinite, NaN and saturated on the last
            step with an overflow; int64, of shape `[len(names), 3]`.
        steps: For each variable the number of steps on which its gradient had such values; int64, of shape
            `[len(names)]`.
    """

    names: list[str]
    last: tf.Tensor
    steps: tf.Tensor


class OverflowCounts(tf.Module):
    """The counts for one list of variables.

    They are stored in variables that a script need not initialize: they count from 0 in each session.

    Examples:
        >>> counts = OverflowCounts(["kernel", "bias"])
        >>> for last in [[[2, 0, 0], [0, 1, 0]], [[1, 0, 0], [0, 0, 0]]]:
        ...     counts.record(tf.constant(last, tf.int64))
        >>> report = counts.report()
        >>> report.names, report.last.numpy().tolist(), report.steps.numpy().tolist()
        (['kernel', 'bias'], [[1, 0, 0], [0, 0, 0]], [2, 1])
    """

    def __init__(self, names: Sequence[str]) -> None:
        super().__init__()
        self._names = tuple(names)
        zeros = _Counts(np.zeros([len(names), len(KINDS)], np.int64), np.zeros([len(names)], np.int64))
        self._state = StateVariables(zeros, saved=False)

    def create(self) -> None:
        """Make the variables that store the counts in the current graph, or in eager code, unless they exist."""
        self._state.create()

    def record(self, counts: tf.Tensor) -> Done:
        """Store the counts of a step; counts that are all 0 change nothing."""
        before = self._state.read()
        overflowed = tf.reduce_any(counts > 0, axis=1)
        last = tf.where(tf.reduce_any(overflowed), counts, before.last)
        return self._state.assign(_Counts(last=last, steps=before.steps + tf.cast(overflowed, tf.int64)))

    def report(self) -> OverflowReport:
        """Return the stored counts with the names of the variables."""
        return OverflowReport(list(self._names), *self._state.read())


class _Counts(NamedTuple):
    last: tf.Tensor
    steps: tf.Tensor
