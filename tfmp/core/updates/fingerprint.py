"""Tells whether a program that was compiled for an optimizer still does what the optimizer would do."""

import weakref
from collections.abc import Callable, Hashable, Iterable
from typing import Any, TypeAlias

import numpy as np

_Reference: TypeAlias = Callable[[], object]


class Fingerprint:
    """The settings of objects at one moment, in a form that can be compared.

    A compiled program contains Python's numbers and flags as they were when it was traced; the values of variables it
    reads anew each time it runs. So a fingerprint contains numbers, strings and arrays by value, and variables, tensors
    and functions by their identity. Lists, dictionaries and objects of Keras' own classes, such as schedules and
    constraints, are looked into.

    Args:
        settings: The settings: an optimizer, what is known of its variables, and the like.

    Attributes:
        key: Equal for two fingerprints if all settings are the same.

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
        # Keras' variables, and nothing else of Keras, have `numpy`.
        if is_known or not is_of_keras(value) or hasattr(value, "numpy"):
            return id(value)
        # TensorFlow's own notes, for checkpoints, have names that begin with "_self_".
        attributes = {name: each for name, each in vars(value).items() if not name.startswith("_self_")}
        return id(value), self._read(attributes)


_PLAIN = (int, float, complex, str, bytes, np.generic)


def is_of_keras(value: object) -> bool:
    """Return whether the class of an object is a part of Keras or tf_keras, not one that a user wrote.

    Args:
        value: Any object.

    Examples:
        >>> import keras
        >>> is_of_keras(keras.optimizers.SGD(0.5)), is_of_keras(0.5)
        (True, False)
    """
    return type(value).__module__.startswith(("keras.", "tf_keras."))


def _reference(value: object) -> _Reference:
    try:
        return weakref.ref(value)
    except TypeError:
        return lambda: value
