"""Finds the expressions that the functions of a script return."""

from collections.abc import Sequence

import libcst as cst

from tfmp.migrate.analysis.expressions import dotted
from tfmp.migrate.analysis.script import Script


class ReturnValues:
    """Looks up the `return` expressions of a script's own functions."""

    def __init__(self, script: Script) -> None:
        self._script = script
        self._returns: dict[cst.CSTNode, list[cst.BaseExpression]] = {}
        for node in script.nodes(cst.Return):
            above = script.function_of(node)
            if above is not None and node.value is not None:
                self._returns.setdefault(above, []).append(node.value)

    def values(self, call: cst.Call) -> Sequence[cst.BaseExpression]:
        """Return the values that a function, or a method of self, may return; empty if the called one is not known."""
        *owner, name = dotted(call.func).split(".")
        if owner not in ([], ["self"]):
            return ()
        above = list(self._script.ancestors(call))
        found = [
            each.node
            for scope, bound in self._script.scopes.bound(name).items()
            for each in bound
            if isinstance(each.node, cst.FunctionDef) and isinstance(scope, cst.ClassDef) == bool(owner)
            if scope in above
        ]
        return self._returns.get(found[0], ()) if len(found) == 1 else ()
