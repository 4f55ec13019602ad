"""The calls of an iteration: which may follow, until the next update of the loss scale."""

import dataclasses
import enum
import weakref
from collections.abc import Callable, Sequence
from typing import TypeAlias

import tensorflow as tf

from tfmp.core import lists
from tfmp.core.distribute import SingleProcess, current_distribution, current_replica
from tfmp.core.gradients.unscaled_gradients import UnscaledGradients, is_computed_from_scaled, is_zero
from tfmp.core.overflow.found import Checked, Found
from tfmp.core.tensorflow_internals import control_flow_context, is_branch, is_unfinished_branch
from tfmp.core.tracing import conditional_update
from tfmp.grad_scaler.findings import Adjust, Findings
from tfmp.types import Done, Gradients


class Stage(enum.Enum):
    """Where an optimizer is after a call, which has the name of the value; before any call it is ready."""

    UNSCALED = "unscale"
    STEPPED = "step"


@dataclasses.dataclass(eq=False)
class Call:
    """A call of `unscale` with a group of an optimizer's gradients, or of `step` with all of them."""

    stage: Stage
    #: This reference keeps the optimizer alive, so that no other object can get its identity.
    optimizer: object
    #: The number of the replica on which the call was made; None outside of replicas.
    replica: int | None
    #: The calls of `unscale` before it, each with a group.
    groups: "list[Call]"
    #: The gradients that `unscale` got, and those that it returned.
    gradients: UnscaledGradients = dataclasses.field(default_factory=UnscaledGradients)
    #: What `unscale` found.
    checked: Checked = dataclasses.field(init=False, repr=False)
    #: True if the gradients may be computed from those that an earlier call of `unscale` returned.
    may_be_unscaled_twice: bool = False
    used_by_step: bool = False
    #: For each gradient of a step, whether the user passed this very one to `unscale`; and whether it is still scaled.
    got: list[bool] = dataclasses.field(default_factory=list)
    scaled: list[bool] = dataclasses.field(default_factory=list)
    #: Runs the call in a TF1 graph.
    op: Done = None


class Calls:
    """The calls of an iteration. For each optimizer, on each replica, they go through these stages.

        ready     -- unscale -->  UNSCALED    with a group of its gradients, or with all
        UNSCALED  -- unscale -->  UNSCALED    with another group
        ready     -- step ----->  STEPPED     with scaled gradients
        UNSCALED  -- step ----->  STEPPED     with what `unscale` returned, and with others that are still scaled
        any       -- update --->  ready       once for all optimizers; the user may have dropped steps

    A call counts where it was made, in eager code or in one graph, and in the functions and branches within. So each
    branch of a conditional may step, and `step` can use what `unscale` found only if both are in one function, or both
    in eager code. Python records a call in a `tf.function` only during tracing. So two mistakes are not noticed:
    calling a function that contains `step` twice, and passing unscaled gradients to one traced with scaled ones.

    `is_strict` is False for a scaler that is not enabled, whose calls may be repeated.
    """

    def __init__(self, findings: Findings, *, is_strict: bool = True) -> None:
        self.findings = findings
        self._is_strict = is_strict
        self._calls: weakref.WeakKeyDictionary[_Place, list[Call]] = weakref.WeakKeyDictionary()
        # The gradients of the calls before the last update.
        self._before: list[UnscaledGradients] = []

    def unscale(self, optimizer: object, grads: Gradients, *, of_window: bool = False) -> Call:
        """Return a call of `unscale` for `note`, or raise an error if it must not be made now with these gradients."""
        call = self._call(Stage.UNSCALED, optimizer)
        if not call.groups or not self._is_strict:
            return call
        given = [grad for grad in grads if grad is not None]
        # In a window the overflows of all variables were counted.
        has_window = of_window or any(group.checked.of_window for group in call.groups)
        earlier = [group.gradients for group in call.groups]
        is_again = any(each.returned(grad) or each.got(grad) for each in earlier for grad in given)
        if has_window or is_again:
            raise RuntimeError(
                f"unscale was called already for this optimizer ({_name(optimizer)}) since the last update"
                f"{', and one of the calls got an accumulator' if has_window else ' with these gradients'}: the "
                "gradients would be divided by the loss scale twice. Unscale each gradient once, then step, then "
                "update; call abandon() first if an exception ended the iteration before."
            )
        call.may_be_unscaled_twice = not all(map(earlier[0].precede, given))
        return call

    def step(self, optimizer: object, grads: Gradients) -> Call:
        """Return a call of `step` for `note`, or raise an error if it must not be made now with these gradients."""
        call = self._call(Stage.STEPPED, optimizer)
        are_old = [any(each.returned(grad) for each in self._before) for grad in grads]
        if self._is_strict and not call.groups and any(are_old):
            raise RuntimeError(
                f"step got gradients for this optimizer ({_name(optimizer)}) that unscale returned before the last "
                "update: they would be divided by the loss scale twice. Call update after step, once for all "
                "optimizers."
            )
        self._refuse_other_function(call, grads)
        for group in call.groups:
            counts = group.checked.window_counts
            if counts is not None and counts.shape[0] != len(grads):
                raise ValueError(
                    f"unscale returned {counts.shape[0]} gradients of the accumulator, and step got {len(grads)}: pass "
                    "all of them, None too, with the variables in the accumulator's order."
                )
        call.got = [any(group.gradients.got(grad) for group in call.groups) for grad in grads]
        call.scaled = [
            not call.groups or (not is_old and (is_given or call.groups[0].gradients.precede(grad)))
            for grad, is_old, is_given in zip(grads, are_old, call.got, strict=True)
        ]
        if call.groups and self._is_strict:
            _refuse_unknown(call, grads)
        return call

    def _call(self, stage: Stage, optimizer: object) -> Call:
        """Return a call that has yet to be made, or raise an error if it is out of order."""
        with tf.init_scope():
            in_eager_program = tf.executing_eagerly()
        graph = tf.compat.v1.get_default_graph()
        # A conditional of control flow v1 has no graph of its own.
        if not in_eager_program and (graph.building_function or control_flow_context(graph) is not None):
            raise NotImplementedError(
                f"{stage.value} in a conditional, or in a tf.function, in a TF1 graph: update would not run it. "
                f"Compute the gradients in the conditional and build the {stage.value} outside of it; or train in a "
                "tf.function of an eager program."
            )
        replica = current_replica()
        around = [each for place in reversed(self._places()) for each in self._calls.get(place, ())]
        called = [each for each in around if each.optimizer is optimizer and each.replica == replica]
        if self._is_strict and any(each.stage is Stage.STEPPED for each in called):
            order = "" if stage is Stage.STEPPED else "unscale comes before step; "
            raise RuntimeError(
                f"step was called already for this optimizer ({_name(optimizer)}) since the last update: {order}call "
                "update() once after all optimizers have stepped, eagerly if a step is eager, or abandon() if an "
                "exception ended the iteration."
            )
        groups = [each for each in called if each.stage is Stage.UNSCALED]
        return Call(stage, optimizer, replica, groups)

    def _places(self) -> "list[_Place]":
        """Return where the running code is called, then all graphs around it, such as a function around a branch."""
        place: _Place | None = self if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
        places = []
        while place is not None:
            places.append(place)
            place = getattr(place, "outer_graph", None)
        return places

    def _refuse_other_function(self, call: Call, grads: Gradients) -> None:
        """Raise an error if `unscale` may have got or returned gradients of a step that cannot use what it found."""
        places = self._places()

        def is_in_other_branch(place: _Place | None) -> bool:
            while isinstance(place, tf.Graph):
                outer = getattr(place, "outer_graph", None)
                if outer in places:
                    return is_unfinished_branch(place)
                place = outer
            return False

        with_groups = [place for place in places if any(each in call.groups for each in self._calls.get(place, ()))]
        # A trace does not know what the arguments of its function will be. Branches of a conditional have none.
        inner = places[: places.index(with_groups[-1])] if with_groups else []
        may_be_arguments = not all(map(is_branch, inner)) and any(
            getattr(lists.values(grad), "graph", None) in inner for grad in grads
        )
        # It is no mistake if a step has used what `unscale` returned, or if the call is in another unfinished branch.
        elsewhere = [
            each.gradients
            for place, calls in self._calls.items()
            if not call.groups and place not in places and not is_in_other_branch(place)
            for each in calls
            if each.optimizer is call.optimizer and each.replica == call.replica
            if each.stage is Stage.UNSCALED and not each.used_by_step
        ]
        are_known = all(grad is None or any(each.got(grad) for each in elsewhere) for grad in grads)
        if may_be_arguments or (elsewhere and not are_known):
            raise RuntimeError(
                f"unscale was called for this optimizer ({_name(call.optimizer)}) outside of the tf.function that step "
                "is called in: call both in the same function, or both eagerly; call abandon() first if an exception "
                "ended the iteration before."
            )

    def note(self, calls: Sequence[Call], found: Found | None, done: Sequence[Done]) -> Done:
        """Record calls, keep what they found, unless that is None, and return the op of all calls."""
        of_step = calls[0].stage is Stage.STEPPED
        here = self._calls.setdefault(self._places()[0], [])
        before = [op for op in [*done, *(each.op for each in here)] if op is not None]
        op = tf.group(*before)
        if found is not None:
            added = _once(lambda: self.findings.add(found, of_step=of_step, after=before))
            op = tf.group(*before, added)
        if op is not None and not op.graph.building_function:
            # A `tf.function` orders its ops by itself, and a stored op would keep its graph alive.
            calls[0].op = op
        for group in [group for call in calls for group in call.groups if of_step]:
            # It stays until the update: another branch of a conditional may step with the same gradients.
            group.used_by_step = True
        for call in calls:
            # What `unscale` found has tensors, which keep their graph alive.
            call.groups = []
        here += calls
        return op

    @property
    def have_begun(self) -> bool:
        """True in eager code if there was a call since the last update, also one in a `tf.function`."""
        return bool(self._calls.get(self)) or bool(self.findings.read().results > 0)

    def end(self, adjust: Adjust, *, sets_scale: bool = False) -> Done:
        """Adjust the loss scale when all calls have run, and begin the next iteration.

        There must have been a call, unless the user `sets_scale`: then `adjust` only counts a step, if there was one.
        """
        calls = self._calls.get(self._places()[0], [])
        ops = [each.op for each in calls if each.op is not None]
        if not self._is_strict:
            self._forget()
            return tf.group(*ops)
        if not calls and not sets_scale:
            ops = self._refuse_if_nothing_found()
        # A step that Python has seen is certain, and needs no conditional.
        is_certain = any(each.stage is Stage.STEPPED for each in calls) and not sets_scale
        if not sets_scale:
            # First: if a user's manager raises an error, the next step must not take its gradients for unscaled ones.
            self._forget()
        done = _once(lambda: self.findings.take(adjust, is_certain=is_certain, after=ops))
        if sets_scale:
            # Last: the iteration goes on if the manager refuses the user's scale.
            self._forget()
        return done

    def give_up(self, adjust: Adjust) -> Done:
        """Adjust the loss scale by the results so far, without running the calls; count an overflow as a step."""

        def adjusted(found: Found, _: tf.Tensor | None) -> Done:
            has_results = self.findings.read().results > 0
            return conditional_update(has_results, [], lambda _: adjust(found, tf.logical_not(found.applied)))

        self._forget()
        return _once(lambda: self.findings.take(adjusted))

    def _forget(self) -> None:
        """Forget the calls that were made in this place, and in functions whose traces have ended."""
        here, *around = self._places()
        replica, unscaled = current_replica(), []
        for place, calls in self._calls.items():
            unscaled += [each.gradients for each in calls if each.stage is Stage.UNSCALED]
            # The trace of a function that is not around is finished, or has failed; or `update` is called in a
            # `tf.init_scope`, or by another thread. Then the function may go on, but must not step again.
            is_over = isinstance(place, tf.Graph) and place.building_function and place not in around
            if place is here or is_over:
                # On a replica, only its own calls are forgotten: the other replicas call `update` themselves.
                calls[:] = [
                    each
                    for each in calls
                    if replica not in (None, each.replica) or (place is not here and each.stage is Stage.STEPPED)
                ]
        self._before = unscaled

    def _refuse_if_nothing_found(self) -> list[tf.Operation]:
        """Raise an error if nothing was found since the last update; in a function, return the op that checks this.

        Calls in a `tf.function` that was traced earlier show only on the device.
        """
        if not tf.executing_eagerly() and not tf.compat.v1.get_default_graph().building_function:
            raise RuntimeError("update was built before any step: build the steps first, and update in the same graph.")
        message = "update was called, and no optimizer has stepped since the last update: call step first."
        has_results = self.findings.read().results > 0
        if not tf.executing_eagerly():
            return [tf.debugging.Assert(has_results, [message])]
        if not has_results:
            raise RuntimeError(message)
        return []


#: Where a call is made: the graph that is being built, or for eager code the `Calls` object itself.
_Place: TypeAlias = tf.Graph | Calls


def _once(change: Callable[[], Done]) -> Done:
    """Change the findings once for all replicas; `update` may also be called outside of them."""
    is_outside = tf.distribute.in_cross_replica_context()
    return (SingleProcess() if is_outside else current_distribution(is_distributed=False)).once(change)


def _refuse_unknown(call: Call, grads: Gradients) -> None:
    """Raise an error if gradients of a step are perhaps not what `call.scaled` says of them.

    Those that were made after `unscale` are taken for what it returned, perhaps clipped, so there must not be more. If
    there are fewer, those that were made before may stand in for them.
    """
    unscaled = [group.gradients for group in call.groups]
    if any(is_computed_from_scaled(grad, unscaled) for grad in grads):
        raise RuntimeError(
            f"step cannot tell which gradients of this optimizer ({_name(call.optimizer)}) are still scaled: some were "
            "computed from the gradients that unscale got, and not from those that it returned. Clip what unscale "
            "returned: unscale leaves its argument as it is."
        )
    num_given = sum(call.got)
    later = [grad for grad, is_scaled in zip(grads, call.scaled, strict=True) if grad is not None and not is_scaled]
    num_unscaled = sum(each.count for each in unscaled)
    num_missing = num_unscaled - num_given - len(later)
    if num_missing < 0:
        # Zeros, which may stand for a gradient that is None, are the same in either magnitude.
        num_missing = min(0, num_missing + sum(map(is_zero, later)))
    is_doubtful = sum(call.scaled) > num_given or any(group.may_be_unscaled_twice for group in call.groups)
    if (num_missing < 0 and later) or (num_missing > 0 and is_doubtful):
        raise RuntimeError(
            f"step cannot tell which gradients of this optimizer ({_name(call.optimizer)}) are still scaled: unscale "
            f"returned {num_unscaled} gradients, but {num_given + len(later)} of the gradients passed to step may "
            "be among them or computed from them. Compute all gradients before you first call unscale, unscale "
            "each of them once, in one call or in a call for each group, and pass all of them to step; call "
            "abandon() first if an exception ended the iteration before."
        )


def _name(optimizer: object) -> str:
    name = getattr(optimizer, "name", None)
    return type(optimizer).__name__ if name is None else f"{type(optimizer).__name__} {name!r}"
