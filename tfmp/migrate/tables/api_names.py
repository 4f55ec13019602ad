"""The public names of TensorFlow 2.15, below `tf` and below `tf.compat.v1`.

`tools/api_names.py` writes the table, so that the rewriter runs where TensorFlow is not installed.
"""

import enum
from collections.abc import Mapping
from difflib import get_close_matches
from functools import cache

from tfmp.migrate.tables import starts, table_lines


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

    A module stands like its names if only `tf.compat.v1` has it, such as `logging`.

    Args:
        name: The words after `tf.`, such as `train.AdamOptimizer.minimize`.

    Examples:
        >>> standing("train.AdamOptimizer.minimize"), standing("train.AdamOptimiser")
        (<Standing.OLD: '1'>, <Standing.MISSING: ''>)
    """
    table = _table()
    for part in starts(name):
        found = table.get(part, Standing.MISSING)
        if found is not Standing.UNTOLD:
            return found
        if f"{part}.*" in table:
            return table[f"{part}.*"]
    return Standing.OLD if _signs_below(name) == {Standing.OLD} else Standing.UNTOLD


def is_module(name: str) -> bool:
    """Tell whether the words after `tf.` name a module; no words name TensorFlow itself.

    Examples:
        >>> is_module("train"), is_module(""), is_module("contrib.slim"), is_module("train.AdamOptimizer")
        (True, True, True, False)
    """
    is_contrib = name.partition(".")[0] == "contrib" and (name.count(".") < 2 and name.islower())
    return is_contrib or name in ("", "compat", "compat.v2") or _table().get(name) is Standing.UNTOLD


def is_mostly_old(module: str) -> bool:
    """Tell whether most names of a module, or all names of TensorFlow, are only in `tf.compat.v1`.

    Examples:
        >>> is_mostly_old(""), is_mostly_old("train"), is_mostly_old("nn"), is_mostly_old("keras")
        (True, True, False, False)
    """
    signs = [sign for name, sign in _table().items() if name.rpartition(".")[0] == module]
    told = [sign for sign in signs if sign is not Standing.UNTOLD]
    return 2 * told.count(Standing.OLD) > len(told)


def differs(name: str) -> bool:
    """Tell whether a name, or a name below a module, is a different object in `tf.compat.v1` than in `tf`.

    Examples:
        >>> differs("train"), differs("train.AdamOptimizer"), differs("bitwise"), differs("float32")
        (True, True, False, False)
    """
    kind = standing(name)
    signs = _signs_below(name) if kind is Standing.UNTOLD else {kind}
    return not signs.isdisjoint((Standing.OLD, Standing.AMBIGUOUS))


def successor(name: str) -> str:
    """Return the name that has taken the place of a missing one, or that is nearest to it; empty if there is none.

    Examples:
        >>> successor("train.AdamOptimiser"), successor("io.gfile.Open"), successor("mul"), successor("nn.zzz")
        ('train.AdamOptimizer', 'gfile.Open', 'multiply', '')
    """
    # Names of early versions of TensorFlow 1, with the names that took their place.
    renamed = dict(line.split() for line in table_lines("renamed.txt"))
    if name in renamed:
        return renamed[name]
    module, _, word = name.rpartition(".")
    beside = [one for one in _table() if one.rpartition(".")[0] == module]
    near = get_close_matches(name, beside, 1, 0.9) or [public_name(word)]
    return near[0] or next(iter(get_close_matches(name, _table(), 1, 0.9)), "")


def public_name(word: str) -> str:
    """Return the shortest public name with this last word; empty if there is none.

    Examples:
        >>> public_name("NewCheckpointReader"), public_name("zzz")
        ('train.NewCheckpointReader', '')
    """
    found = [name for name in _table() if name.rpartition(".")[2] == word and standing(name) is not Standing.UNTOLD]
    return min(found, key=lambda name: (name.count("."), len(name), name), default="")


@cache
def _signs_below(module: str) -> frozenset[Standing]:
    found = (sign for name, sign in _table().items() if name.startswith(f"{module}."))
    return frozenset(found) - {Standing.UNTOLD}


@cache
def _table() -> Mapping[str, Standing]:
    found: dict[str, Standing] = {}
    for line in table_lines("api_names.txt"):
        module, sign, names = line.split(" ", 2)
        for name in names.split():
            *modules, full = starts(f"{module}.{name}".lstrip("."))
            found.update(dict.fromkeys(modules, Standing.UNTOLD))
            found[full] = Standing(sign)
    return found
