"""Tells Keras' own code from code that a user wrote, or put in the place of Keras'."""

import operator
from collections.abc import Iterable, Sequence
from typing import Any

#: The packages whose functions count as Keras' own: those that run when an optimizer of Keras takes a step.
OWN_PACKAGES = frozenset(("keras", "tf_keras", "tensorflow", "tfmp"))


def is_of_keras(value: object) -> bool:
    """Return whether the class of an object is a part of Keras or tf_keras, not one that a user wrote."""
    return type(value).__module__.startswith(("keras.", "tf_keras."))


def is_from(packages: Iterable[str], module: str | None) -> bool:
    """Return whether a module, known by its full name, is a part of one of the packages; one without a name is not."""
    return (module or "").partition(".")[0] in packages


class OwnCode:
    """Tells whether objects run only Keras' own code, also if a user replaces methods on an object or on its class.

    `version` changes whenever anything in the objects' classes is replaced, by Keras' own code too.

    Examples:
        >>> import functools, keras
        >>> own, optimizer = OwnCode(), keras.optimizers.SGD(0.5)
        >>> own.runs_alone([optimizer])
        True
        >>> optimizer.update_step = functools.partial(print)
        >>> own.runs_alone([optimizer])
        False
    """

    def __init__(self) -> None:
        self.version = 0
        self._classes: dict[type, tuple[Sequence[object], bool]] = {}

    def runs_alone(self, objects: Sequence[object]) -> bool:
        """Return whether the class of each object is Keras', and none of its functions was replaced."""
        if not all(map(is_of_keras, objects)):
            return False
        replaced = any(is_foreign(value) for each in objects for value in vars(each).values())
        classes = dict.fromkeys(cls for each in objects for cls in type(each).__mro__)
        return not replaced and all(list(map(self._is_own, classes)))

    def _is_own(self, cls: type) -> bool:
        # What a class holds takes longer to judge than to compare with what it held at the last call.
        held = list(vars(cls).values())
        last, answer = self._classes.get(cls, ([], True))
        # By identity: arrays and variables, which a class may hold, have no single answer to `==`.
        if len(held) != len(last) or not all(map(operator.is_, held, last)):
            answer = not any(map(is_foreign, held))
            self._classes[cls] = held, answer
            self.version += 1
        return answer


def is_foreign(value: Any) -> bool:  # noqa: ANN401 - whatever an object or a class holds
    """Return whether the value of an attribute is a function or another callable that is not a part of Keras."""
    if isinstance(value, property):
        return any(map(is_foreign, (value.fget, value.fset, value.fdel)))
    # Of methods, class methods, static methods, and functions of TensorFlow.
    function = getattr(value, "__func__", getattr(value, "python_function", value))
    if not callable(function):
        return False
    # The module in which a function was defined. `__module__` would be that of the function that a user's one wraps.
    home = getattr(function, "__globals__", None)
    module = type(function).__module__ if home is None else home.get("__name__")
    return not is_from(OWN_PACKAGES | {"builtins"}, module)
