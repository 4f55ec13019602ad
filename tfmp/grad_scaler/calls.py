"""The calls of an iteration: which may follow, and what they found, until the next update of the loss scale."""

import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, TypeAlias

import tensorflow as tf

from tfmp.core import lists
from tfmp.core.distribute import Distribution, current_distribution, current_replica, on_replica
from tfmp.core.gradients.unscaled_gradients import UnscaledGradients, is_computed_from_scaled, is_zero
from tfmp.core.overflow.found import Checked, Found
from tfmp.core.tensorflow_internals import control_flow_context, is_branch, is_unfinished_branch
from tfmp.core.tracing import conditional_update
from tfmp.grad_scaler.findings import Findings
from tfmp.types import Done, Gradient, Gradients

#: Adjusts the loss scale by what was found, and counts it as a step: if a boolean scalar says so, or always if that is
#: None.
Adjust: TypeAlias = Callable[[Found, tf.Tensor | None], Done]


class _Call(NamedTuple):
    """A call of `step`, or of `unscale` with some of an optimizer's gradients."""

    #: This reference keeps the optimizer alive, so that no other object can get its identity.
    optimizer: object
    #: The number of the replica on which the call was made; None outside of replicas.
    replica: int | None
    #: Where the call was made.
    context: "weakref.ref[_Context]"
    #: The gradients that `unscale` got, and those that it returned; none for a call of `step`.
    gradients: UnscaledGradients
    #: What `unscale` found; None for a call of `step`.
    before: Checked | None = None
    #: True if the gradients may be computed from those that an earlier call of `unscale` returned.
    may_be_unscaled_twice: bool = False
    #: True if `step` was called with the gradients.
    used_by_step: bool = False

    def is_for(self, optimizer: object) -> bool:
        return self.optimizer is optimizer and self.replica == current_replica()

    def is_in(self, contexts: "Sequence[_Context]") -> bool:
        context = self.context()
        return any(context is each for each in contexts)


class Calls:
    """The calls of an iteration, which must come in this order for each optimizer, and what they found.

        unscale      optional; once for all gradients, or once for each group of them
        step         at most once; left out if the user drops the step
        update       once for all optimizers; the calls before it are forgotten

    Calls are recorded when Python runs them: in eager code in every iteration, in a graph or a `tf.function` only while
    it is built. What they find is kept on the device, also by later runs of a function. `step` can use what `unscale`
    found only if both are in the same function, or both in eager code.

    Two mistakes are not noticed, because a function that is called again records nothing: calling a function that
    contains `step` twice, and passing unscaled gradients to a function that was traced with scaled ones.

    `is_strict` is False for a scaler that is not enabled, whose calls may be repeated. `needs_max_abs` is True if
    `Adjust` needs the largest magnitude of the gradients, and `has_detector` if steps can be skipped as spikes.

    Examples:
        >>> from tfmp.core.distribute import SingleProcess
        >>> calls = Calls()
        >>> calls.note_steps(["optimizer"], Found(tf.constant(True)), [], SingleProcess())
        >>> calls.validate_step("optimizer", [])
        Traceback (most recent call last):
            ...
        RuntimeError: step was called already for this optimizer (str) since the last update: call update()
        once after all optimizers have stepped, eagerly if a step is eager, or abandon() if an exception ended the
        iteration.
    """

    def __init__(self, *, is_strict: bool = True, needs_max_abs: bool = False, has_detector: bool = False) -> None:
        self._is_strict = is_strict
        self._calls: list[_Call] = []
        # The gradients of the calls before the last update, which are known as long as somebody else keeps them.
        self._before: list[UnscaledGradients] = []
        self._ops: weakref.WeakKeyDictionary[_Context, list[tf.Operation]] = weakref.WeakKeyDictionary()
        #: What the calls have found.
        self.findings = Findings(needs_max_abs=needs_max_abs, has_detector=has_detector)

    # Which calls may follow

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
        has_window = grads is None or any(each.before.of_window for each in before if each.before is not None)
        if has_window or any(
            each.gradients.returned(grad) or each.gradients.got(grad) for each in before for grad in given
        ):
            raise RuntimeError(
                f"unscale was called already for this optimizer ({_name(optimizer)}) since the last update"
                f"{', and one of the calls got an accumulator' if has_window else ' with these gradients'}: the "
                "gradients would be divided by the loss scale twice. Unscale each gradient once, then step, then "
                "update; call abandon() first if an exception ended the iteration before."
            )

    def validate_step(self, optimizer: object, grads: Gradients) -> tuple[list[Checked], list[bool]]:
        """Raise an error if `step` must not be called now with these gradients.

        Otherwise return what the calls of `unscale` found, and for each gradient whether it is still scaled.
        """
        self._refuse_after_step("step", optimizer)
        called = self._unscaled_here(optimizer)
        are_old = [any(each.returned(grad) for each in self._before) for grad in grads]
        if self._is_strict and not called and any(are_old):
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
        scaled = [not is_old and _is_scaled(grad, called) for grad, is_old in zip(grads, are_old, strict=True)]
        if self._is_strict:
            _refuse_unknown(optimizer, called, grads, scaled)
        return [each.before for each in called if each.before is not None], scaled

    def got(self, optimizer: object, grad: Gradient) -> bool:
        """Return whether the user passed this very gradient to `unscale` since the last update."""
        return _got(self._unscaled_here(optimizer), grad)

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

    def _refuse_after_step(self, verb: str, optimizer: object) -> None:
        around = list(self._contexts_around())
        stepped = [each for each in self._calls if each.before is None and each.is_in(around)]
        if self._is_strict and any(each.is_for(optimizer) for each in stepped):
            order = "" if verb == "step" else "unscale comes before step; "
            raise RuntimeError(
                f"step was called already for this optimizer ({_name(optimizer)}) since the last update: {order}call "
                "update() once after all optimizers have stepped, eagerly if a step is eager, or abandon() if an "
                "exception ended the iteration."
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
        if elsewhere and not all(grad is None or _got(elsewhere, grad) for grad in grads):
            raise RuntimeError(_outside(optimizer))

    def _are_arguments(self, unscaled: _Call, grads: Gradients) -> bool:
        """Return True if gradients may be arguments of a function within the one that `unscale` was called in.

        A trace does not know what the arguments will be. Branches of a conditional have none.
        """
        contexts = list(self._contexts_around())
        inner = contexts[: next(index for index, each in enumerate(contexts) if unscaled.is_in([each]))]
        if all(isinstance(each, tf.Graph) and is_branch(each) for each in inner):
            return False
        return any(getattr(each, "graph", None) is graph for each in map(lists.values, grads) for graph in inner)

    def _is_in_other_branch(self, unscaled: _Call) -> bool:
        """Return True if a call is in another branch of a conditional that is being built around the current code."""
        around, graph = list(self._contexts_around()), unscaled.context()
        while isinstance(graph, tf.Graph):
            outer = getattr(graph, "outer_graph", None)
            if any(outer is each for each in around):
                return is_unfinished_branch(graph)
            graph = outer
        return False

    # What they found

    def note_unscale(
        self,
        optimizer: object,
        before: Checked,
        found: Found | None,
        done: Done,
        distribution: Distribution,
        given: Gradients = (),
        returned: Gradients = (),
    ) -> None:
        """Record a call of `unscale`, and keep what was found, which `update` needs if the user drops the step."""
        others, call = self._unscaled_here(optimizer), self._call(optimizer)
        may_be_twice = bool(others) and any(grad is not None and not _is_scaled(grad, others) for grad in given)
        call.gradients.add(given, returned)
        op = self._op_of_call(found, [done], distribution, of_step=False)
        self._calls.append(call._replace(before=before, may_be_unscaled_twice=may_be_twice))
        self._note_op(op)

    def note_steps(
        self, optimizers: Sequence[object], found: Found | None, done: Sequence[Done], distribution: Distribution
    ) -> Done:
        """Record the steps of optimizers that step together, keep what was found, and return the op of all calls."""
        op = self._op_of_call(found, done, distribution, of_step=True)
        around = list(self._contexts_around())
        # The record of `unscale` stays until the update: another branch of a conditional may step with the same
        # gradients.
        self._calls = [
            each._replace(used_by_step=each.used_by_step or (each.is_in(around) and any(map(each.is_for, optimizers))))
            for each in self._calls
        ]
        self._calls += map(self._call, optimizers)
        self._note_op(op)
        return op

    def _call(self, optimizer: object) -> _Call:
        return _Call(optimizer, current_replica(), weakref.ref(self._context()), UnscaledGradients())

    def _op_of_call(
        self, found: Found | None, done: Sequence[Done], distribution: Distribution, *, of_step: bool
    ) -> Done:
        """Return the op that runs a call and those before it, and then keeps what was found, unless that is None."""
        before = [op for op in [*done, *self.ops()] if op is not None]
        if found is None:
            return tf.group(*before)

        def keep() -> Done:
            with tf.control_dependencies(before):
                return self.findings.add(found, of_step=of_step)

        return tf.group(*before, distribution.once(keep))

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
    def have_begun(self) -> bool:
        """True in eager code if there was a call since the last update, also one in a `tf.function`."""
        return bool(self._calls_here()) or bool(self.findings.read().results > 0)

    # The end of the iteration

    def end(self, adjust: Adjust, *, sets_scale: bool = False) -> Done:
        """Adjust the loss scale when all calls have run.

        There must have been a call, unless the user `sets_scale`: then `adjust` only counts a step, if there was one.
        """
        calls, ops = self._calls_here(), list(self.ops())
        if not calls and not sets_scale:
            ops += self._refuse_if_nothing_found()
        # A step that Python has seen is certain, and needs no conditional.
        is_certain = any(each.before is None for each in calls) and not sets_scale

        def move() -> Done:
            with tf.control_dependencies(ops):
                counts = self.findings.read()
                adjusted = adjust(self.findings.found(counts), None if is_certain else self.findings.is_step(counts))
            return self.findings.clear(counts, after=adjusted)

        moved = _once(move)
        self.forget()
        return moved

    def give_up(self, adjust: Adjust) -> Done:
        """Adjust the loss scale by the results so far, without running the calls; count an overflow as a step."""
        self.forget()

        def move() -> Done:
            counts = self.findings.read()
            found = self.findings.found(counts)
            adjusted = conditional_update(
                counts.results > 0, [], lambda _: adjust(found, tf.logical_not(found.applied))
            )
            return self.findings.clear(counts, after=adjusted)

        return _once(move)

    def forget(self) -> None:
        """Forget the calls that were made in the current graph, or in eager code."""
        self._ops.pop(self._context(), None)
        self._before = [each.gradients for each in self._calls if each.before is not None]
        # On a replica, only its own calls are forgotten: the other replicas call `update` themselves.
        others = on_replica()
        self._calls = [
            each
            for each in self._calls
            if (others and each.replica != current_replica()) or self._outlives_update(each)
        ]

    def _outlives_update(self, call: _Call) -> bool:
        """Return True if a call still counts after an `update` in the current context."""
        context = call.context()
        if context is None or context is self._context():
            return False
        # Among functions, only those around the current one are still being traced. The trace of any other function is
        # finished, or has failed, and `step` cannot follow an `unscale` in it.
        is_function = isinstance(context, tf.Graph) and context.building_function
        return not is_function or call.before is None or call.is_in(list(self._contexts_around()))

    def _refuse_if_nothing_found(self) -> list[tf.Operation]:
        """Raise an error if nothing was found since the last update; in a graph, return the op that checks this.

        This is for an update before which Python recorded no call. Calls in a `tf.function` that was traced earlier
        show only on the device.
        """
        message = "update was called, and no optimizer has stepped since the last update: call step first."
        if not tf.executing_eagerly() and not tf.compat.v1.get_default_graph().building_function:
            raise RuntimeError("update was built before any step: build the steps first, and update in the same graph.")
        if not tf.executing_eagerly():
            return [tf.debugging.Assert(self.findings.read().results > 0, [message])]
        if not self.findings.read().results > 0:
            raise RuntimeError(message)
        return []

    def _calls_here(self) -> list[_Call]:
        return [each for each in self._calls if each.is_in([self._context()])]

    def _unscaled_for(self, optimizer: object) -> list[_Call]:
        return [each for each in self._calls if each.before is not None and each.is_for(optimizer)]

    def _unscaled_here(self, optimizer: object) -> list[_Call]:
        around = list(self._contexts_around())
        return [each for each in self._unscaled_for(optimizer) if each.is_in(around)]

    def _context(self) -> "_Context":
        return self if tf.executing_eagerly() else tf.compat.v1.get_default_graph()

    def _contexts_around(self) -> Iterator["_Context"]:
        """Yield the current context, then all graphs around it, such as the function around a conditional's branch."""
        context = self._context()
        while context is not None:
            yield context
            context = getattr(context, "outer_graph", None)


#: Where a call is made: the graph that is being built, or for eager code the `Calls` object itself.
_Context: TypeAlias = tf.Graph | Calls


def _once(function: Callable[[], Done]) -> Done:
    return current_distribution(is_distributed=False).once(function) if on_replica() else function()


def _refuse_unknown(optimizer: object, called: Sequence[_Call], grads: Gradients, scaled: Sequence[bool]) -> None:
    """Raise an error if gradients of a step are perhaps not what `scaled` says of them.

    Those that were made after `unscale` are taken for what it returned, perhaps clipped, so there must not be more. If
    there are fewer, those that were made before may stand in for them.
    """
    if any(is_computed_from_scaled(grad, [each.gradients for each in called]) for grad in grads):
        raise RuntimeError(
            f"step cannot tell which gradients of this optimizer ({_name(optimizer)}) are still scaled: some were "
            "computed from the gradients that unscale got, and not from those that it returned. Clip what unscale "
            "returned: unscale leaves its argument as it is."
        )
    num_given = sum(_got(called, grad) for grad in grads)
    later = [grad for grad, is_scaled in zip(grads, scaled, strict=True) if grad is not None and not is_scaled]
    num_unscaled = sum(each.gradients.count for each in called)
    num_missing = num_unscaled - num_given - len(later)
    if num_missing < 0:
        # Zeros, which may stand for a gradient that is None, are the same in either magnitude.
        num_missing = min(0, num_missing + sum(map(is_zero, later)))
    is_doubtful = sum(scaled) > num_given or any(each.may_be_unscaled_twice for each in called)
    if (num_missing < 0 and later) or (num_missing > 0 and is_doubtful):
        raise RuntimeError(
            f"step cannot tell which gradients of this optimizer ({_name(optimizer)}) are still scaled: unscale "
            f"returned {num_unscaled} gradients, but {num_given + len(later)} of the gradients passed to step may "
            "be among them or computed from them. Compute all gradients before you first call unscale, unscale "
            "each of them once, in one call or in a call for each group, and pass all of them to step; call "
            "abandon() first if an exception ended the iteration before."
        )


def _outside(optimizer: object) -> str:
    return (
        f"unscale was called for this optimizer ({_name(optimizer)}) outside of the tf.function that step is called "
        "in: call both in the same function, or both eagerly; call abandon() first if an exception ended the iteration "
        "before."
    )


def _got(called: Sequence[_Call], grad: Gradient) -> bool:
    return any(each.gradients.got(grad) for each in called)


def _is_scaled(grad: Gradient, unscaled: Sequence[_Call]) -> bool:
    """Return whether a gradient is scaled: one that `unscale` got, or that was made before it was first called."""
    return _got(unscaled, grad) or unscaled[0].gradients.precede(grad)


def _name(optimizer: object) -> str:
    name = getattr(optimizer, "name", None)
    return type(optimizer).__name__ if name is None else f"{type(optimizer).__name__} {name!r}"
