"""Finds the expressions that the functions of a script return."""

from collections.abc import Sequence

import libcst as cst

from tfmp.migrate.analysis.expressions import dotted
from tfmp.migrate.analysis.script import Script


class ReturnValues:
    """Looks up the `return` expressions of a script's own functions."""

    def __init__(self, script: Script) -> None:
        self._script = script
        self._functions: dict[str, list[cst.FunctionDef]] = {}
        for function in script.nodes(cst.FunctionDef):
            self._functions.setdefault(function.name.value, []).append(function)
        self._returns: dict[cst.FunctionDef, list[cst.BaseExpression]] = {}
        for node in script.nodes(cst.Return):
            above = script.function_of(node)
            if above is not None and node.value is not None:
                self._returns.setdefault(above, []).append(node.value)

    def values(self, call: cst.Call) -> Sequence[cst.BaseExpression]:
        """Return the values that a function, or a method of self, may return; empty if the called one is not known."""
        words = dotted(call.func).split(".")
        is_method = len(words) == 2 and words[0] == "self"
        if not is_method and len(words) != 1:
            return ()
        above = list(self._script.ancestors(call))
        found = [each for each in self._functions.get(words[-1], ()) if self._is_seen(each, above, is_method)]
        return self._returns.get(found[0], ()) if len(found) == 1 else ()

    def _is_seen(self, function: cst.FunctionDef, above: Sequence[cst.CSTNode], is_method: bool) -> bool:
        scopes = (cst.FunctionDef, cst.ClassDef, cst.Module)
        scope = next(each for each in self._script.ancestors(function) if isinstance(each, scopes))
        return isinstance(scope, cst.ClassDef) == is_method and scope in above
