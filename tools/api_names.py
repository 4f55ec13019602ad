"""Writes the table of TensorFlow's public names that `tfmp.migrate` reads.

The names are those of the installed TensorFlow, which must be 2.15. With that version, a test also makes the table
again and compares it:

    python -m tools.api_names > tfmp/migrate/tables/api_names.txt
"""

from __future__ import annotations

import sys
import types
from collections import defaultdict
from collections.abc import Iterator

import tensorflow as tf

# Modules whose names are not listed: the names are the same in `tf` and `tf.compat.v1`, they are too many, or no legacy
# script can use them.
_WHOLE = frozenset(
    (
        "app.flags",
        "compat",
        "experimental.dtensor",
        "experimental.numpy",
        "flags",
        "mlir",
        "raw_ops",
        "test.mock",
    )
)
# The prefixes of the modules that TensorFlow assembles its public modules from.
_PUBLIC = (
    "tensorflow._api.",
    "tensorflow.compat.v1",
    "tensorflow_estimator.python.estimator.api.",
    "keras.api.",
    "tensorboard.summary.",
)


def table() -> str:
    """Return the table: a line `module sign name name ...` for each module of `tf` and each of the signs.

    The sign is `1` for names that only `tf.compat.v1` has, `2` for names that only `tf` has, `!` for names that both
    have for different things, and `=` for names that both have for the same thing. The module is empty for `tf` itself.
    A name that ends in `.*` is a module whose names are not listed.
    """
    old, new = dict(_names(tf.compat.v1)), dict(_names(tf))
    lines: dict[tuple[str, str], list[str]] = defaultdict(list)
    for name in sorted(old.keys() | new.keys()):
        module, _, last = name.rpartition(".")
        if name.removesuffix(".*") in _WHOLE:
            module, last = name.removesuffix(".*").rpartition(".")[0], name.removesuffix(".*").rpartition(".")[2] + ".*"
        lines[module, _sign(name, old, new)].append(last)
    return "".join(f"{module} {sign} {' '.join(names)}\n" for (module, sign), names in sorted(lines.items()))


def _sign(name: str, old: dict[str, object], new: dict[str, object]) -> str:
    if name not in new:
        return "1"
    if name not in old:
        return "2"
    return "=" if name.endswith(".*") or _function(old[name]) is _function(new[name]) else "!"


def _function(value: object) -> object:
    """Return the function inside TensorFlow's dispatch wrappers: `tf` and `tf.compat.v1` may wrap the same function."""
    dispatched = getattr(value, "_tf_decorator", None)
    return value if dispatched is None else _function(dispatched.decorated_target)


def _names(module: types.ModuleType, before: str = "") -> Iterator[tuple[str, object]]:
    for word in dir(module):
        name = f"{before}{word}"
        if word.startswith("_"):
            continue
        if name in _WHOLE:
            yield f"{name}.*", None
            continue
        value = getattr(module, word)
        if not isinstance(value, types.ModuleType):
            yield name, value
        elif value.__name__.startswith(_PUBLIC):
            yield from _names(value, f"{name}.")


if __name__ == "__main__":
    sys.stdout.write(table())
