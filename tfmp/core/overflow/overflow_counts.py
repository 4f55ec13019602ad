"""Which variables' gradients overflowed, counted on the device."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import tensorflow as tf

from tfmp.core.overflow.detectors import KINDS
from tfmp.core.storage.state_variables import NotCheckpointed, StateVariables


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


class OverflowCounts(tf.Module):
    """The counts for one list of variables, which need no initializer.

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
        super().__init__()
        self._names = tuple(names)
        zeros = _Counts(np.zeros([len(names), len(KINDS)], np.int64), np.zeros([len(names)], np.int64))
        self._state = StateVariables(zeros, saved=False)

    def are_of(self, names: Sequence[str]) -> bool:
        """Tell whether these are the counts for a list of variables.

        Args:
            names: The names of the variables.
        """
        return self._names == tuple(names)

    def create(self) -> None:
        """Make the variables of the current context, unless it has them."""
        self._state.create()

    def record(self, counts: tf.Tensor) -> tf.Operation:
        """Store the counts of a step in which something overflowed; those of any other change nothing.

        Args:
            counts: What `OverflowDetector.counts` returned.

        Returns:
            The op that stores them; None in eager mode.
        """
        before = self._state.read()
        overflowed = tf.reduce_any(counts > 0, axis=1)
        last = tf.where(tf.reduce_any(overflowed), counts, before.last)
        return self._state.assign(_Counts(last=last, steps=before.steps + tf.cast(overflowed, tf.int64)))

    def report(self) -> OverflowReport:
        """Return what was stored."""
        return OverflowReport(list(self._names), *self._state.read())


class AllOverflowCounts(NotCheckpointed):
    """The counts for every list of variables that steps are taken for.

    A front-end whose host tracks objects holds it, so that a function that takes steps can be exported. No checkpoint
    holds the counts: they are of a program, not of a training.

    Example:
        >>> counts = AllOverflowCounts()
        >>> counts.of(["kernel"]) is counts.of(["kernel"])
        True
    """

    def __init__(self) -> None:
        super().__init__()
        self._each: list[OverflowCounts] = []

    def __iter__(self) -> Iterator[OverflowCounts]:
        """Iterate over the counts, in the order of their first use."""
        return iter(self._each)

    def of(self, names: Sequence[str]) -> OverflowCounts:
        """Return the counts for a list of variables.

        Args:
            names: The names of the variables.
        """
        for counts in self._each:
            if counts.are_of(names):
                return counts
        self._each.append(OverflowCounts(names))
        return self._each[-1]


class _Counts(NamedTuple):
    last: tf.Tensor
    steps: tf.Tensor
