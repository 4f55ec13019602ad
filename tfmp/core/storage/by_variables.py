"""Objects that a module keeps for each list of variables with which steps are taken."""

from collections.abc import Callable, Iterator, Sequence
from typing import Generic, TypeVar

from tfmp.core.storage.state_variables import NotCheckpointed

Kept = TypeVar("Kept")


class ByVariables(NotCheckpointed, Generic[Kept]):
    """One object for each list of variables, made when steps are first taken with these.

    An optimizer or scaler that TensorFlow tracks keeps this module in an attribute, so that a function that takes steps
    can be exported in a SavedModel. Checkpoints do not contain the objects: these describe one run of a program.

    Examples:
        >>> kept = ByVariables(lambda names: len(names))
        >>> kept.of(["kernel", "bias"]), kept.of(["scale"]), list(kept)
        (2, 1, [2, 1])
    """

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
