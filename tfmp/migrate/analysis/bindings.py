"""Finds the assignments of a script, including loops, parameters and list operations."""

from collections.abc import Iterator
from typing import NamedTuple

import libcst as cst

from tfmp.migrate.analysis.expressions import dotted
from tfmp.migrate.analysis.scopes import Scope
from tfmp.migrate.analysis.script import Script

_ADDING = ("append", "extend", "insert", "add")


class Binding(NamedTuple):
    """One assignment of a value to a name. The value of a parameter is None."""

    scope: Scope
    name: str  #: The name, or `self.name` for an attribute of a class.
    value: cst.BaseExpression | None  #: The assigned expression: the whole value if its parts are unpacked.
    node: cst.CSTNode  #: The statement, parameter or comprehension that assigns.
    place: int  #: The position after which the value holds, in characters from the start of the script.
    replaces: bool  #: False if the earlier value still matters, as after `+=` or `append`.


def bindings_of(script: Script) -> Iterator[Binding]:
    """Yield every assignment of a script: statements, loops, comprehensions, parameters, and items added to lists."""
    kinds = (cst.Assign, cst.AnnAssign, cst.AugAssign, cst.NamedExpr, cst.For, cst.CompFor, cst.WithItem)
    for node in script.nodes(*kinds, cst.Expr, cst.Param):
        for target, value, replaces in _assigned(node):
            yield from _bound(script, node, target, value, replaces)


def _assigned(node: cst.CSTNode) -> Iterator[tuple[cst.BaseExpression, cst.BaseExpression | None, bool]]:
    """Yield the targets of a statement, each with its value and with whether the value replaces the earlier one."""
    if isinstance(node, cst.Param):
        yield node.name, None, True
    elif isinstance(node, cst.Assign):
        yield from ((each.target, node.value, True) for each in node.targets)
    elif isinstance(node, cst.AnnAssign | cst.NamedExpr | cst.AugAssign) and node.value is not None:
        yield node.target, node.value, not isinstance(node, cst.AugAssign)
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
    """Yield the assignments to a target, which may be a tuple, an item or an attribute."""
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
    classes = (above for above in script.ancestors(node) if isinstance(above, cst.ClassDef))
    scope = next(classes, script.module) if "." in name else script.scopes.scope_bound_in(node)
    yield Binding(scope, name, value, node, place, replaces)
