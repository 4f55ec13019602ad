"""Knows which public names TensorFlow 2.15 has, as `tf` or as `tf.compat.v1`.

`tools/api_names.py` writes the table, so that a script can be judged where TensorFlow is not.
"""

import enum
from collections.abc import Mapping
from functools import cache
from importlib import resources


class Standing(enum.Enum):
    """Where a name is found."""

    #: Only in `tf.compat.v1`: who uses it means TensorFlow 1.
    OLD = "1"
    #: Only in `tf`: who uses it means TensorFlow 2.
    NEW = "2"
    #: In both, for two things.
    AMBIGUOUS = "!"
    #: In both, for one thing.
    SAME = "="
    #: A module, or something below one whose names are not listed.
    UNTOLD = "."
    #: In neither.
    MISSING = ""


def standing(name: str) -> Standing:
    """Tell where the name is found that a dotted name starts with.

    Args:
        name: What follows `tf.`, as `train.AdamOptimizer.minimize`.

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
    """Tell whether a name, or one below a module, is another thing in `tf.compat.v1` than in `tf`.

    Args:
        name: What follows `tf.`, as `train` or `train.AdamOptimizer`.

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
