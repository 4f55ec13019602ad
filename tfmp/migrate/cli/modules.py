"""Finds the imports of a file, and the evidence that the file is run as a script."""

import ast
import builtins
import os
import symtable
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import NamedTuple

from tfmp.migrate.cli import files

_BUILTINS = frozenset(dir(builtins))
_BLOCKS = ("body", "handlers", "cases", "orelse", "finalbody")


class Import(NamedTuple):
    """One imported name. `names` are the modules that it may load: `a.b` and `a` for `from a import b`."""

    level: int  # the number of leading dots
    names: tuple[str, ...]
    line: int


class Module(NamedTuple):
    """What relates a file to other files."""

    imports: tuple[Import, ...] = ()
    has_main: bool = False
    calls: bool = False  #: Whether a call at top level does a script's own work.
    #: The words other than `tf` and `tensorflow` that the file binds to TensorFlow. Other files may import them.
    tensorflow: frozenset[str] = frozenset()
    starred: frozenset[str] = frozenset()  #: All words of a file that imports a star, which may be from there.


def read(tree: ast.Module) -> Module:
    """Return the imports of a file, and the evidence that the file is run as a script.

    Examples:
        >>> found = read(ast.parse('''from a import b
        ... if __name__ == "__main__":
        ...     b()'''))
        >>> found.imports, found.has_main, found.calls
        ((Import(level=0, names=('a.b', 'a'), line=1),), True, False)
    """
    nodes = [node for node in _statements(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
    bound = {(alias.asname or alias.name).partition(".")[0] for node in nodes for alias in node.names}
    calls = (node.value for node in tree.body if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call))
    has_star = any(alias.name == "*" for node in nodes for alias in node.names)
    words = (node.id for node in ast.walk(tree) if isinstance(node, ast.Name)) if has_star else ()
    return Module(
        tuple(_import(node, alias.name) for node in nodes for alias in node.names),
        any(map(_asks_for_main, tree.body)),
        any(_works(call.func, bound) for call in calls),
        _tensorflow_words(tree),
        frozenset(words),
    )


def paths_of(one: Import, directory: str, exists: Callable[[str], bool]) -> list[str]:
    """Return the existing files that an import in a directory may load: from there, or the nearest directory above."""
    for _ in range(one.level - 1):
        directory = os.path.dirname(directory)
    while True:
        paths = [os.path.join(directory, *name.split(".")) for name in one.names]
        sought = (file for path in paths for file in (f"{path}.py", os.path.join(path, "__init__.py")))
        found = [file for file in sought if exists(file)]
        above = os.path.dirname(directory)
        if found or one.level or above == directory:
            return found
        directory = above


def star_names(path: str, imports: Iterable[Import], above: tuple[str, ...] = ()) -> dict[str, frozenset[str]]:
    """Return the names that the star imports of a file bind, by the module; without modules whose file is not found.

    The file may be imported by files `above`. A `*` among the names stands for names that are not known.
    """
    stars = [one for one in imports if one.names[0].endswith("*")]
    found = ((one, file) for one in stars for file in paths_of(one, os.path.dirname(path), os.path.isfile))
    return {
        "." * one.level + one.names[-1]: _public_names(file, (*above, path)) for one, file in found if file not in above
    }


def _public_names(path: str, above: tuple[str, ...]) -> frozenset[str]:
    try:
        text, _ = files.read(path)
        symbols = symtable.symtable(text, path, "exec").get_symbols()
        imports = read(ast.parse(text)).imports
    except (files.UnusableFileError, SyntaxError, ValueError, RecursionError, MemoryError):
        return frozenset("*")
    names = {each.get_name() for each in symbols if each.is_assigned() or each.is_imported()}
    known = star_names(path, imports, above)
    others = {"*"} if len(known) < sum(one.names[0].endswith("*") for one in imports) else ()
    return frozenset(name for name in names.union(others, *known.values()) if not name.startswith("_"))


def _tensorflow_words(tree: ast.Module) -> frozenset[str]:
    """Return the words that the top level of a file binds to TensorFlow, apart from those that R4 knows."""
    found: set[str] = set()
    for node in _statements(tree):
        if isinstance(node, ast.Import):
            found.update(alias.asname for alias in node.names if alias.name == "tensorflow" and alias.asname)
            found.update("tensorflow" for alias in node.names if alias.name == "tensorflow" and not alias.asname)
        elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Name) and node.value.id in found:
            found.update(target.id for target in node.targets if isinstance(target, ast.Name))
    return frozenset(found - {"tf", "tensorflow"})


def _statements(node: ast.AST) -> Iterator[ast.AST]:
    # Faster than ast.walk(), which also visits all expressions.
    for block in _BLOCKS:
        for child in getattr(node, block, ()):
            yield child
            yield from _statements(child)


def _import(node: ast.Import | ast.ImportFrom, name: str) -> Import:
    if isinstance(node, ast.Import):
        return Import(0, (name,), node.lineno)
    module = node.module or ""
    return Import(node.level, (f"{module}.{name}".lstrip("."), module), node.lineno)


def _asks_for_main(node: ast.stmt) -> bool:
    if not isinstance(node, ast.If) or not isinstance(node.test, ast.Compare):
        return False
    sides = (node.test.left, *node.test.comparators)
    names = {side.id for side in sides if isinstance(side, ast.Name)}
    return "__name__" in names and any(isinstance(side, ast.Constant) and side.value == "__main__" for side in sides)


def _works(node: ast.expr, imported: Collection[str]) -> bool:
    """Tell whether a call does a script's own work. `registry.register(...)` and `print(...)` do not."""
    if isinstance(node, ast.Name):
        return node.id not in _BUILTINS
    is_run = isinstance(node, ast.Attribute) and node.attr == "run"
    while isinstance(node, ast.Attribute | ast.Call | ast.Subscript):
        node = node.func if isinstance(node, ast.Call) else node.value
    return is_run or (isinstance(node, ast.Name) and node.id not in imported)
