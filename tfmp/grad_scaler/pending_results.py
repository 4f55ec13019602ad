"""Collects, on the device, what `unscale` and `step` find between two updates of the loss scale."""

from typing import NamedTuple

import numpy as np
import tensorflow as tf

from tfmp.core.overflow.found import Found
from tfmp.core.storage.state_variables import NotCheckpointed, StateVariables
from tfmp.types import Done


class Findings(NamedTuple):
    """What `unscale` and `step` have found since the last update."""

    #: The number of results, of steps and of `unscale`; int64.
    results: tf.Tensor
    #: True if no step was skipped, or would have been skipped, because of an overflow; bool.
    usable: tf.Tensor
    #: True if no gradient overflowed; bool.
    finite: tf.Tensor
    #: The largest magnitude among the gradients; float32.
    max_abs: tf.Tensor
    #: True if any step was applied; bool.
    any_applied: tf.Tensor
    #: The number of earlier iterations in which some steps were applied and others skipped; int64.
    partial_iterations: tf.Tensor

    @property
    def is_step(self) -> tf.Tensor:
        """True if the iteration counts as a step, because a step was applied or there was an overflow; bool.

        It does not count if the user dropped all steps although their gradients were finite.
        """
        return tf.logical_or(self.any_applied, tf.logical_not(self.usable))

    def with_result(self, result: Found, *, of_step: bool) -> "Findings":
        """Return the findings with one more result; `of_step` is False for `unscale`, which applies nothing."""
        max_abs = self.max_abs if result.max_abs is None else tf.maximum(self.max_abs, result.max_abs)
        return Findings(
            results=self.results + 1,
            usable=tf.logical_and(self.usable, result.usable),
            finite=tf.logical_and(self.finite, result.finite),
            max_abs=tf.identity(max_abs),
            any_applied=tf.logical_or(self.any_applied, result.applied if of_step else False),
            partial_iterations=tf.identity(self.partial_iterations),
        )

    def cleared(self) -> "Findings":
        """Return the findings at the start of the next iteration."""
        is_partial = tf.logical_and(self.any_applied, tf.logical_not(self.usable))
        partial_iterations = self.partial_iterations + tf.cast(is_partial, tf.int64)
        return Findings(*map(tf.constant, _NOTHING))._replace(partial_iterations=partial_iterations)


_NOTHING = Findings(np.int64(0), np.True_, np.True_, np.float32(0), np.False_, np.int64(0))


class _Spiked(NamedTuple):
    #: True if a step was skipped as a spike since the last update; bool.
    spiked: tf.Tensor


class PendingResults(NotCheckpointed):
    """Keeps what `unscale` and `step` find in variables, since they and `update` may be in different functions.

    A step that follows `unscale` finds the same overflow again, which changes nothing. But the user may drop the step,
    for example because the norm of the gradients is too large: then only `unscale` has a result. `has_detector` is True
    if steps can be skipped as spikes.

    Examples:
        >>> pending = PendingResults()
        >>> for finite in [tf.constant(True), tf.constant(False)]:
        ...     pending.add(Found(finite), of_step=True)
        >>> findings = pending.read()
        >>> int(findings.results), bool(pending.result(findings, with_max_abs=False).finite)
        (2, False)
    """

    def __init__(self, *, has_detector: bool = False) -> None:
        super().__init__()
        self._state = StateVariables(_NOTHING, saved=False)
        self._state.create()
        self._spiked = StateVariables(_Spiked(np.False_), saved=False) if has_detector else None
        if self._spiked is not None:
            self._spiked.create()
        # True once a step was built that can be applied although a gradient overflowed.
        self._may_drop = False

    def get(self, field: str) -> tf.Tensor:
        """Return one of the findings by its name."""
        return self._state.get(field)

    def read(self) -> Findings:
        """Return all findings."""
        return self._state.read()

    def add(self, result: Found, *, of_step: bool) -> Done:
        """Add a result on which all replicas agree; `of_step` is False for `unscale`, which applies nothing."""
        self._may_drop |= result.complete is not None
        added = self._state.assign(self.read().with_result(result, of_step=of_step))
        if self._spiked is None or result.spike is None:
            return added
        spiked = tf.logical_or(self._spiked.get("spiked"), result.spike)
        return tf.group(added, self._spiked.assign(_Spiked(spiked)))

    def result(self, findings: Findings, *, with_max_abs: bool) -> Found:
        """Return the findings as one result, with the largest magnitude if it is needed."""
        return Found(
            findings.usable,
            findings.max_abs if with_max_abs else None,
            findings.finite if self._may_drop else None,
            spike=None if self._spiked is None else self._spiked.get("spiked"),
        )

    def clear(self, findings: Findings) -> Done:
        """Begin the next iteration after these findings."""
        cleared = self._state.assign(findings.cleared())
        return cleared if self._spiked is None else tf.group(cleared, self._spiked.assign(_Spiked(tf.constant(False))))
