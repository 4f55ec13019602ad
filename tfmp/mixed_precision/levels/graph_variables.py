"""Levels for the variables of TensorFlow 1's graphs, which `tf.compat.v1.get_variable` makes."""

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from tfmp.mixed_precision.levels.level import Level
from tfmp.mixed_precision.storage import FLOAT32_OR_HALF, float32_variable_storage_getter


@contextlib.contextmanager
def variables_at(level: Level) -> Iterator[None]:
    """Let the current variable scope, and those opened within it, make variables as a level asks for.

    At O2 and O3 a variable that is asked for without a type is half-precision. At O1 and O2 each half-precision
    variable that is trained is stored in float32.
    """
    # The scope is changed and not entered again, which would count the names in it anew.
    scope = tf.compat.v1.get_variable_scope()
    dtype, getter = scope.dtype, scope.custom_getter
    if tf.as_dtype(dtype).base_dtype in FLOAT32_OR_HALF:
        scope.set_dtype(tf.as_dtype(level.half) if level.number >= 2 else tf.float32)
    scope.set_custom_getter(_Getter(level, getter))
    try:
        yield
    finally:
        scope.set_dtype(dtype)
        scope.set_custom_getter(getter)


class _Thread(threading.local):
    """Whether an inner level has decided on the variable that a thread makes."""

    def __init__(self) -> None:
        self.has_decided = False


_thread = _Thread()


class _Getter:
    """A custom getter, by which a level decides in which type a variable is stored.

    The custom getter that stood here before, `outer`, may be one of an outer level, which then decides nothing.
    """

    def __init__(self, level: Level, outer: Callable[..., Any] | None) -> None:
        self._in_float32 = level.number in (1, 2)
        self._outer = outer

    def __call__(self, getter: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - as get_variable
        """Make a variable."""
        if self._outer is not None:
            getter = functools.partial(self._outer, getter)
        if _thread.has_decided:
            return getter(*args, **kwargs)
        _thread.has_decided = True
        try:
            return (
                float32_variable_storage_getter(getter, *args, **kwargs)
                if self._in_float32
                else getter(*args, **kwargs)
            )
        finally:
            _thread.has_decided = False
