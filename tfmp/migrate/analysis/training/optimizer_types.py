"""Tells whether an optimizer that a script constructs is an instance of a class."""

from collections.abc import Callable

import libcst as cst

from tfmp.migrate.analysis.data_flow import DataFlow
from tfmp.migrate.analysis.expressions import dotted, literal_text, root_of
from tfmp.migrate.analysis.script import Script

_LIBRARIES = ("tensorflow.", "tfmp.", "npu_bridge.")
_BASE = "tensorflow.train.Optimizer"
_UNEQUAL = (cst.IsNot, cst.NotEqual, cst.NotIn)


def class_answer(
    script: Script, test: cst.BaseExpression, made: cst.Call, is_it: Callable[[cst.BaseExpression], bool]
) -> bool | None:
    """Tell whether a condition holds for an optimizer that a call constructs, by its class; None if that is not known.

    Such conditions are `isinstance(x, C)`, `type(x) is C`, `type(x).__name__ == "C"`, and those with `not`, `and` and
    `or`. `is_it` tells whether an expression is the optimizer.
    """
    if isinstance(test, cst.UnaryOperation) and isinstance(test.operator, cst.Not):
        answer = class_answer(script, test.expression, made, is_it)
        return None if answer is None else not answer
    if isinstance(test, cst.BooleanOperation):
        both = [class_answer(script, each, made, is_it) for each in (test.left, test.right)]
        decisive = isinstance(test.operator, cst.Or)
        return decisive if decisive in both else None if None in both else not decisive
    if isinstance(test, cst.Call) and dotted(test.func) == "isinstance" and len(test.args) == 2:
        tested, of = (arg.value for arg in test.args)
        return _is_of_any(script, made, of, exact=False) if is_it(tested) else None
    if not isinstance(test, cst.Comparison) or len(test.comparisons) != 1:
        return None
    compared, tested_of = test.comparisons[0], _of_type(test.left)
    is_equal = isinstance(compared.operator, cst.Is | cst.Equal | cst.In)
    if tested_of is None or not is_it(tested_of) or not (is_equal or isinstance(compared.operator, _UNEQUAL)):
        return None
    answer = _is_of_any(script, made, compared.comparator, exact=True)
    return answer if is_equal or answer is None else not answer


def _is_of_any(script: Script, made: cst.Call, of: cst.BaseExpression, *, exact: bool) -> bool | None:
    answers = [_is_of(script, made.func, each, exact, frozenset()) for each in _each(of)]
    return True if True in answers else None if None in answers else False


def _each(classes: cst.BaseExpression) -> tuple[cst.BaseExpression, ...]:
    if isinstance(classes, cst.Tuple | cst.List | cst.Set):
        return tuple(each.value for each in classes.elements)
    return (classes,)


def _of_type(node: cst.BaseExpression) -> cst.BaseExpression | None:
    """Return the object of `type(x)`, `x.__class__` or the `__name__` of these; None for any other expression."""
    if isinstance(node, cst.Attribute) and node.attr.value in ("__name__", "__qualname__"):
        node = node.value
    if isinstance(node, cst.Attribute) and node.attr.value == "__class__":
        return node.value
    if isinstance(node, cst.Call) and dotted(node.func) == "type" and len(node.args) == 1:
        return node.args[0].value
    return None


def _is_of(
    script: Script, made: cst.BaseExpression, of: cst.BaseExpression, exact: bool, seen: frozenset[cst.CSTNode]
) -> bool | None:
    name, asked = _class_name(script, made), literal_text(of) or _class_name(script, of)
    if not name or not asked:
        return None
    if name.split(".")[-1] == asked.split(".")[-1]:
        return True
    if exact:
        return False
    classes = script.nodes(cst.ClassDef)
    own = [each for each in classes if each.name.value == name and each not in seen]
    if len(own) == 1:
        answers = [_is_of(script, base.value, of, exact, seen | {own[0]}) for base in own[0].bases]
        return True if True in answers else None if None in answers else False
    if asked == _BASE and name.startswith("tensorflow."):
        return True
    # A class of a library is not derived from one of the script, nor from that of another library.
    return False if name.startswith(_LIBRARIES) or any(each.name.value == asked for each in classes) else None


def _class_name(script: Script, node: cst.BaseExpression) -> str:
    """Return the full name of an imported class, or the name of any other; empty for a variable of unknown value."""
    root = root_of(node)
    bound = [each.node for each in script.scopes.bindings(root)] if isinstance(root, cst.Name) else []
    if script.name_of(node) or all(isinstance(each, cst.ClassDef | cst.ImportAlias) for each in bound):
        return script.name_of(node) or dotted(node)
    values = script.cached(DataFlow).values(node)
    return _class_name(script, values.nodes[0]) if values.complete and len(values.nodes) == 1 else ""
