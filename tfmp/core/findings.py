"""What the steps since the last update of the scale have shown, on the device."""

from typing import NamedTuple

import numpy as np
import tensorflow as tf

from tfmp.core.state import OfProgram, StateVariables
from tfmp.core.verdicts import Verdict


class _Findings(NamedTuple):
    """What the steps since the last update have shown, kept on the device: they may be taken in other functions.

    Attributes:
        steps: How many there were; int64.
        applied: Whether all were applied; bool.
        finite: Whether nothing overflowed; bool.
        max_abs: The largest magnitude; float32.
        any_applied: Whether any was applied; bool.
        in_part: In how many iterations that have ended some steps were applied, and others were not; int64.
    """

    steps: tf.Tensor
    applied: tf.Tensor
    finite: tf.Tensor
    max_abs: tf.Tensor
    any_applied: tf.Tensor
    in_part: tf.Tensor


_NO_FINDINGS = _Findings(np.int64(0), np.True_, np.True_, np.float32(0), np.False_, np.int64(0))


class Findings(OfProgram):
    """Adds up the verdicts on several steps, for one update of the scale.

    Example:
        >>> findings = Findings()
        >>> for finite in [True, False]:
        ...     findings.note(Verdict(tf.constant(finite), tf.constant(finite), None))
        >>> int(findings.steps), bool(findings.verdict(with_max_abs=False).finite)
        (2, False)
    """

    def __init__(self) -> None:
        super().__init__()
        self._state = StateVariables(_NO_FINDINGS, saved=False)
        self._state.create()

    @property
    def steps(self) -> tf.Tensor:
        """How many verdicts there were; an int64 scalar."""
        return self._state.read().steps

    @property
    def in_part(self) -> tf.Tensor:
        """In how many iterations that have ended some steps were applied, and others were not; an int64 scalar."""
        return self._state.read().in_part

    def note(self, verdict: Verdict) -> tf.Operation:
        """Add a verdict.

        Args:
            verdict: The verdict, on which all replicas agree.

        Returns:
            The op that adds it; None in eager mode.
        """
        known = self._state.read()
        max_abs = known.max_abs if verdict.max_abs is None else tf.maximum(known.max_abs, verdict.max_abs)
        return self._state.assign(
            _Findings(
                steps=known.steps + 1,
                applied=tf.logical_and(known.applied, verdict.applied),
                finite=tf.logical_and(known.finite, verdict.finite),
                max_abs=tf.identity(max_abs),
                any_applied=tf.logical_or(known.any_applied, verdict.applied),
                in_part=tf.identity(known.in_part),
            )
        )

    def verdict(self, with_max_abs: bool) -> Verdict:
        """Return the verdict on all steps together.

        Args:
            with_max_abs: Whether the manager asks for the largest magnitude.
        """
        known = self._state.read()
        return Verdict(known.applied, known.finite, known.max_abs if with_max_abs else None)

    def clear(self) -> tf.Operation:
        """Forget all verdicts, but for how often an iteration was applied in part.

        Returns:
            The op that does it; None in eager mode.
        """
        known = self._state.read()
        ends_in_part = tf.logical_and(known.any_applied, tf.logical_not(known.applied))
        none = _Findings(*map(tf.constant, _NO_FINDINGS))
        return self._state.assign(none._replace(in_part=known.in_part + tf.cast(ends_in_part, tf.int64)))
