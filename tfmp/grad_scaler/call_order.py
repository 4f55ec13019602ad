"""Checks that `unscale`, `step` and `update` are called in the right order."""

import weakref
from collections.abc import Iterator, Sequence
from typing import NamedTuple, TypeAlias

import tensorflow as tf

from tfmp.core import lists
from tfmp.core.distribute import current_replica, on_replica
from tfmp.core.gradients.unscaled_gradients import UnscaledGradients, is_computed_from_scaled, is_zero
from tfmp.core.overflow.found import Checked
from tfmp.core.tensorflow_internals import control_flow_context, is_branch, is_unfinished_branch
from tfmp.types import Done, Gradient, Gradients


class _Call(NamedTuple):
    """A call that was made for an optimizer."""

    #: This reference keeps the optimizer alive, so that no other object can get its identity.
    optimizer: object
    #: The number of the replica on which the call was made; None outside of replicas.
    replica: int | None

    def is_for(self, optimizer: object) -> bool:
        return self.optimizer is optimizer and self.replica == current_replica()


class _Unscaled(NamedTuple):
    """A call of `unscale`."""

    call: _Call
    #: Where the call was made.
    context: "weakref.ref[_Context]"
    #: The result of checking the gradients.
    before: Checked
    #: The gradients that the user passed, and those that were returned.
    gradients: UnscaledGradients
    #: True if the gradients may be computed from those that an earlier call returned.
    may_be_unscaled_twice: bool = False
    #: True if `step` was called with the gradients.
    used_by_step: bool = False

    def is_in(self, contexts: "Sequence[_Context]") -> bool:
        context = self.context()
        return any(context is each for each in contexts)


class CallOrder:
    """Records the calls of an iteration, and raises an error if a call is out of order.

    The calls for each optimizer must come in this order:

        unscale      optional; once for all gradients, or once for each group of them
        step         at most once; left out if the user drops the step
        update       once for all optimizers; the calls before it are forgotten

    Calls are recorded when Python runs them: in eager code in every iteration, in a graph or a `tf.function` only while
    it is built. Some calls of an iteration may be in a `tf.function` and others in eager code, but `step` can use the
    result of `unscale` only if both are in the same function, or both in eager code.

    When a function that was traced earlier is called again, its calls are not recorded. Two mistakes are therefore not
    noticed: calling a function that contains `step` twice, and passing unscaled gradients to a function that was traced
    with scaled ones, which divides them again.

    `is_strict` is False for a scaler that is not enabled: calls may then be repeated, but `unscale` and `step` must
    still be in the same function, or both in eager code.

    Examples:
        >>> calls = CallOrder()
        >>> calls.note_step("optimizer", None)
        >>> calls.validate_step("optimizer", [])
        Traceback (most recent call last):
            ...
        RuntimeError: step was called already for this optimizer (str) since the last update: call update()
        once after all optimizers have stepped, eagerly if a step is eager, or abandon() if an exception ended the
        iteration.
    """

    def __init__(self, is_strict: bool = True) -> None:
        self._is_strict = is_strict
        self._unscaled: list[_Unscaled] = []
        # The gradients of the calls before the last update, which are known as long as somebody else keeps them.
        self._before: list[UnscaledGradients] = []
        self._step_calls: weakref.WeakKeyDictionary[_Context, list[_Call]] = weakref.WeakKeyDictionary()
        self._ops: weakref.WeakKeyDictionary[_Context, list[tf.Operation]] = weakref.WeakKeyDictionary()

    def validate_unscale(self, optimizer: object, grads: Gradients | None) -> None:
        """Raise an error if `unscale` must not be called now for this optimizer.

        `grads` are the gradients that it got; None if it got an accumulator.
        """
        self._refuse_after_step("unscale", optimizer)
        before = self._unscaled_here(optimizer)
        if not self._is_strict or not before:
            return
        given = [grad for grad in grads or () if grad is not None]
        # In a window the overflows of all variables were counted.
        has_window = grads is None or any(each.before.of_window for each in before)
        were_returned = any(each.gradients.returned(grad) for each in before for grad in given)
        were_given = any(each.gradients.got(grad) for each in before for grad in given)
        if has_window or were_returned or were_given:
            raise RuntimeError(
                f"unscale was called already for this optimizer ({_name(optimizer)}) since the last update"
                f"{', and one of the calls got an accumulator' if has_window else ' with these gradients'}: the "
                "gradients would be divided by the loss scale twice. Unscale each gradient once, then step, then "
                "update; call abandon() first if an exception ended the iteration before."
            )

    def note_unscale(
        self, optimizer: object, before: Checked, op: Done, given: Gradients = (), returned: Gradients = ()
    ) -> None:
        """Record a call of `unscale`, the result of checking its gradients, and the op that keeps it for `update`."""
        others = [each.gradients for each in self._unscaled_here(optimizer)]
        may_be_twice = bool(others) and any(grad is not None and not _is_scaled(grad, others) for grad in given)
        gradients = UnscaledGradients()
        gradients.add(given, returned)
        call, context = _Call(optimizer, current_replica()), weakref.ref(self._context())
        self._unscaled.append(_Unscaled(call, context, before, gradients, may_be_twice))
        self._note_op(op)

    def validate_step(self, optimizer: object, grads: Gradients) -> tuple[list[Checked], list[bool]]:
        """Raise an error if `step` must not be called now with these gradients.

        Otherwise return what the calls of `unscale` found, and for each gradient whether it is still scaled.
        """
        self._refuse_after_step("step", optimizer)
        called = self._unscaled_here(optimizer)
        if self._is_strict and not called and any(each.returned(grad) for each in self._before for grad in grads):
            raise RuntimeError(
                f"step got gradients for this optimizer ({_name(optimizer)}) that unscale returned before the last "
                "update: they would be divided by the loss scale twice. Call update after step, once for all "
                "optimizers."
            )
        if not called:
            self._refuse_unscaled_elsewhere(optimizer, grads)
            return [], [True] * len(grads)
        if any(self._are_arguments(each, grads) for each in called):
            raise RuntimeError(_outside(optimizer))
        unscaled = [each.gradients for each in called]
        known = [any(each.returned(grad) for each in self._before) for grad in grads]
        scaled = [not is_known and _is_scaled(grad, unscaled) for grad, is_known in zip(grads, known, strict=True)]
        if self._is_strict:
            self._refuse_unknown(optimizer, called, grads, scaled)
        return [each.before for each in called], scaled

    def got(self, optimizer: object, grad: Gradient) -> bool:
        """Return whether the user passed this very gradient to `unscale` since the last update."""
        return any(each.gradients.got(grad) for each in self._unscaled_here(optimizer))

    def _refuse_unknown(
        self, optimizer: object, called: "Sequence[_Unscaled]", grads: Gradients, scaled: Sequence[bool]
    ) -> None:
        """Raise an error if gradients of a step are perhaps not what `scaled` says of them.

        Those that were made after `unscale` are taken for what it returned, perhaps clipped, so there must not be more.
        If there are fewer, those that were made before may stand in for them.
        """
        num_given = sum(any(each.gradients.got(grad) for each in called) for grad in grads)
        later = [grad for grad, is_scaled in zip(grads, scaled, strict=True) if grad is not None and not is_scaled]
        num_later = len(later)
        num_unscaled = sum(each.gradients.count for each in called)
        num_missing = num_unscaled - num_given - num_later
        if num_missing < 0:
            # Zeros, which may stand for a gradient that is None, are the same in either magnitude.
            num_missing = min(0, num_missing + sum(map(is_zero, later)))
        is_doubtful = sum(scaled) > num_given or any(each.may_be_unscaled_twice for each in called)
        unscaled = [each.gradients for each in called]
        if any(is_computed_from_scaled(grad, unscaled) for grad in grads):
            raise RuntimeError(
                f"step cannot tell which gradients of this optimizer ({_name(optimizer)}) are still scaled: some were "
                "computed from the gradients that unscale got, and not from those that it returned. Clip what unscale "
                "returned: unscale leaves its argument as it is."
            )
        if (num_missing < 0 and num_later > 0) or (num_missing > 0 and is_doubtful):
            raise RuntimeError(
                f"step cannot tell which gradients of this optimizer ({_name(optimizer)}) are still scaled: unscale "
                f"returned {num_unscaled} gradients, but {num_given + num_later} of the gradients passed to step may "
                "be among them or computed from them. Compute all gradients before you first call unscale, unscale "
                "each of them once, in one call or in a call for each group, and pass all of them to step; call "
                "abandon() first if an exception ended the iteration before."
            )

    def _refuse_unscaled_elsewhere(self, optimizer: object, grads: Gradients) -> None:
        """Raise an error if `unscale` may have returned gradients of a step where the step cannot use its result."""
        # If a step has already used the unscaled gradients, that `unscale` belongs to another branch of a conditional
        # or to another function, and is not a mistake.
        elsewhere = [
            each
            for each in self._unscaled_for(optimizer)
            if each.context() is not None and not each.used_by_step and not self._is_in_other_branch(each)
        ]
        if elsewhere and not all(grad is None or any(each.gradients.got(grad) for each in elsewhere) for grad in grads):
            raise RuntimeError(_outside(optimizer))

    def _are_arguments(self, unscaled: _Unscaled, grads: Gradients) -> bool:
        """Return True if gradients may be arguments of a function within the one that `unscale` was called in.

        A trace does not know what the arguments will be. Branches of a conditional have none.
        """
        contexts = list(self._enclosing_contexts())
        inner = contexts[: next(index for index, each in enumerate(contexts) if unscaled.is_in([each]))]
        if all(isinstance(each, tf.Graph) and is_branch(each) for each in inner):
            return False
        return any(getattr(each, "graph", None) is graph for each in map(lists.values, grads) for graph in inner)

    def _is_in_other_branch(self, unscaled: _Unscaled) -> bool:
        """Return True if a call is in another branch of a conditional that is being built around the current code."""
        around, graph = list(self._enclosing_contexts()), unscaled.context()
        while isinstance(graph, tf.Graph):
            outer = getattr(graph, "outer_graph", None)
            if any(outer is each for each in around):
                return is_unfinished_branch(graph)
            graph = outer
        return False

    def refuse_conditional(self, verb: str) -> None:
        """Raise an error in a conditional or `tf.function` of a TF1 graph, where `update` could not run the call."""
        with tf.init_scope():
            in_eager_program = tf.executing_eagerly()
        graph = tf.compat.v1.get_default_graph()
        # A conditional of control flow v1 has no graph of its own.
        if not in_eager_program and (graph.building_function or control_flow_context(graph) is not None):
            raise NotImplementedError(
                f"{verb} in a conditional, or in a tf.function, in a TF1 graph: update would not run it. Compute the "
                f"gradients in the conditional and build the {verb} outside of it; or train in a tf.function of an "
                "eager program."
            )

    def note_step(self, optimizer: object, op: Done) -> None:
        """Record a call of `step` and its op."""
        # The record of `unscale` stays until the update: another branch of a conditional may step with the same
        # gradients.
        contexts = list(self._enclosing_contexts())
        self._unscaled = [
            each._replace(used_by_step=True) if each.call.is_for(optimizer) and each.is_in(contexts) else each
            for each in self._unscaled
        ]
        self._step_calls.setdefault(self._context(), []).append(_Call(optimizer, current_replica()))
        self._note_op(op)

    def _note_op(self, op: Done) -> None:
        if op is not None and not op.graph.building_function:
            # A `tf.function` runs its ops in the right order by itself, and a stored op would keep its graph alive.
            self._ops.setdefault(self._context(), []).append(op)

    def ops(self) -> Sequence[tf.Operation]:
        """Return the ops of the calls since the last update, which `update` must run in a TF1 graph.

        There are none in eager code and in a `tf.function`, where the calls run in the order of the program.
        """
        return self._ops.get(self._context(), [])

    @property
    def has_steps(self) -> bool:
        """True if a call of `step` was recorded in the current graph, or in eager code, since the last update."""
        return bool(self._step_calls.get(self._context()))

    @property
    def has_unscaled(self) -> bool:
        """True if a call of `unscale` was recorded in the current graph, or in eager code, since the last update."""
        return any(each.is_in([self._context()]) for each in self._unscaled)

    def end(self) -> None:
        """Forget the calls that were made in the current graph, or in eager code."""
        context = self._context()
        step_calls = self._step_calls.pop(context, [])
        self._ops.pop(context, None)
        self._before = [each.gradients for each in self._unscaled]
        if on_replica():
            # Only this replica's calls are forgotten: the other replicas call `update` themselves.
            replica = current_replica()
            self._step_calls[context] = [call for call in step_calls if call.replica != replica]
            self._unscaled = [
                each for each in self._unscaled if each.call.replica != replica or self._outlives_update(each)
            ]
        else:
            self._unscaled = list(filter(self._outlives_update, self._unscaled))

    def _outlives_update(self, unscaled: _Unscaled) -> bool:
        """Return True if `step` may still follow a call of `unscale` after an `update` in the current context."""
        context = unscaled.context()
        if context is None or context is self._context():
            return False
        # Among functions, only those around the current one are still being traced. The trace of any other function is
        # finished, or has failed.
        is_function = isinstance(context, tf.Graph) and context.building_function
        return not is_function or unscaled.is_in(list(self._enclosing_contexts()))

    def _unscaled_for(self, optimizer: object) -> list[_Unscaled]:
        return [each for each in self._unscaled if each.call.is_for(optimizer)]

    def _unscaled_here(self, optimizer: object) -> list[_Unscaled]:
        contexts = list(self._enclosing_contexts())
        return [each for each in self._unscaled_for(optimizer) if each.is_in(contexts)]

    def _refuse_after_step(self, verb: str, optimizer: object) -> None:
        calls = [call for context in self._enclosing_contexts() for call in self._step_calls.get(context, [])]
        if self._is_strict and any(call.is_for(optimizer) for call in calls):
            order = "" if verb == "step" else "unscale comes before step; "
            raise RuntimeError(
                f"step was called already for this optimizer ({_name(optimizer)}) since the last update: {order}call "
                "update() once after all optimizers have stepped, eagerly if a step is eager, or abandon() if an "
                "exception ended the iteration."
            )

    def _context(self) -> "_Context":
        return self if tf.executing_eagerly() else tf.compat.v1.get_default_graph()

    def _enclosing_contexts(self) -> Iterator["_Context"]:
        """Yield the current context, then all graphs around it, such as the function around a conditional's branch."""
        context = self._context()
        while context is not None:
            yield context
            context = getattr(context, "outer_graph", None)


#: Where a call is made: the graph that is being built, or for eager code the `CallOrder` object itself.
_Context: TypeAlias = tf.Graph | CallOrder


def _outside(optimizer: object) -> str:
    return (
        f"unscale was called for this optimizer ({_name(optimizer)}) outside of the tf.function that step is called "
        "in: call both in the same function, or both eagerly; call abandon() first if an exception ended the iteration "
        "before."
    )


def _is_scaled(grad: Gradient, unscaled: Sequence[UnscaledGradients]) -> bool:
    """Return whether a gradient is scaled: one that `unscale` got, or that was made before it was first called."""
    return any(each.got(grad) for each in unscaled) or unscaled[0].precede(grad)


def _name(optimizer: object) -> str:
    name = getattr(optimizer, "name", None)
    return type(optimizer).__name__ if name is None else f"{type(optimizer).__name__} {name!r}"
