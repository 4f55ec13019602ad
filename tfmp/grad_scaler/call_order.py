"""What was called since the scale was last updated."""

import weakref
from collections.abc import Iterator, Sequence
from typing import NamedTuple, TypeAlias

import tensorflow as tf

from tfmp.core.overflow.local_check import LocalCheck


class _Call(NamedTuple):
    """A call that was made for an optimizer, on a replica.

    Attributes:
        optimizer: The optimizer; held, so that no other takes its identity.
        replica: The replica's number; None outside of replicas.
    """

    optimizer: object
    replica: int | None

    def is_for(self, optimizer: object) -> bool:
        return self.optimizer is optimizer and self.replica == _current_replica()


class _Unscaled(NamedTuple):
    """A call of `unscale`, and whether `step` came after it."""

    call: _Call
    place: "weakref.ref[_Place]"
    known: LocalCheck
    stepped: bool = False

    def is_in(self, places: "Sequence[_Place]") -> bool:
        place = self.place()
        return any(place is here for here in places)


class CallOrder:
    """The calls that an iteration has had for each optimizer, where they are built.

    They must come in this order:

        [unscale]    at most once
        step         at most once
        update       forgets them

    They are looked at when code is built: eagerly at each call, in a graph or a `tf.function` once. A function may hold
    some of them, and eager code the others; but what `unscale` found is known in its own function only. What a function
    that was traced before does, when it is called again, is not looked at: two calls of one that steps are two steps,
    and gradients that were unscaled outside of it are divided again if it was traced with scaled ones.

    Args:
        is_strict: Whether calls out of order are refused.

    Example:
        >>> calls = CallOrder()
        >>> calls.note_step("optimizer", None)
        >>> calls.found_by_unscale("optimizer")
        Traceback (most recent call last):
            ...
        RuntimeError: step was called already for this optimizer (str) since the last update: call update()
        once after all optimizers have stepped, eagerly if a step is eager, or abandon() if an exception ended the
        iteration.
    """

    def __init__(self, is_strict: bool = True) -> None:
        self._is_strict = is_strict
        self._unscaled: list[_Unscaled] = []
        self._stepped: weakref.WeakKeyDictionary[_Place, list[_Call]] = weakref.WeakKeyDictionary()
        self._ops: weakref.WeakKeyDictionary[_Place, list[tf.Operation]] = weakref.WeakKeyDictionary()

    def refuse_second_unscale(self, optimizer: object) -> None:
        """Refuse `unscale` where it would not be in order.

        Args:
            optimizer: For which optimizer.

        Raises:
            RuntimeError: It was called already; or `step` was.
        """
        self._refuse_second_step("unscale", optimizer)
        places = list(self._places())
        if self._is_strict and any(each.is_in(places) for each in self._of(optimizer)):
            raise RuntimeError(
                f"unscale was called already for this optimizer ({_name(optimizer)}) since the last update: the "
                "gradients would be divided by the loss scale twice. Unscale once, then step, then update; call "
                "abandon() first if an exception ended the iteration before."
            )

    def note_unscale(self, optimizer: object, known: LocalCheck) -> None:
        """Take note of `unscale`.

        Args:
            optimizer: For which optimizer.
            known: What was found of its gradients.
        """
        self._unscaled.append(_Unscaled(_Call(optimizer, _current_replica()), weakref.ref(self._place()), known))

    def found_by_unscale(self, optimizer: object) -> LocalCheck | None:
        """Return what `unscale` found of the gradients that `step` is called with; None if it was not called.

        Args:
            optimizer: For which optimizer.

        Raises:
            RuntimeError: It was called in another function, or in eager code and `step` is not; or `step` was called
                already.
        """
        self._refuse_second_step("step", optimizer)
        places, called = list(self._places()), self._of(optimizer)
        for each in called:
            if each.is_in(places):
                return each.known
        # One that was stepped with is of another branch of a conditional, say, or of another function.
        if any(each.place() is not None and not each.stepped for each in called):
            raise RuntimeError(
                f"unscale was called for this optimizer ({_name(optimizer)}) outside of the tf.function that step "
                "is called in: call both in the same function, or both eagerly; call abandon() first if an exception "
                "ended the iteration before."
            )
        return None

    def refuse_conditional(self) -> None:
        """Refuse a step that `update` would not run.

        Raises:
            NotImplementedError: It is called in a conditional, or a `tf.function`, in a graph of TF1.
        """
        with tf.init_scope():
            in_eager_program = tf.executing_eagerly()
        graph = tf.compat.v1.get_default_graph()
        # Private, for want of a public way to ask; conditionals of control flow v1 have no graph of their own.
        if not in_eager_program and (graph.building_function or graph._get_control_flow_context() is not None):
            raise NotImplementedError(
                "step in a conditional, or in a tf.function, in a graph of TF1: update would not run it. Make its "
                "gradients conditional, and build the step outside of it; or train in a tf.function of an eager "
                "program."
            )

    def note_step(self, optimizer: object, op: tf.Operation | None) -> None:
        """Take note of `step`.

        Args:
            optimizer: For which optimizer.
            op: The step, None in eager mode.
        """
        # Kept until the update: another branch may step with the same gradients.
        places = list(self._places())
        self._unscaled = [
            each._replace(stepped=True) if each.call.is_for(optimizer) and each.is_in(places) else each
            for each in self._unscaled
        ]
        place = self._place()
        self._stepped.setdefault(place, []).append(_Call(optimizer, _current_replica()))
        if op is not None and not op.graph.building_function:
            # A function sees to the order itself, and would be kept alive by its ops.
            self._ops.setdefault(place, []).append(op)

    def ops(self) -> Sequence[tf.Operation]:
        """Return the steps built since the last update where nothing else puts ops in order: in a graph of TF1."""
        return self._ops.get(self._place(), [])

    @property
    def stepped(self) -> bool:
        """Whether `step` is known to have been called, here."""
        return bool(self._stepped.get(self._place()))

    def end(self) -> None:
        """Forget all calls that were made here."""
        place = self._place()
        stepped = self._stepped.pop(place, [])
        self._ops.pop(place, None)
        if on_replica():
            # The other replicas come here later.
            here = _current_replica()
            self._stepped[place] = [call for call in stepped if call.replica != here]
            self._unscaled = [each for each in self._unscaled if each.call.replica != here or self._outlives(each)]
        else:
            self._unscaled = list(filter(self._outlives, self._unscaled))

    def _outlives(self, unscaled: _Unscaled) -> bool:
        """Tell whether a call was made in a place that goes on when the present one has updated."""
        place = unscaled.place()
        if place is None or place is self._place():
            return False
        # Of functions those around this one: any other is traced, or will not be.
        is_function = isinstance(place, tf.Graph) and place.building_function
        return not is_function or unscaled.is_in(list(self._places()))

    def _of(self, optimizer: object) -> list[_Unscaled]:
        return [each for each in self._unscaled if each.call.is_for(optimizer)]

    def _refuse_second_step(self, verb: str, optimizer: object) -> None:
        calls = [call for place in self._places() for call in self._stepped.get(place, [])]
        if self._is_strict and any(call.is_for(optimizer) for call in calls):
            order = "" if verb == "step" else "unscale comes before step; "
            raise RuntimeError(
                f"step was called already for this optimizer ({_name(optimizer)}) since the last update: {order}call "
                "update() once after all optimizers have stepped, eagerly if a step is eager, or abandon() if an "
                "exception ended the iteration."
            )

    def _place(self) -> "_Place":
        return self if tf.executing_eagerly() else tf.compat.v1.get_default_graph()

    def _places(self) -> Iterator["_Place"]:
        """Yield the place that code is built in, and those that hold it: a conditional's function, and so on."""
        here = self._place()
        while here is not None:
            yield here
            here = getattr(here, "outer_graph", None)


#: A graph, or eager code, for which the object stands that asks.
_Place: TypeAlias = tf.Graph | CallOrder


def on_replica() -> bool:
    """Tell whether code is called on each replica of a strategy.

    Example:
        >>> on_replica()
        False
    """
    return tf.distribute.has_strategy() and not tf.distribute.in_cross_replica_context()


def _current_replica() -> int | None:
    # Not the thread: a strategy takes others at each run, and the system gives them old numbers.
    context = tf.distribute.get_replica_context() if on_replica() else None
    return None if context is None else int(tf.get_static_value(context.replica_id_in_sync_group))


def _name(optimizer: object) -> str:
    name = getattr(optimizer, "name", None)
    return type(optimizer).__name__ if name is None else f"{type(optimizer).__name__} {name!r}"
