"""The autocast scope that the code of a thread runs in."""

import contextlib
import threading
from collections.abc import Iterator
from typing import Any, NamedTuple

from tfmp.mixed_precision.autocast.op_types import OpTypes


class Scope(NamedTuple):
    """A scope that is not switched off."""

    #: Gives ops their types.
    op_types: OpTypes
    #: Enters the scope again.
    entered: contextlib.AbstractContextManager[None]
    #: Whether a `tf.function` is traced in the scope that was not entered within it.
    is_around_trace: bool = False


class _Thread(threading.local):
    def __init__(self) -> None:
        self.scopes: list[Scope | None] = [None]
        #: What was cast for an op whose inputs TensorFlow is converting, and to what, by the ids of the inputs.
        self.casts: dict[int, tuple[Any, Any]] = {}


# State of the module, because nothing can be passed to the user's calls of TensorFlow, which the scope changes; by
# thread, as in torch.
_thread = _Thread()


def current() -> Scope | None:
    """Return the scope that the code of this thread runs in; None if it runs in none, or if autocast is off there."""
    return _thread.scopes[-1]


def push(scope: Scope | None) -> None:
    """Let the code of this thread run in another scope, or in none."""
    _thread.scopes.append(scope)


def pop() -> Scope | None:
    """Let the code of this thread run in the scope before the present one, and return the present one."""
    if len(_thread.scopes) == 1:
        raise RuntimeError("a scope of tfmp.autocast must be left in the thread that entered it, and once only.")
    _thread.casts = {}
    return _thread.scopes.pop()


def remember_casts(casts: dict[int, tuple[Any, Any]]) -> None:
    """Remember the inputs of an op that is not made yet, before and after the cast, by the ids of those before."""
    _thread.casts = casts


def remembered_casts() -> dict[int, tuple[Any, Any]]:
    """Return what was cast for an op that is not made yet."""
    return _thread.casts


@contextlib.contextmanager
def changed(scope: Scope | None) -> Iterator[None]:
    """Run code in another scope, or in none."""
    push(scope)
    try:
        yield
    finally:
        pop()
