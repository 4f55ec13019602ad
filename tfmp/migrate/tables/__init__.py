"""Tables of the names of TensorFlow, of tf.contrib and of the NPU bridge."""

from collections.abc import Sequence
from importlib import resources


def table_lines(file: str) -> Sequence[str]:
    """Return the lines of a table that is stored as text."""
    return resources.files(__name__).joinpath(file).read_text("utf-8").splitlines()


def starts(name: str) -> Sequence[str]:
    """Return the starts of a dotted name, the shortest first: `a`, `a.b` and `a.b.c` of `a.b.c`."""
    words = name.split(".")
    return [".".join(words[:count]) for count in range(1, len(words) + 1)]
