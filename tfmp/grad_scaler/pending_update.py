"""Collects, on the device, the results of the steps between two updates of the loss scale."""

from typing import NamedTuple

import numpy as np
import tensorflow as tf

from tfmp.core.step.result import StepResult
from tfmp.core.storage.state_variables import NotCheckpointed, StateVariables


class _Pending(NamedTuple):
    """The state of `PendingUpdate`, kept in variables because `step` and `update` may be in different functions.

    Attributes:
        steps: The number of steps; int64.
        applied: Whether all of them were applied; bool.
        finite: Whether no gradient of any of them overflowed; bool.
        max_abs: The largest magnitude among their gradients; float32.
        any_applied: Whether any of them was applied; bool.
        partial_iterations: The number of earlier iterations in which some steps were applied and others skipped; int64.
    """

    steps: tf.Tensor
    applied: tf.Tensor
    finite: tf.Tensor
    max_abs: tf.Tensor
    any_applied: tf.Tensor
    partial_iterations: tf.Tensor


_NOTHING_PENDING = _Pending(np.int64(0), np.True_, np.True_, np.float32(0), np.False_, np.int64(0))


class PendingUpdate(NotCheckpointed):
    """Combines the results of all steps since the last update of the loss scale into one result.

    Examples:
        >>> pending = PendingUpdate()
        >>> for finite in [tf.constant(True), tf.constant(False)]:
        ...     pending.add(StepResult(finite, finite, None))
        >>> int(pending.steps), bool(pending.result(with_max_abs=False).finite)
        (2, False)
    """

    def __init__(self) -> None:
        super().__init__()
        self._state = StateVariables(_NOTHING_PENDING, saved=False)
        self._state.create()
        # True once a step was built that can be applied although a gradient overflowed: `finite` and `applied` are then
        # different tensors, and so they are in the combined result.
        self._may_drop = False

    @property
    def steps(self) -> tf.Tensor:
        """The number of steps since the last update; an int64 scalar."""
        return self._state.read().steps

    @property
    def partial_iterations(self) -> tf.Tensor:
        """The number of ended iterations in which some steps were applied and others skipped; an int64 scalar."""
        return self._state.read().partial_iterations

    def add(self, result: StepResult) -> tf.Operation:
        """Add the result of a step.

        Args:
            result: The result of the step, on which all replicas agree.

        Returns:
            The op that adds the result; None in eager mode.
        """
        self._may_drop |= result.finite is not result.applied
        known = self._state.read()
        max_abs = known.max_abs if result.max_abs is None else tf.maximum(known.max_abs, result.max_abs)
        return self._state.assign(
            _Pending(
                steps=known.steps + 1,
                applied=tf.logical_and(known.applied, result.applied),
                finite=tf.logical_and(known.finite, result.finite),
                max_abs=tf.identity(max_abs),
                any_applied=tf.logical_or(known.any_applied, result.applied),
                partial_iterations=tf.identity(known.partial_iterations),
            )
        )

    def result(self, with_max_abs: bool) -> StepResult:
        """Return the combined result of all steps since the last update.

        Args:
            with_max_abs: True if the manager needs the largest magnitude.
        """
        known = self._state.read()
        finite = known.finite if self._may_drop else known.applied
        return StepResult(known.applied, finite, known.max_abs if with_max_abs else None)

    def clear(self) -> tf.Operation:
        """Forget all results, but increment `partial_iterations` if some steps were applied and others skipped.

        Returns:
            The op that does this; None in eager mode.
        """
        known = self._state.read()
        is_partial = tf.logical_and(known.any_applied, tf.logical_not(known.applied))
        cleared = _Pending(*map(tf.constant, _NOTHING_PENDING))
        partial_iterations = known.partial_iterations + tf.cast(is_partial, tf.int64)
        return self._state.assign(cleared._replace(partial_iterations=partial_iterations))
