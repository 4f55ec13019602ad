"""What was called, and what was found, since the scale was last updated."""

import weakref
from collections.abc import Iterator, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np
import tensorflow as tf

from tfmp.core.scaler import Seen, Verdict
from tfmp.core.state import OfProgram, StateVariables


class _Findings(NamedTuple):
    """What the steps since the last update have shown, kept on the device: they may be taken in other functions.

    Attributes:
        steps: How many there were; int64.
        applied: Whether all were applied; bool.
        finite: Whether nothing overflowed; bool.
        max_abs: The largest magnitude; float32.
    """

    steps: tf.Tensor
    applied: tf.Tensor
    finite: tf.Tensor
    max_abs: tf.Tensor


_NO_FINDINGS = _Findings(np.int64(0), np.True_, np.True_, np.float32(0))


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
        """Forget all verdicts.

        Returns:
            The op that does it; None in eager mode.
        """
        return self._state.assign(_Findings(*map(tf.constant, _NO_FINDINGS)))


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
    call: _Call
    place: "weakref.ref[_Place]"
    seen: Seen


class Calls:
    """The calls that an iteration has had for each optimizer, where they are built.

    They must come in this order:

        [unscale]    at most once
        step         at most once
        update       forgets them

    They are looked at when code is built: eagerly at each call, in a graph or a `tf.function` once. A function may hold
    some of them, and eager code the others; but what `unscale` saw is known in its own function only.

    Example:
        >>> calls = Calls()
        >>> calls.note_step("optimizer", None)
        >>> calls.seen_by_unscale("optimizer")
        Traceback (most recent call last):
            ...
        RuntimeError: step was called already for this optimizer (str) since the last update: call update()
        once after all optimizers have stepped, or abandon() if an exception ended the iteration.
    """

    def __init__(self) -> None:
        self._unscaled: list[_Unscaled] = []
        self._stepped: weakref.WeakKeyDictionary[_Place, list[_Call]] = weakref.WeakKeyDictionary()
        self._ops: weakref.WeakKeyDictionary[_Place, list[tf.Operation]] = weakref.WeakKeyDictionary()

    def note_unscale(self, optimizer: object, seen: Seen) -> None:
        """Take note of `unscale`.

        Args:
            optimizer: For which optimizer.
            seen: What was seen of its gradients.

        Raises:
            RuntimeError: It was called already; or `step` was.
        """
        self._refuse_second_step("unscale", optimizer)
        for each in self._of(optimizer):
            if each.place() is self._place():
                raise RuntimeError(
                    f"unscale was called already for this optimizer ({_name(optimizer)}) since the last update: the "
                    "gradients would be divided by the loss scale twice. Unscale once, then step, then update; call "
                    "abandon() first if an exception ended the iteration before."
                )
            # Of a function that was never finished, or is traced again.
            self._unscaled.remove(each)
        self._unscaled.append(_Unscaled(_Call(optimizer, _current_replica()), weakref.ref(self._place()), seen))

    def seen_by_unscale(self, optimizer: object) -> Seen | None:
        """Return what `unscale` saw of the gradients that `step` is called with; None if it was not called.

        Args:
            optimizer: For which optimizer.

        Raises:
            RuntimeError: It was called in another function, or in eager code and `step` is not; or `step` was called
                already.
        """
        self._refuse_second_step("step", optimizer)
        for each in self._of(optimizer):
            place = each.place()
            if place is not None and not any(place is here for here in self._places()):
                raise RuntimeError(
                    f"unscale was called for this optimizer ({_name(optimizer)}) outside of the tf.function that step "
                    "is called in: call both in the same function, or both eagerly."
                )
            return each.seen if place is not None else None
        return None

    def note_step(self, optimizer: object, op: tf.Operation | None) -> None:
        """Take note of `step`.

        Args:
            optimizer: For which optimizer.
            op: The step, None in eager mode.
        """
        self._unscaled = [each for each in self._unscaled if not each.call.is_for(optimizer)]
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
            self._unscaled = [each for each in self._unscaled if each.call.replica != here]
        else:
            self._unscaled = []

    def _of(self, optimizer: object) -> list[_Unscaled]:
        return [each for each in self._unscaled if each.call.is_for(optimizer)]

    def _refuse_second_step(self, verb: str, optimizer: object) -> None:
        calls = [call for place in self._places() for call in self._stepped.get(place, [])]
        if any(call.is_for(optimizer) for call in calls):
            order = "" if verb == "step" else "unscale comes before step; "
            raise RuntimeError(
                f"step was called already for this optimizer ({_name(optimizer)}) since the last update: {order}call "
                "update() once after all optimizers have stepped, or abandon() if an exception ended the iteration."
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
_Place: TypeAlias = tf.Graph | Calls


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
