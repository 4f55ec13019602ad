"""Excludes functions from AutoGraph's conversion, which makes tracing slow."""

from collections.abc import Callable
from typing import ParamSpec, TypeVar

import tensorflow as tf

Parameters = ParamSpec("Parameters")
Returned = TypeVar("Returned")


def without_autograph(function: Callable[Parameters, Returned]) -> Callable[Parameters, Returned]:
    """Return the function such that AutoGraph converts neither it nor the functions that it calls.

    When a `tf.function` traces a step, AutoGraph converts the source code of every function that the step calls. This
    takes most of the time of the trace. The code of this package does not need it, because it uses `tf.cond` instead
    of `if` on tensors.

    Args:
        function: A function that uses no `if`, `while` or `for` on tensors.

    Example:
        >>> @without_autograph
        ... def kind_of(value):
        ...     return "positive" if value is not None else "none"
        >>> kind_of(1)
        'positive'
    """
    unconverted: Callable[Parameters, Returned] = tf.autograph.experimental.do_not_convert(function)
    return unconverted
