"""Writes the tables of TensorFlow's names that `tfmp.migrate` reads.

The names are those of the installed TensorFlow, which must be 2.15. With that version, a test also makes the tables
again and compares them:

    python -m tools.api_names tfmp/migrate/tables

Run it in a process of its own: a module that was imported before may have changed what TensorFlow's lazy modules list.
"""

from __future__ import annotations

import ast
import importlib
import re
import sys
import types
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path

import tensorflow as tf

# Modules whose names are not listed: the names are the same in `tf` and `tf.compat.v1`, they are too many, or no legacy
# script can use them.
_WHOLE = frozenset(
    ("app.flags", "compat", "experimental.dtensor", "experimental.numpy", "flags", "mlir", "raw_ops", "test.mock")
)
# The prefixes of the modules that TensorFlow assembles its public modules from.
_PUBLIC = (
    "tensorflow._api.",
    "tensorflow.compat.v1",
    "tensorflow_estimator.python.estimator.api.",
    "keras.api.",
    "tensorboard.summary.",
)
# Modules of `tensorflow.python` whose names the table lists: those that scripts import names from.
_LISTED = re.compile(
    r"((client|eager|feature_column|framework|layers|lib\.io|ops|platform|profiler|saved_model|summary|tools|training|util"
    r")(\.(?!test_|.*_test|pywrap)\w+)?|\w*)"
)


def public_names() -> str:
    """Return the table of the public names: a line `module sign name name ...` for each module of `tf` and each sign.

    The sign is `1` for names that only `tf.compat.v1` has, `2` for names that only `tf` has, `!` for names that both
    have for different things, and `=` for names that both have for the same thing. The module is empty for `tf` itself.
    A name that ends in `.*` is a module whose names are not listed.
    """
    old, new = dict(_names(tf.compat.v1)), dict(_names(tf))
    lines: dict[tuple[str, str], list[str]] = defaultdict(list)
    for name in sorted(old.keys() | new.keys()):
        module, _, last = name.rpartition(".")
        if name.removesuffix(".*") in _WHOLE:
            module, _, last = name.removesuffix(".*").rpartition(".")
            last += ".*"
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


def private_names(folder: Path) -> str:
    """Return the table of the names below `tensorflow.python`: a line `module name name ...` for each module.

    `*` stands for names that the table does not list, and `*ops.gen_nn_ops` for all public names of that module.

    Args:
        folder: The folder of the package `tensorflow.python`.
    """
    lines = []
    for path in sorted(folder.rglob("*")):
        words = path.relative_to(folder).parts
        if path.suffix == ".py":
            module = ".".join(words).removesuffix(".py").removesuffix("__init__").rstrip(".")
            lines.append(f"{module} {' '.join(sorted(_private_names(module, path)))}".rstrip(" ") + "\n")
        elif path.suffix == ".so":
            module = ".".join(words).partition(".so")[0].partition(".cpython")[0]
            listed = "." not in module
            names = dir(importlib.import_module(f"tensorflow.python.{module}")) if listed else ["*"]
            lines.append(" ".join([module, *(name for name in names if not name.startswith("_"))]) + "\n")
    return "".join(lines)


def _private_names(module: str, path: Path) -> set[str]:
    """Return the names that a module binds. Its code is read, not run: many modules import only in a certain order."""
    if _LISTED.fullmatch(module) is None:
        return {"*"}
    names = set(_bound(ast.parse(path.read_text("utf-8")).body))
    if "__getattr__" in names or module.endswith("_pb2"):
        return {"*"}
    if module.rpartition(".")[2].startswith("gen_"):
        return {name for name in names if not name.startswith("_") and not name.endswith("_eager_fallback")}
    return names


def _bound(statements: Iterable[ast.stmt]) -> Iterator[str]:
    for node in statements:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.ImportFrom) and node.names[0].name == "*":
            within = f"{node.module}.".startswith("tensorflow.python.")
            yield f"*{str(node.module).removeprefix('tensorflow.python.')}" if within else "*"
        elif isinstance(node, ast.Import | ast.ImportFrom):
            yield from (alias.asname or alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.Assign | ast.AnnAssign | ast.For | ast.With):
            stored = (one for one in ast.walk(node) if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Store))
            yield from (one.id for one in stored)
        for block in ("body", "orelse", "finalbody"):
            if not isinstance(node, ast.FunctionDef | ast.ClassDef):
                yield from _bound(getattr(node, block, ()))
        for handler in getattr(node, "handlers", ()):
            yield from _bound(handler.body)


if __name__ == "__main__":
    _TABLES = Path(sys.argv[1])
    _TABLES.joinpath("api_names.txt").write_text(public_names())
    _TABLES.joinpath("python_names.txt").write_text(private_names(Path(tf.__file__).with_name("python")))
