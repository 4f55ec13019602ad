"""Finds the expressions that the functions of a script return."""

from collections.abc import Sequence

import libcst as cst

from tfmp.migrate.analysis.expressions import dotted
from tfmp.migrate.analysis.script import Script


def returned_by(script: Script, call: cst.Call) -> Sequence[cst.BaseExpression]:
    """Return the values that a function, or a method of self, may return; empty if the called one is not known."""
    *owner, name = dotted(call.func).split(".")
    if owner not in ([], ["self"]):
        return ()
    above = list(script.ancestors(call))
    found = [
        each.node
        for scope, bound in script.scopes.bound(name).items()
        for each in bound
        if isinstance(each.node, cst.FunctionDef) and isinstance(scope, cst.ClassDef) == bool(owner)
        if scope in above
    ]
    ends = (each for each in script.nodes(cst.Return) if len(found) == 1 and script.function_of(each) is found[0])
    return [each.value for each in ends if each.value is not None]
