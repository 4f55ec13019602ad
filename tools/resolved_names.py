"""Finds names of TensorFlow in Python files that the installed TensorFlow does not have.

    python -m tools.resolved_names DIR... --json names.json

The files are parsed, never run. A name is an imported module or object with the attributes that follow, such as
`tf.train.AdamOptimizer` after `import tensorflow as tf`. It is looked up attribute by attribute, as long as the object
is a module or a class. Names in the body of a `try` that catches the error are left out. Names of tfmp are looked up
too, because migrated files use them.
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

#: The exceptions that a script catches to go on without a name.
_CAUGHT = {"ImportError", "ModuleNotFoundError", "AttributeError", "Exception", "BaseException"}

#: The largest number of unresolved names to print.
_MOST = 25


class Name(NamedTuple):
    """A name in a file.

    Attributes:
        module: The imported module.
        attributes: The attributes that follow the module, one after the other; there may be none.
        line: The line in the file.
        imported: The number of attributes that an import statement takes. Each of these may be a submodule that is not
            loaded yet.
    """

    module: str
    attributes: tuple[str, ...]
    line: int
    imported: int = 0

    def __str__(self) -> str:
        """Return the dotted name."""
        return ".".join([self.module, *self.attributes])


class Survey(NamedTuple):
    """The results for a directory.

    Attributes:
        files: The number of Python files.
        unparsed: The paths of the files that do not parse.
        using: The number of files that have names of the packages.
        resolved: The number of files that have such names, all of which resolve.
        unresolved: The unresolved names, each with the number of files that have it.
        lines: The places of the unresolved names, as `file:line: name`.
    """

    files: int
    unparsed: list[str]
    using: int
    resolved: int
    unresolved: Counter[str]
    lines: list[str]


def main(argv: Sequence[str] | None = None) -> int:
    """Look names up, and print the names that do not resolve.

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
        directory: A directory, or a single file.
    """
    paths = sorted(directory.rglob("*.py")) if directory.is_dir() else [directory]
    found = Survey(len(paths), [], 0, 0, Counter(), [])
    using = resolved = 0
    for path in paths:
        try:
            # Bytes: the parser finds the encoding that the file declares.
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
        source: The content of the file.

    Raises:
        SyntaxError: The file does not parse.
        ValueError: The file has a null byte.

    Examples:
        >>> source = "import tensorflow.compat.v1 as tf\nfrom tensorflow.python import ops\nops.x, tf.train.Saver()"
        >>> [str(name) for name in names_in(source)]
        ['tensorflow.compat.v1', 'tensorflow.python.ops', 'tensorflow.compat.v1.train.Saver', 'tensorflow.python.ops.x']
    """
    tree = ast.parse(source)
    imports = [each for node in ast.walk(tree) for each in _imported(node)]
    # If a local name is imported twice, the first import counts: the second is usually a substitute for it.
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
    """Return whether a name resolves with the installed packages.

    Args:
        name: The name.

    Examples:
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
    # Access to a lazily loaded module raises the errors of the module's own imports.
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
    parser.add_argument("--json", type=Path, help="a file to write the results to")
    return parser


def _table(surveys: dict[str, Survey]) -> str:
    rows = [
        [directory, *map(str, (each.files, len(each.unparsed), each.using, each.resolved, len(each.unresolved)))]
        for directory, each in surveys.items()
    ]
    return report.table(["", "files", "do not parse", "with names", "all resolve", "unresolved names"], rows)


def _imported(node: ast.AST) -> list[tuple[str, Name, Name]]:
    """Return the imports of a statement: the local name, the name that it is bound to, and the name that must exist."""
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
    """Return the nodes in the body of a `try` whose handlers catch the error of a missing name; for others, none."""
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
