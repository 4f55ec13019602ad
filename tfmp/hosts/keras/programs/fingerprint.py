"""Tells whether a program that was compiled for an optimizer still does what the optimizer would do."""

import re
import types
import weakref
from collections.abc import Callable, Hashable, Iterable
from typing import Any, TypeAlias

import numpy as np
import tensorflow as tf

from tfmp.core.tensorflow_internals import TRACKING_PREFIX
from tfmp.hosts.keras.own_code import OWN_PACKAGES, is_from, is_of_keras

_Reference: TypeAlias = Callable[[], object]


class Fingerprint:
    """The settings of objects, such as an optimizer and its variables, at one moment, in a form that can be compared.

    A compiled program contains Python's numbers and flags as they were when it was traced; the values of variables it
    reads anew each time it runs. So a fingerprint contains numbers, strings and arrays by value, and variables, tensors
    and functions by their identity. Lists, dictionaries and objects of Keras' own classes, such as schedules and
    constraints, are looked into. Nothing is known of what any other object contains, and it may change at any time.

    Attributes:
        key: Equal for two fingerprints if all settings are the same.
        is_complete: False if a setting is an object that may change without a change of the key.

    Examples:
        >>> import keras
        >>> optimizer = keras.optimizers.SGD(0.5)
        >>> before = Fingerprint([optimizer])
        >>> optimizer.learning_rate = 0.25  # a variable
        >>> Fingerprint([optimizer]).key == before.key
        True
        >>> optimizer.clipvalue = 1.0
        >>> Fingerprint([optimizer]).key == before.key
        False
    """

    def __init__(self, settings: Iterable[object]) -> None:
        self._identified: dict[int, object] = {}
        self.is_complete = True
        self.key: Hashable = tuple(map(self._read, settings))

    def references(self) -> list[_Reference]:
        """Return weak references to all objects that the key contains by their identity.

        The key means nothing any more once one of them returns None: another object can have the same identity then.
        """
        return list(map(_reference, self._identified.values()))

    def _read(self, value: Any) -> Hashable:  # noqa: ANN401 - whatever a setting may be
        if value is None or isinstance(value, _PLAIN):
            # As text: 1 equals True, 0.0 equals -0.0, and NaN does not equal itself.
            return type(value), repr(value)
        if isinstance(value, np.ndarray):
            return value.dtype.str, value.shape, value.tobytes()
        if isinstance(value, list | tuple):
            return list, *map(self._read, value)
        if isinstance(value, set | frozenset):
            return set, frozenset(map(self._read, value))
        if isinstance(value, dict):
            return dict, *((self._read(name), self._read(each)) for name, each in value.items())
        return self._of_object(value)

    def _of_object(self, value: Any) -> Hashable:  # noqa: ANN401
        is_known = id(value) in self._identified
        self._identified[id(value)] = value
        if is_known:
            return id(value)
        # Keras' variables, and nothing else of Keras, have `numpy`.
        if not is_of_keras(value) or hasattr(value, "numpy"):
            self.is_complete = self.is_complete and _is_constant(value)
            return id(value)
        attributes = {name: each for name, each in vars(value).items() if not name.startswith(TRACKING_PREFIX)}
        return id(value), self._read(attributes)


def _is_constant(value: object) -> bool:
    """Return whether nothing about an object changes that an optimizer of Keras reads in Python."""
    # The values of variables are read by the program.
    return isinstance(value, _CONSTANT) or is_from(OWN_PACKAGES, type(value).__module__)


_CONSTANT = (tf.Variable, type, np.dtype, re.Pattern, types.FunctionType, types.MethodType, types.BuiltinFunctionType)
_PLAIN = (int, float, complex, str, bytes, np.generic)


def _reference(value: object) -> _Reference:
    try:
        return weakref.ref(value)
    except TypeError:
        return lambda: value
