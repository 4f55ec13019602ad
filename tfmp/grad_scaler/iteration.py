"""An iteration of a training loop: the calls since the last update of the loss scale, and their results."""

from collections.abc import Callable, Sequence
from typing import TypeAlias

import tensorflow as tf

from tfmp.core.control_flow import conditional_update
from tfmp.core.distribute import Distribution, on_replica
from tfmp.core.overflow.found import Checked, Found
from tfmp.core.step.scaler import LossScaler
from tfmp.core.storage.state_variables import NotCheckpointed
from tfmp.grad_scaler.call_order import CallOrder
from tfmp.grad_scaler.pending_results import Findings, PendingResults
from tfmp.types import Done, Gradients

#: Adjusts the loss scale by a result, and counts it as a step: if a boolean scalar says so, or always if that is None.
Adjust: TypeAlias = Callable[[Found, tf.Tensor | None], Done]


class Iteration(NotCheckpointed):
    """Holds the calls of an iteration and their results; `end`, `end_unchecked` and `give_up` begin the next one.

    `calls` are those that Python has run: the calls in a `tf.function` are recorded only while it is traced. `pending`
    combines the results on the device, also those of later runs of the function. `needs_max_abs` is True if `Adjust`
    needs the largest magnitude of the gradients, and `is_strict` if calls out of order are errors.
    """

    def __init__(self, scaler: LossScaler, *, needs_max_abs: bool, is_strict: bool) -> None:
        super().__init__()
        self._scaler = scaler
        self._needs_max_abs = needs_max_abs
        self.calls = CallOrder(is_strict)
        self.pending = PendingResults(has_detector=scaler.norms.spikes is not None)

    @property
    def has_begun(self) -> bool:
        """True in eager code if there was a call since the last update, also one in a `tf.function`."""
        return self.calls.has_steps or self.calls.has_unscaled or bool(self.pending.get("results") > 0)

    def note_unscale(
        self,
        optimizer: object,
        before: Checked,
        result: Found | None,
        done: Done,
        distribution: Distribution,
        given: Gradients = (),
        returned: Gradients = (),
    ) -> None:
        """Record a call of `unscale`, and keep its result, which `update` needs if the user drops the step."""
        op = self._op_of_call(result, [done], distribution, of_step=False)
        self.calls.note_unscale(optimizer, before, op, given, returned)

    def note_steps(
        self, optimizers: Sequence[object], result: Found | None, done: Sequence[Done], distribution: Distribution
    ) -> Done:
        """Record the steps of optimizers that step together, keep their result, and return the op of all calls."""
        op = self._op_of_call(result, done, distribution, of_step=True)
        for optimizer in optimizers:
            self.calls.note_step(optimizer, op)
        return op

    def _op_of_call(
        self, result: Found | None, done: Sequence[Done], distribution: Distribution, *, of_step: bool
    ) -> Done:
        """Return the op that runs a call and those before it, and then keeps its result, unless that is None."""
        before = [op for op in [*done, *self.calls.ops()] if op is not None]
        if result is None:
            return tf.group(*before)

        def keep() -> Done:
            with tf.control_dependencies(before):
                return self.pending.add(result, of_step=of_step)

        return tf.group(*before, distribution.once(keep))

    def end(self, adjust: Adjust, *, sets_scale: bool = False) -> Done:
        """Adjust the loss scale when all calls have run.

        There must have been a call, unless the user `sets_scale`: then `adjust` only counts a step, if there was one.
        """
        calls, has_steps = list(self.calls.ops()), self.calls.has_steps
        has_calls = has_steps or self.calls.has_unscaled
        checks = [] if has_calls or sets_scale else self._refuse_if_nothing_found()

        def move() -> Done:
            with tf.control_dependencies([*calls, *checks]):
                findings = self.pending.read()
                result = self.pending.result(findings, with_max_abs=self._needs_max_abs)
                # A step that Python has seen is certain, and needs no conditional.
                is_step = None if has_steps and not sets_scale else _is_step(findings, result)
                adjusted = adjust(result, is_step)
            with tf.control_dependencies([*findings, *_as_list(adjusted)]):
                return self.pending.clear(findings)

        moved = self._once(move)
        self.calls.end()
        return moved

    def end_unchecked(self) -> Done:
        """Run the calls, without adjusting the loss scale."""
        calls = list(self.calls.ops())
        self.calls.end()
        return tf.group(*calls)

    def give_up(self, adjust: Adjust) -> Done:
        """Adjust the loss scale by the results so far, without running the calls; count an overflow as a step."""
        self.calls.end()

        def forget() -> Done:
            findings = self.pending.read()
            result = self.pending.result(findings, with_max_abs=self._needs_max_abs)
            adjusted = conditional_update(
                findings.results > 0, [], lambda _: adjust(result, tf.logical_not(result.applied))
            )
            with tf.control_dependencies([*findings, *_as_list(adjusted)]):
                return self.pending.clear(findings)

        return self._once(forget)

    def _once(self, function: Callable[[], Done]) -> Done:
        return self._scaler.distribution().once(function) if on_replica() else function()

    def _refuse_if_nothing_found(self) -> list[tf.Operation]:
        """Raise an error if there is no result since the last update; in a graph, return the op that checks this.

        This is for an update before which Python recorded no call. Calls in a `tf.function` that was traced earlier
        show only in the number of results on the device.
        """
        message = "update was called, and no optimizer has stepped since the last update: call step first."
        if not tf.executing_eagerly() and not tf.compat.v1.get_default_graph().building_function:
            raise RuntimeError("update was built before any step: build the steps first, and update in the same graph.")
        results = self.pending.get("results")
        if not tf.executing_eagerly():
            return [tf.debugging.Assert(results > 0, [message])]
        if not results > 0:
            raise RuntimeError(message)
        return []


def _is_step(findings: Findings, result: Found) -> tf.Tensor:
    """Return whether an iteration counts as a step: it does too if a step was skipped as a spike."""
    return findings.is_step if result.spike is None else tf.logical_or(findings.is_step, result.spike)


def _as_list(done: Done) -> list[tf.Operation]:
    return [] if done is None else [done]
