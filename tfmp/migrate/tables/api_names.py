"""The public names of TensorFlow 2.15, below `tf` and below `tf.compat.v1`.

`tools/api_names.py` writes the table, so that the rewriter runs where TensorFlow is not installed.
"""

import enum
from collections.abc import Mapping
from functools import cache
from importlib import resources


class Standing(enum.Enum):
    """Below which module a name is found."""

    #: Only in `tf.compat.v1`: a script that uses it was written for TensorFlow 1.
    OLD = "1"
    #: Only in `tf`: a script that uses it was written for TensorFlow 2.
    NEW = "2"
    #: In both, for two different objects.
    AMBIGUOUS = "!"
    #: In both, for the same object.
    SAME = "="
    #: A module, or a name below a module whose names the table does not list.
    UNTOLD = "."
    #: In neither.
    MISSING = ""


def standing(name: str) -> Standing:
    """Return the standing of the shortest part of a dotted name that decides it.

    Args:
        name: The words after `tf.`, such as `train.AdamOptimizer.minimize`.

    Example:
        >>> standing("train.AdamOptimizer.minimize"), standing("train.AdamOptimiser")
        (<Standing.OLD: '1'>, <Standing.MISSING: ''>)
    """
    table = _table()
    words = name.split(".")
    for count in range(1, len(words) + 1):
        found = table.get(".".join(words[:count]), Standing.MISSING)
        if found is not Standing.UNTOLD:
            return found
        if f"{'.'.join(words[:count])}.*" in table:
            return table[f"{'.'.join(words[:count])}.*"]
    return Standing.UNTOLD


def differs(name: str) -> bool:
    """Tell whether a name, or a name below a module, is a different object in `tf.compat.v1` than in `tf`.

    Args:
        name: The words after `tf.`, such as `train` or `train.AdamOptimizer`.

    Example:
        >>> differs("train"), differs("train.AdamOptimizer"), differs("bitwise"), differs("float32")
        (True, True, False, False)
    """
    kind = standing(name)
    if kind is Standing.UNTOLD:
        below = (sign for full, sign in _table().items() if full.startswith(f"{name}."))
        return any(sign in (Standing.OLD, Standing.AMBIGUOUS) for sign in below)
    return kind in (Standing.OLD, Standing.AMBIGUOUS)


@cache
def _table() -> Mapping[str, Standing]:
    found: dict[str, Standing] = {}
    for line in resources.files("tfmp.migrate.tables").joinpath("api_names.txt").read_text("utf-8").splitlines():
        module, sign, names = line.split(" ", 2)
        above = module.split(".")
        modules = (".".join(above[:count]) for count in range(1, len(above) + 1) if module)
        found.update(dict.fromkeys(modules, Standing.UNTOLD))
        for name in names.split():
            full = f"{module}.{name}" if module else name
            found[full] = Standing(sign)
            if full.endswith(".*"):
                found[full[:-2]] = Standing.UNTOLD
    return found
