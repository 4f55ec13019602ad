"""What a script assigns to names."""

from collections.abc import Iterator
from typing import NamedTuple, TypeAlias

import libcst as cst

from tfmp.migrate.analysis.names import dotted
from tfmp.migrate.analysis.script import Script

Scope: TypeAlias = cst.CSTNode
#: What has variables of its own.
COMPREHENSIONS = (cst.ListComp, cst.SetComp, cst.DictComp, cst.GeneratorExp)
_SCOPES = (cst.FunctionDef, cst.ClassDef, cst.Lambda)
_ADDING = ("append", "extend", "insert", "add")


class Binding(NamedTuple):
    """One assignment.

    Attributes:
        scope: The function, lambda, class, comprehension or module that the name belongs to.
        name: The name, or `self.name`.
        value: What is assigned; what it is taken from, for a part of it. None if that is not known.
        node: The statement.
        place: From where on it holds, in characters from the start of the script.
        replaces: Whether the value before it is gone.
    """

    scope: Scope
    name: str
    value: cst.BaseExpression | None
    node: cst.CSTNode
    place: int
    replaces: bool


def bindings_of(script: Script) -> Iterator[Binding]:
    """Return what a script assigns to names: statements, loops, comprehensions, parameters, and what lists are given.

    Args:
        script: The script.

    Example:
        >>> [binding.name for binding in bindings_of(Script("a, b = f(); c.append(b)"))]
        ['a', 'b', 'c']
    """
    kinds = (cst.Assign, cst.AnnAssign, cst.AugAssign, cst.NamedExpr, cst.For, cst.CompFor, cst.WithItem)
    for node in script.nodes(*kinds, cst.Expr, cst.Param):
        if isinstance(node, cst.Param):
            above = next(each for each in script.ancestors(node) if isinstance(each, cst.FunctionDef | cst.Lambda))
            yield Binding(above, node.name.value, None, node, script.span(node)[1], True)
            continue
        for target, value, replaces in _assigned(node):
            yield from _bound(script, node, target, value, replaces)


def own_names(script: Script) -> Iterator[tuple[str, cst.CSTNode]]:
    """Return the names that a script binds by anything but imports, with the statement that does so.

    Args:
        script: The script.

    Example:
        >>> [name for name, _ in own_names(Script('''import a
        ... b = a
        ... def c(d): pass'''))]
        ['b', 'd', 'c']
    """
    yield from ((binding.name, binding.node) for binding in bindings_of(script))
    yield from ((node.name.value, node) for node in script.nodes(cst.FunctionDef))
    yield from ((node.name.value, node) for node in script.nodes(cst.ClassDef))


def _assigned(node: cst.CSTNode) -> Iterator[tuple[cst.BaseExpression, cst.BaseExpression | None, bool]]:
    if isinstance(node, cst.Assign):
        yield from ((each.target, node.value, True) for each in node.targets)
    elif isinstance(node, cst.AnnAssign | cst.NamedExpr) and node.value is not None:
        yield node.target, node.value, True
    elif isinstance(node, cst.AugAssign):
        yield node.target, node.value, False
    elif isinstance(node, cst.For | cst.CompFor):
        yield node.target, node.iter, True
    elif isinstance(node, cst.WithItem) and node.asname is not None:
        yield node.asname.name, node.item, True
    elif isinstance(node, cst.Expr) and isinstance(node.value, cst.Call) and node.value.args:
        func = node.value.func
        if isinstance(func, cst.Attribute) and func.attr.value in _ADDING:
            yield func.value, node.value.args[-1].value, False


def _bound(
    script: Script, node: cst.CSTNode, target: cst.BaseExpression, value: cst.BaseExpression | None, replaces: bool
) -> Iterator[Binding]:
    if isinstance(target, cst.Tuple | cst.List):
        parts = value.elements if isinstance(value, cst.Tuple | cst.List) else ()
        paired = len(parts) == len(target.elements)
        for index, element in enumerate(target.elements):
            yield from _bound(script, node, element.value, parts[index].value if paired else value, replaces)
        return
    while isinstance(target, cst.Subscript):
        target, replaces = target.value, False
    name = dotted(target)
    if not name or (isinstance(target, cst.Attribute) and not name.startswith("self.")):
        return
    place = script.span(node.iter if isinstance(node, cst.For | cst.CompFor) else node)[1]
    yield Binding(_scope(script, node, name), name, value, node, place, replaces)


def _scope(script: Script, node: cst.CSTNode, name: str) -> Scope:
    for above in script.ancestors(node):
        if name.startswith("self."):
            if isinstance(above, cst.ClassDef):
                return above
        elif isinstance(above, COMPREHENSIONS if isinstance(node, cst.CompFor) else _SCOPES):
            return above
    return script.module
