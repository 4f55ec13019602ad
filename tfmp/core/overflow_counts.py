"""Which variables' gradients overflowed, counted on the device."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import tensorflow as tf

from tfmp.core.overflow import KINDS
from tfmp.core.state import StateVariables


class OverflowReport(NamedTuple):
    """Whose gradients overflowed since the session, or the eager program, began.

    Attributes:
        names: The names of the variables, or their paths in Keras 3.
        last: How many values of each gradient were infinite, NaN, saturated on the last skipped step; int64, of shape
            `[len(names), 3]`.
        steps: On how many skipped steps each of them had such values; int64, of shape `[len(names)]`.
    """

    names: list[str]
    last: tf.Tensor
    steps: tf.Tensor


class OverflowCounts:
    """The counts for one list of variables, which are in no checkpoint and need no initializer.

    Args:
        names: The names of the variables.

    Example:
        >>> counts = OverflowCounts(["kernel", "bias"])
        >>> for last in [[[2, 0, 0], [0, 1, 0]], [[1, 0, 0], [0, 0, 0]]]:
        ...     counts.record(tf.constant(last, tf.int64))
        >>> report = counts.report()
        >>> report.names, report.last.numpy().tolist(), report.steps.numpy().tolist()
        (['kernel', 'bias'], [[1, 0, 0], [0, 0, 0]], [2, 1])
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._names = list(names)
        zeros = _Counts(np.zeros([len(names), len(KINDS)], np.int64), np.zeros([len(names)], np.int64))
        self._state = StateVariables(zeros, saved=False)

    def create(self) -> None:
        """Make the variables of the current context, unless it has them."""
        self._state.create()

    def record(self, counts: tf.Tensor) -> tf.Operation:
        """Store the counts of a skipped step.

        Args:
            counts: What `OverflowDetector.counts` returned.

        Returns:
            The op that stores them; None in eager mode.
        """
        steps = self._state.read().steps + tf.cast(tf.reduce_any(counts > 0, axis=1), tf.int64)
        return self._state.assign(_Counts(last=counts, steps=steps))

    def report(self) -> OverflowReport:
        """Return what was stored."""
        return OverflowReport(self._names, *self._state.read())


class _Counts(NamedTuple):
    last: tf.Tensor
    steps: tf.Tensor
