"""Modules that decide themselves what a checkpoint holds of them."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Generic, TypeVar

import tensorflow as tf

from tfmp.types import Done

Kept = TypeVar("Kept")

#: The name that a checkpoint has for the value of every variable.
_VALUE = "VARIABLE_VALUE"


class InCheckpoint(tf.Module):
    """A value that checkpoints hold like that of a variable: `read` returns it, `restore` gets a saved one.

    The value has no shape or type of its own, so a checkpoint of a variable is restored whatever these are. What
    `restore` returns is run when a session restores the checkpoint.
    """

    def __init__(self, read: Callable[[], tf.Tensor], restore: Callable[[tf.Tensor], Done]) -> None:
        super().__init__()
        # Functions are no parts of a checkpoint, unlike a variable that was an attribute here.
        self._read = read
        self._restore = restore

    def _serialize_to_tensors(self) -> dict[str, tf.Tensor]:
        return {_VALUE: self._read()}

    def _restore_from_tensors(self, restored: Mapping[str, tf.Tensor]) -> Done:
        return self._restore(restored[_VALUE])


class NotCheckpointed(tf.Module):
    """A module that describes one run of a program: in a SavedModel, whose functions use it, and in no checkpoint."""

    def _trackable_children(self, save_type: str = "checkpoint", **kwargs: Any) -> dict[str, Any]:  # noqa: ANN401
        # This method is private: TensorFlow has no public way to be in a SavedModel but not in a checkpoint.
        return super()._trackable_children(save_type, **kwargs) if save_type == "savedmodel" else {}


class ByVariables(NotCheckpointed, Generic[Kept]):
    """One object for each list of variables, made when steps are first taken with these."""

    def __init__(self, make: Callable[[Sequence[str]], Kept]) -> None:
        super().__init__()
        self._make = make
        self._names: list[tuple[str, ...]] = []
        self._each: list[Kept] = []

    def __iter__(self) -> Iterator[Kept]:
        """Iterate over the objects, in the order of their first use."""
        return iter(self._each)

    def of(self, names: Sequence[str]) -> Kept:
        """Return the object for the variables of these names, making it on the first call."""
        if tuple(names) not in self._names:
            self._each.append(self._make(names))
            self._names.append(tuple(names))
        return self._each[self._names.index(tuple(names))]
