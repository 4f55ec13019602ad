"""Collects, on the device, what `unscale` and `step` find between two updates of the loss scale."""

from typing import NamedTuple

import numpy as np
import tensorflow as tf

from tfmp.core.step.update import StepResult
from tfmp.core.storage.state_variables import NotCheckpointed, StateVariables
from tfmp.types import Done


class _Pending(NamedTuple):
    """The state of `PendingUpdate`, kept in variables because `step` and `update` may be in different functions.

    Attributes:
        results: The number of results, of steps and of `unscale`; int64.
        applied: Whether no step was skipped or would have been skipped because of an overflow; bool.
        finite: Whether no gradient overflowed; bool.
        max_abs: The largest magnitude among the gradients; float32.
        any_applied: Whether any step was applied; bool.
        partial_iterations: The number of earlier iterations in which some steps were applied and others skipped; int64.
    """

    results: tf.Tensor
    applied: tf.Tensor
    finite: tf.Tensor
    max_abs: tf.Tensor
    any_applied: tf.Tensor
    partial_iterations: tf.Tensor


_NOTHING_PENDING = _Pending(np.int64(0), np.True_, np.True_, np.float32(0), np.False_, np.int64(0))


class PendingUpdate(NotCheckpointed):
    """Combines what `unscale` and `step` have found since the last update of the loss scale into one result.

    A step that follows `unscale` finds an overflow that `unscale` has found already, and adds nothing new. But the user
    may drop the step, for example because the norm of the gradients is too large: then only `unscale` has a result.

    Examples:
        >>> pending = PendingUpdate()
        >>> for finite in [tf.constant(True), tf.constant(False)]:
        ...     pending.add(StepResult(finite, finite, None))
        >>> int(pending.results), bool(pending.result(with_max_abs=False).finite)
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
    def results(self) -> tf.Tensor:
        """The number of results since the last update; an int64 scalar."""
        return self._state.get("results")

    @property
    def is_step(self) -> tf.Tensor:
        """True if the iteration is to be counted as a step: it applied one, or an overflow kept it from that; bool.

        It is not counted if the user dropped all steps although their gradients were finite.
        """
        known = self._state.read()
        return tf.logical_or(known.any_applied, tf.logical_not(known.applied))

    @property
    def partial_iterations(self) -> tf.Tensor:
        """The number of ended iterations in which some steps were applied and others skipped; an int64 scalar."""
        return self._state.get("partial_iterations")

    def add(self, result: StepResult, *, of_step: bool = True) -> Done:
        """Add a result.

        Args:
            result: The result of a step, or the result that a step with unscaled gradients would have. All replicas
                agree on it.
            of_step: True if it is the result of a step; False for `unscale`, which applies nothing.
        """
        self._may_drop |= result.finite is not result.applied
        known = self._state.read()
        max_abs = known.max_abs if result.max_abs is None else tf.maximum(known.max_abs, result.max_abs)
        return self._state.assign(
            _Pending(
                results=known.results + 1,
                applied=tf.logical_and(known.applied, result.applied),
                finite=tf.logical_and(known.finite, result.finite),
                max_abs=tf.identity(max_abs),
                any_applied=tf.logical_or(known.any_applied, result.applied if of_step else False),
                partial_iterations=tf.identity(known.partial_iterations),
            )
        )

    def result(self, with_max_abs: bool) -> StepResult:
        """Return the combined result of everything since the last update.

        Args:
            with_max_abs: True if the manager needs the largest magnitude.
        """
        known = self._state.read()
        finite = known.finite if self._may_drop else known.applied
        return StepResult(known.applied, finite, known.max_abs if with_max_abs else None)

    def clear(self) -> Done:
        """Forget all results, but increment `partial_iterations` if some steps were applied and others skipped."""
        known = self._state.read()
        is_partial = tf.logical_and(known.any_applied, tf.logical_not(known.applied))
        cleared = _Pending(*map(tf.constant, _NOTHING_PENDING))
        partial_iterations = known.partial_iterations + tf.cast(is_partial, tf.int64)
        return self._state.assign(cleared._replace(partial_iterations=partial_iterations))
