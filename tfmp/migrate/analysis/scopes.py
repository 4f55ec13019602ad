"""Resolves the names of a script to the imports, assignments and definitions that bind them, by Python's rules.

LibCST's ScopeProvider does this for all names at once, which takes half of the time that a script takes. Here it is
done for the words that are asked for.
"""

import builtins
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import NamedTuple, TypeAlias

import libcst as cst

from tfmp.migrate.analysis.tree import Tree, once_per_argument

#: A function, lambda, class, comprehension or module, which has names of its own.
Scope: TypeAlias = cst.CSTNode
#: Nodes that have variables of their own besides functions, classes and lambdas.
COMPREHENSIONS = (cst.ListComp, cst.SetComp, cst.DictComp, cst.GeneratorExp)
# Every module has the names with underscores; every method has `__class__`.
_OF_PYTHON = frozenset(dir(builtins)).union(
    ("__name__", "__file__", "__doc__", "__package__", "__spec__", "__loader__", "__builtins__", "__path__"),
    ("__class__",),
)
_WITH_BODY = (cst.For, cst.CompFor, cst.ExceptHandler, cst.ExceptStarHandler)
_WITH_TARGET = (cst.AugAssign, cst.AnnAssign, cst.NamedExpr, cst.For, cst.CompFor)
_WITH_NAME = (
    *(cst.FunctionDef, cst.ClassDef, cst.Param, cst.MatchAs, cst.MatchStar),
    *(cst.TypeAlias, cst.TypeVar, cst.TypeVarTuple, cst.ParamSpec),
)


class Bound(NamedTuple):
    """A binding of a word."""

    node: cst.CSTNode  #: The statement, definition, parameter, clause or import alias that binds the word.
    place: int  #: The position after which the binding holds, in characters from the start of the script.


class Scopes:
    """Finds the bindings that a name may refer to where it is read."""

    def __init__(self, tree: Tree) -> None:
        self._tree = tree

    @cached_property
    def words(self) -> Mapping[str, Sequence[cst.Name]]:
        """The places of each word of the script, in the order of the text."""
        found: dict[str, list[cst.Name]] = {}
        for name in self._tree.nodes(cst.Name):
            found.setdefault(name.value, []).append(name)
        return found

    def is_read(self, name: cst.Name) -> bool:
        """Tell whether a word reads a variable here."""
        is_declared = isinstance(self._tree.parent(name), cst.NameItem)
        return self._tree.is_use(name) and not is_declared and self.binder(name) is None

    def binder(self, name: cst.Name) -> cst.CSTNode | None:
        """Return the node that binds a word here; None if it does not."""
        below: cst.CSTNode = self._tree.whole_name(name)
        above = self._tree.parent(below)
        if isinstance(above, cst.ImportAlias):
            return above if above.asname is None else None
        if below is not name:
            return None
        while isinstance(above, cst.Tuple | cst.List | cst.BaseElement):
            below, above = above, self._tree.parent(above)
        if isinstance(above, cst.AssignTarget | cst.AsName):
            return self._tree.parent(above)
        is_target = isinstance(above, _WITH_TARGET) and above.target is below
        is_defined = isinstance(above, _WITH_NAME) and above.name is below
        return above if is_target or is_defined else None

    def bindings(self, name: cst.Name, *, earlier: bool = True) -> Sequence[Bound]:
        """Return the bindings that a name may refer to: those of the innermost scope that has any.

        With `earlier`, bindings further below in the name's own scope are left out.
        """
        bound, own = self.bound(name.value), self.scope(name)
        scope = own
        while True:
            scope = self._declared.get((scope, name.value), scope)
            found = bound.get(scope, ())
            # A comprehension reads its variables above the loop that binds them.
            if earlier and scope is own and not isinstance(own, COMPREHENSIONS):
                found = [each for each in found if each.place <= self._tree.span(name)[0]]
            if found or scope is self._tree.module:
                return found
            scope = self._outer(scope)

    @once_per_argument
    def bound(self, word: str) -> Mapping[Scope, Sequence[Bound]]:
        """Return all bindings of a word, by scope."""
        found: dict[Scope, list[Bound]] = {}
        for name in self.words.get(word, ()):
            binder = self.binder(name)
            if binder is not None:
                own = self.scope_bound_in(binder)
                scope = self._declared.get((own, word), own)
                # A loop binds its target before its body runs; other statements read their values before they bind.
                end = self._tree.span(name if isinstance(binder, _WITH_BODY) else binder)[1]
                found.setdefault(scope, []).append(Bound(binder, end))
        return found

    def scope_bound_in(self, binder: cst.CSTNode) -> Scope:
        """Return the scope in which a node binds names. An assignment in a comprehension binds outside of it."""
        scope = self.scope(binder)
        while isinstance(binder, cst.NamedExpr) and isinstance(scope, COMPREHENSIONS):
            scope = self.scope(scope)
        return scope

    @cached_property
    def _declared(self) -> Mapping[tuple[Scope, str], Scope]:
        """The names that `global` and `nonlocal` declare, with the scope in which the search for them starts."""
        found: dict[tuple[Scope, str], Scope] = {}
        for item in self._tree.nodes(cst.NameItem):
            scope, is_global = self.scope(item), isinstance(self._tree.parent(item), cst.Global)
            found[scope, item.name.value] = self._tree.module if is_global else self._outer(scope)
        return found

    def _outer(self, scope: Scope) -> Scope:
        """Return the next scope whose names are visible inside another one."""
        above = self.scope(scope)
        return self._outer(above) if isinstance(above, cst.ClassDef) else above

    def scope(self, node: cst.CSTNode) -> Scope:
        """Return the scope whose names a node reads. That of a default value is outside of the function."""
        is_outside = False
        for above, part in self._tree.around(node):
            if isinstance(above, cst.Param):
                is_outside = part is not above.name
            elif isinstance(above, cst.CompFor):
                is_first = isinstance(self._tree.parent(above), COMPREHENSIONS)
                is_outside = is_first and part is above.iter
            elif _binds_in(above, part):
                if not is_outside:
                    return above
                is_outside = False
        return self._tree.module

    def unbound(self) -> Iterator[cst.Name]:
        """Yield the places where a name is read that neither the script nor Python binds. Star imports may bind it."""
        for word, names in self.words.items():
            if word not in _OF_PYTHON:
                yield from (name for name in names if self.is_read(name) and not self.bindings(name))


def _binds_in(above: cst.CSTNode, part: cst.CSTNode) -> bool:
    """Tell whether a part of a node has a scope of its own."""
    if isinstance(above, cst.FunctionDef | cst.Lambda):
        return part is above.body or part is above.params
    return isinstance(above, COMPREHENSIONS) or (isinstance(above, cst.ClassDef) and part is above.body)
