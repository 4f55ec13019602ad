"""Keeps AutoGraph out of what needs no conversion."""

from collections.abc import Callable
from typing import ParamSpec, TypeVar

import tensorflow as tf

Parameters = ParamSpec("Parameters")
Returned = TypeVar("Returned")


def without_autograph(function: Callable[Parameters, Returned]) -> Callable[Parameters, Returned]:
    """Return the function, with all that it calls, as code that a `tf.function` does not convert when it traces it.

    To convert the code of a step takes most of the time of its trace, and changes nothing: it branches by `tf.cond`.

    Args:
        function: The function.

    Example:
        >>> @without_autograph
        ... def kind_of(value):
        ...     return "positive" if value is not None else "none"
        >>> kind_of(1)
        'positive'
    """
    unconverted: Callable[Parameters, Returned] = tf.autograph.experimental.do_not_convert(function)
    return unconverted
