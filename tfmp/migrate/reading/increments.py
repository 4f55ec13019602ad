"""Recognizes where a script moves the global step by itself."""

from collections.abc import Iterator
from typing import NamedTuple

import libcst as cst

from tfmp.migrate.reading.calls import argument, function_name, method
from tfmp.migrate.reading.data_flow import DataFlow
from tfmp.migrate.reading.names import dotted
from tfmp.migrate.reading.script import Script

_ADDS = ("tensorflow.assign_add", "tensorflow.compat.v1.assign_add", "tensorflow.python.ops.state_ops.assign_add")
_ASSIGNS = ("tensorflow.assign", "tensorflow.compat.v1.assign", "tensorflow.python.ops.state_ops.assign")
_SUMS = ("tensorflow.add", "tensorflow.math.add", "tensorflow.python.ops.math_ops.add")
_CONDITIONS = ("cond", "where", "case", "select")
_GLOBAL_STEPS = ("get_or_create_global_step", "get_global_step", "create_global_step")
_JOINING = ("group", "tuple", "run", "control_dependencies", "with_dependencies")
# What is a number or a variable again, by its last word.
_SAME_NUMBER = ("constant", "cast", "identity", "convert_to_tensor", "to_int32", "to_int64", "int32", "int64")
_SAME_VARIABLE = ("read_value", "value", "initialized_value")


class Increment(NamedTuple):
    """A call that moves the global step by one.

    Attributes:
        call: The call.
        counter: The global step.
        conditional: Whether it moves in some steps only.
    """

    call: cst.Call
    counter: cst.BaseExpression
    conditional: bool


def increments(script: Script) -> Iterator[Increment]:
    """Return the calls that move the global step by one.

    Args:
        script: The script.

    Example:
        >>> script = Script("a = global_step.assign_add(1), x.assign_add(1), global_step.assign(1 + global_step)")
        >>> [script.span(increment.call)[0] for increment in increments(script)]
        [4, 48]
    """
    for call in script.nodes(cst.Call):
        name, (owner, of_method) = script.name_of(call.func), method(call)
        if name in _ADDS or (of_method == "assign_add" and not name):
            counter = (argument(call, 0, "ref") or argument(call, -1, "variable")) if name else owner
            by = argument(call, 1 if name else 0, "value" if name else "delta")
            if counter is not None and by is not None and _is_one(script, by) and _is_counter(script, counter):
                yield Increment(call, counter, False)
        elif name in _ASSIGNS or (of_method == "assign" and not name):
            counter = argument(call, 0, "ref") if name else owner
            value = argument(call, 1 if name else 0, "value")
            if counter is not None and value is not None and _is_counter(script, counter):
                yield from _assignment(script, call, counter, value)


def is_same_counter(script: Script, one: cst.BaseExpression, other: cst.BaseExpression) -> bool:
    """Tell whether two expressions are one variable: by name, or as both are the graph's global step.

    Args:
        script: The script.
        one: The one.
        other: The other.
    """
    by_name = bool(dotted(one)) and dotted(one) == dotted(other)
    return by_name or (_is_the_graphs(script, one) and _is_the_graphs(script, other))


def is_run_with(script: Script, increment: Increment, step: cst.Call) -> bool | None:
    """Tell whether one run of the graph does both an increment and an optimizer's step; None if that is not known.

    Args:
        script: The script.
        increment: The increment.
        step: The optimizer's step.
    """
    flow, function = script.once(DataFlow), script.function_of(increment.call)
    for node in script.nodes(cst.Call, cst.List, cst.Tuple):
        is_beside = function in (script.function_of(node), *script.ancestors(node))
        if not is_beside or (isinstance(node, cst.Call) and _last_word(script, node) not in _JOINING):
            continue
        behind = set(flow.nodes_behind(node, lambda each: False))
        missing = {increment.call, step} - behind
        if not missing or (len(missing) == 1 and missing <= set(_held(script, node))):
            return True
    return None if _is_used(script, increment.call) else False


def _held(script: Script, node: cst.CSTNode) -> Iterator[cst.CSTNode]:
    """Return the calls below `with tf.control_dependencies(...)`, which are run after what it is given."""
    item = script.parent(node)
    block = script.parent(item) if isinstance(item, cst.WithItem) else None
    if isinstance(block, cst.With):
        yield from (call for call in script.nodes(cst.Call) if block.body in script.ancestors(call))


def _is_used(script: Script, call: cst.Call) -> bool:
    """Tell whether anything reads what a call returns, as far as the script shows."""
    above = script.parent(call)
    if isinstance(above, cst.Expr):
        return False
    target = above.targets[0].target if isinstance(above, cst.Assign) and len(above.targets) == 1 else None
    return not isinstance(target, cst.Name) or script.reads_of(target) != ()


def _is_counter(script: Script, counter: cst.BaseExpression) -> bool:
    if _gets_global_step(script, counter) or dotted(counter).split(".")[-1] == "global_step":
        return True
    return any(_gets_global_step(script, node) for node in script.once(DataFlow).values(counter).nodes)


def _is_the_graphs(script: Script, counter: cst.BaseExpression) -> bool:
    """Tell whether a variable is the one that tf.train.get_global_step() returns; taken so for a name that says it."""
    if _gets_global_step(script, counter):
        return True
    values = script.once(DataFlow).values(counter).nodes
    if not values:
        return dotted(counter).split(".")[-1] == "global_step"
    return all(_gets_global_step(script, node) for node in values)


def _gets_global_step(script: Script, node: cst.CSTNode) -> bool:
    return isinstance(node, cst.Call) and function_name(script, node).split(".")[-1] in _GLOBAL_STEPS


def _assignment(
    script: Script, call: cst.Call, counter: cst.BaseExpression, value: cst.BaseExpression
) -> Iterator[Increment]:
    behind = script.once(DataFlow).nodes_behind(value, lambda each: _gets_global_step(script, each))
    sums = [pair for node in behind for pair in _sum(script, node)]
    if any(_is_one(script, by) and is_same_counter(script, counter, _variable(script, base)) for base, by in sums):
        conditional = any(
            isinstance(node, cst.IfExp)
            or (isinstance(node, cst.Call) and script.name_of(node.func).split(".")[-1] in _CONDITIONS)
            for node in behind
        )
        yield Increment(call, counter, conditional)


def _sum(script: Script, node: cst.CSTNode) -> list[tuple[cst.BaseExpression, cst.BaseExpression]]:
    """Return the two parts of a sum, in both orders; nothing for any other node."""
    if isinstance(node, cst.BinaryOperation) and isinstance(node.operator, cst.Add):
        return [(node.left, node.right), (node.right, node.left)]
    if isinstance(node, cst.Call) and script.name_of(node.func) in _SUMS:
        one, other = argument(node, 0, "x"), argument(node, 1, "y")
        return [(one, other), (other, one)] if one is not None and other is not None else []
    return []


def _is_one(script: Script, node: cst.BaseExpression) -> bool:
    while isinstance(node, cst.Call) and _last_word(script, node) in _SAME_NUMBER and node.args:
        node = node.args[0].value
    return isinstance(node, cst.Integer | cst.Float) and node.evaluated_value == 1


def _variable(script: Script, node: cst.BaseExpression) -> cst.BaseExpression:
    """Return the variable whose value an expression is."""
    while isinstance(node, cst.Call):
        if _last_word(script, node) in _SAME_VARIABLE and isinstance(node.func, cst.Attribute):
            node = node.func.value
        elif _last_word(script, node) in _SAME_NUMBER and node.args:
            node = node.args[0].value
        else:
            break
    return node


def _last_word(script: Script, call: cst.Call) -> str:
    return method(call)[1] or function_name(script, call).split(".")[-1]
