"""Tells which names of TensorFlow in Python files do not resolve on the installed one.

    python -m tools.resolved_names DIR... --json names.json

Files are parsed, never run. A name is a module or what an import takes from it, with the attributes that follow:
`tf.train.AdamOptimizer`, after `import tensorflow as tf`. It is looked up attribute by attribute, as far as modules and
classes reach. What stands in a `try` that catches the error is left out. Names of tfmp are looked up too, which a
migrated file has.
"""

import argparse
import ast
import functools
import importlib
import inspect
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import tensorflow as tf

from benchmarks.harness import report

_PACKAGES = ("tensorflow", "tfmp")

#: What a script catches where it can do without a name.
_CAUGHT = {"ImportError", "ModuleNotFoundError", "AttributeError", "Exception", "BaseException"}

#: How many unresolved names are printed.
_MOST = 25


class Name(NamedTuple):
    """A name in a file.

    Attributes:
        module: What is imported.
        attributes: What is taken from it; it may be empty.
        line: Where.
        imported: How many of the attributes an import takes: these may be modules that nothing has loaded yet.
    """

    module: str
    attributes: tuple[str, ...]
    line: int
    imported: int = 0

    def __str__(self) -> str:
        """Return the dotted name."""
        return ".".join([self.module, *self.attributes])


class Survey(NamedTuple):
    """What was found below a directory.

    Attributes:
        files: How many Python files there are.
        unparsed: Those that do not parse.
        using: How many of them have names of the packages.
        resolved: How many of those have only names that resolve.
        unresolved: The names that do not, each as often as files have it.
        lines: The same as `file:line: name`.
    """

    files: int
    unparsed: list[str]
    using: int
    resolved: int
    unresolved: Counter[str]
    lines: list[str]


def main(argv: Sequence[str] | None = None) -> int:
    """Look names up and print what does not resolve.

    Args:
        argv: The arguments; by default those of the process.

    Returns:
        The exit status: 0 if all names resolve, 1 if some do not, 2 if there is no Python file.
    """
    asked = _parser().parse_args(argv)
    tf.compat.v1.logging.set_verbosity(tf.compat.v1.logging.ERROR)
    conditions = report.conditions()
    print(report.lines(conditions), flush=True)
    surveys = {str(directory): survey(directory) for directory in asked.directories}
    print(f"\n{_table(surveys)}")
    unresolved: Counter[str] = sum((each.unresolved for each in surveys.values()), Counter())
    if unresolved:
        rows = [[name, str(count)] for name, count in unresolved.most_common(_MOST)]
        print(
            f"\n{len(unresolved)} names do not resolve; the most frequent:\n\n{report.table(['name', 'files'], rows)}"
        )
    for each in surveys.values():
        print("\n".join(f"does not parse: {path}" for path in each.unparsed), end="\n" if each.unparsed else "")
    figures = {directory: each._asdict() for directory, each in surveys.items()}
    report.write_json(asked.json, {"conditions": conditions, "figures": figures})
    if not any(each.files for each in surveys.values()):
        print("resolved_names: error: there is no Python file.", file=sys.stderr)
        return 2
    return int(bool(unresolved))


def survey(directory: Path) -> Survey:
    """Look up the names in all Python files below a directory.

    Args:
        directory: The directory; or a file.
    """
    paths = sorted(directory.rglob("*.py")) if directory.is_dir() else [directory]
    found = Survey(len(paths), [], 0, 0, Counter(), [])
    using = resolved = 0
    for path in paths:
        try:
            # Bytes: the file says itself how it is encoded.
            names = names_in(path.read_bytes())
        except (SyntaxError, ValueError, OSError):
            found.unparsed.append(str(path))
            continue
        missing = [name for name in names if not resolves(name._replace(line=0))]
        using += bool(names)
        resolved += bool(names) and not missing
        found.unresolved.update({str(name) for name in missing})
        found.lines.extend(f"{path}:{name.line}: {name}" for name in missing)
    return found._replace(using=using, resolved=resolved)


def names_in(source: str | bytes) -> list[Name]:
    r"""Return the names of TensorFlow and of tfmp in a file, in the order of lines.

    Args:
        source: What the file holds.

    Raises:
        SyntaxError: It does not parse.
        ValueError: It holds a null byte.

    Example:
        >>> source = "import tensorflow.compat.v1 as tf\nfrom tensorflow.python import ops\nops.x, tf.train.Saver()"
        >>> [str(name) for name in names_in(source)]
        ['tensorflow.compat.v1', 'tensorflow.python.ops', 'tensorflow.compat.v1.train.Saver', 'tensorflow.python.ops.x']
    """
    tree = ast.parse(source)
    imports = [each for node in ast.walk(tree) for each in _imported(node)]
    # The first of a name: a later one stands in for it, where it is missing.
    bound = {local: name for local, name, _ in reversed(imports)}
    ignored = {inner for node in ast.walk(tree) for inner in _without_effect(node)}
    inner_parts = {node.value for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    names = set()
    for node in ast.walk(tree):
        if node in ignored:
            continue
        names |= {name for *_, name in _imported(node)}
        if isinstance(node, ast.Attribute) and node not in inner_parts:
            root, attributes = _chain(node)
            if root in bound:
                origin = bound[root]
                names.add(origin._replace(attributes=(*origin.attributes, *attributes), line=node.lineno))
    return sorted(names, key=lambda name: (name.line, str(name)))


@functools.cache
def resolves(name: Name) -> bool:
    """Tell whether a name resolves on what is installed.

    Args:
        name: The name.

    Example:
        >>> resolves(Name("tensorflow", ("train", "Checkpoint"), 1))
        True
        >>> resolves(Name("tensorflow", ("contrib", "layers"), 1))
        False
    """
    try:
        found: object = importlib.import_module(name.module)
        for index, attribute in enumerate(name.attributes):
            if not (inspect.ismodule(found) or inspect.isclass(found)):
                return True
            path = ".".join([name.module, *name.attributes[: index + 1]])
            found = _member(found, attribute, path, may_be_unloaded=index < name.imported)
    # Lazily loaded modules raise what their own imports do.
    except (AttributeError, ImportError):
        return False
    return True


def _member(found: object, attribute: str, path: str, may_be_unloaded: bool) -> object:
    try:
        return getattr(found, attribute)
    except AttributeError:
        if not may_be_unloaded:
            raise
        return importlib.import_module(path)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directories", nargs="+", type=Path, metavar="DIR", help="a directory, or a Python file")
    parser.add_argument("--json", type=Path, help="a file to write what was found to")
    return parser


def _table(surveys: dict[str, Survey]) -> str:
    rows = [
        [directory, *map(str, (each.files, len(each.unparsed), each.using, each.resolved, len(each.unresolved)))]
        for directory, each in surveys.items()
    ]
    return report.table(["", "files", "do not parse", "with names", "all resolve", "unresolved names"], rows)


def _imported(node: ast.AST) -> list[tuple[str, Name, Name]]:
    """Return what a statement imports of the packages: a local name, what it is bound to, and what must be there."""
    if isinstance(node, ast.Import):
        aliases = [alias for alias in node.names if alias.name.partition(".")[0] in _PACKAGES]
        return [_module(alias, node.lineno) for alias in aliases]
    if isinstance(node, ast.ImportFrom) and not node.level and str(node.module).partition(".")[0] in _PACKAGES:
        names = [Name(str(node.module), (alias.name,) * (alias.name != "*"), node.lineno, 1) for alias in node.names]
        return [(alias.asname or alias.name, name, name) for alias, name in zip(node.names, names, strict=True)]
    return []


def _module(alias: ast.alias, line: int) -> tuple[str, Name, Name]:
    whole = Name(alias.name, (), line)
    if alias.asname:
        return alias.asname, whole, whole
    # `import tensorflow.compat.v1` binds `tensorflow`.
    package = alias.name.partition(".")[0]
    return package, Name(package, (), line), whole


def _without_effect(node: ast.AST) -> list[ast.AST]:
    """Return what a `try` tries, if it catches that a name is missing."""
    if not isinstance(node, ast.Try) or not any(_catches(handler) for handler in node.handlers):
        return []
    return [inner for statement in node.body for inner in ast.walk(statement)]


def _catches(handler: ast.ExceptHandler) -> bool:
    caught = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
    return any(each is None or ast.unparse(each) in _CAUGHT for each in caught)


def _chain(node: ast.Attribute) -> tuple[str, list[str]]:
    attributes: list[str] = []
    value: ast.AST = node
    while isinstance(value, ast.Attribute):
        attributes.insert(0, value.attr)
        value = value.value
    return value.id if isinstance(value, ast.Name) else "", attributes


if __name__ == "__main__":
    sys.exit(main())
