"""Finds the imports of a file, and the evidence that the file is run as a script."""

import ast
import builtins
from collections.abc import Collection, Iterator
from typing import NamedTuple

_BUILTINS = frozenset(dir(builtins))


class Import(NamedTuple):
    """One imported name of an import statement.

    Attributes:
        level: The number of leading dots of a relative import; 0 for an absolute one.
        names: The modules that the import may load: `a.b` and `a` for `from a import b`.
        line: The line of the import.
    """

    level: int
    names: tuple[str, ...]
    line: int


class Module(NamedTuple):
    """The facts about a file that relate it to other files.

    Attributes:
        imports: The imports of the file, including those inside functions.
        has_main: True if the file has an `if __name__ == "__main__"`.
        calls: True if the top level of the file calls functions of its own, beyond builtins and imported modules.
    """

    imports: tuple[Import, ...] = ()
    has_main: bool = False
    calls: bool = False


def read(tree: ast.Module) -> Module:
    """Return the imports of a file, and the evidence that the file is run as a script.

    Args:
        tree: The syntax tree of the file.

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
    """Tell whether a call does a script's own work. `registry.register(...)` and `print(...)` do not."""
    if isinstance(node, ast.Name):
        return node.id not in _BUILTINS
    is_run = isinstance(node, ast.Attribute) and node.attr == "run"
    while isinstance(node, ast.Attribute | ast.Call | ast.Subscript):
        node = node.func if isinstance(node, ast.Call) else node.value
    return is_run or (isinstance(node, ast.Name) and node.id not in imported)
