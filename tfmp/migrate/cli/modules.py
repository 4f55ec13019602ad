"""Tells what a file imports, and whether it is run."""

import ast
import builtins
from collections.abc import Collection, Iterator
from typing import NamedTuple

_BUILTINS = frozenset(dir(builtins))


class Import(NamedTuple):
    """An import statement, or one name of it.

    Attributes:
        level: How many dots a relative one starts with.
        names: What may be the module that it imports: `a.b` and `a` of `from a import b`.
        line: The line.
    """

    level: int
    names: tuple[str, ...]
    line: int


class Module(NamedTuple):
    """A file among the others of a project.

    Attributes:
        imports: What it imports, in functions too.
        has_main: Whether it has an `if __name__ == "__main__"`.
        calls: Whether it calls something when it is imported, but for what belongs to what it imports.
    """

    imports: tuple[Import, ...] = ()
    has_main: bool = False
    calls: bool = False


def read(tree: ast.Module) -> Module:
    """Tell what a file imports, and whether it is run.

    Args:
        tree: The file.

    Example:
        >>> read(ast.parse('''from a import b
        ... if __name__ == "__main__":
        ...     b()'''))
        Module(imports=(Import(level=0, names=('a.b', 'a'), line=1),), has_main=True, calls=False)
    """
    imports = tuple(one for node in ast.walk(tree) for one in _imports(node))
    return Module(imports, any(map(_asks_for_main, tree.body)), _calls(tree))


def _imports(node: ast.AST) -> Iterator[Import]:
    if isinstance(node, ast.Import):
        yield from (Import(0, (alias.name,), node.lineno) for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        module = node.module or ""
        for alias in node.names:
            yield Import(node.level, (f"{module}.{alias.name}".lstrip("."), module), node.lineno)


def _asks_for_main(node: ast.stmt) -> bool:
    if not isinstance(node, ast.If) or not isinstance(node.test, ast.Compare):
        return False
    sides = (node.test.left, *node.test.comparators)
    names = {side.id for side in sides if isinstance(side, ast.Name)}
    return "__name__" in names and any(isinstance(side, ast.Constant) and side.value == "__main__" for side in sides)


def _calls(tree: ast.Module) -> bool:
    imported = {
        (alias.asname or alias.name).partition(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
    }
    calls = (node.value for node in tree.body if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call))
    return any(_works(call.func, imported) for call in calls)


def _works(node: ast.expr, imported: Collection[str]) -> bool:
    """Tell whether a call does what a script is for: `registry.register(...)` and `print(...)` do not."""
    if isinstance(node, ast.Name):
        return node.id not in _BUILTINS
    is_run = isinstance(node, ast.Attribute) and node.attr == "run"
    while isinstance(node, ast.Attribute | ast.Call | ast.Subscript):
        node = node.func if isinstance(node, ast.Call) else node.value
    return is_run or (isinstance(node, ast.Name) and node.id not in imported)
