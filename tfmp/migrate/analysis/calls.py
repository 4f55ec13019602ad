"""Functions that read the parts of a call: its function's name, its arguments, literal strings."""

from collections.abc import Iterator

import libcst as cst

from tfmp.migrate.analysis.dotted_names import dotted
from tfmp.migrate.analysis.script import Script


def argument(call: cst.Call, position: int, keyword: str) -> cst.BaseExpression | None:
    """Return an argument of a call; None if the call does not give it, or if `*args` may contain it.

    Args:
        call: The call.
        position: The index of the argument if it is given by position, from 0; negative if it is keyword-only.
        keyword: The name of the argument.

    Example:
        >>> call = cst.parse_expression("f(a, b, c=d)")
        >>> argument(call, 1, "x").value, argument(call, -1, "c").value, argument(call, 2, "x")
        ('b', 'd', None)
    """
    positional = [arg for arg in call.args if arg.keyword is None]
    for arg in call.args:
        if arg.keyword is not None and arg.keyword.value == keyword:
            return arg.value
    given = positional[: position + 1]
    if position < 0 or len(given) <= position or any(arg.star for arg in given):
        return None
    return given[position].value


def method(call: cst.Call) -> tuple[cst.BaseExpression, str]:
    """Return the object that a method is called on and the method's name; the name is empty for a plain function.

    Args:
        call: The call of a method or a function.

    Example:
        >>> owner, name = method(cst.parse_expression("opt.minimize(loss)"))
        >>> owner.value, name
        ('opt', 'minimize')
    """
    if isinstance(call.func, cst.Attribute):
        return call.func.value, call.func.attr.value
    return call.func, ""


def methods(script: Script, *names: str) -> Iterator[tuple[cst.Call, cst.BaseExpression]]:
    """Yield the calls of methods with one of these names, each with the object that the method is called on.

    Calls of functions in imported modules, such as `tf.gradients`, are not methods and are left out.

    Args:
        script: The parsed script.
        *names: The method names.
    """
    for call in script.nodes(cst.Call):
        owner, name = method(call)
        if name in names and not script.name_of(call.func):
            yield call, owner


def function_name(script: Script, call: cst.Call) -> str:
    """Return the full name of an imported function, or the name as it is written for any other function.

    A name that may come from a star import is also returned as it is written.

    Args:
        script: The parsed script.
        call: A call of the function.

    Example:
        >>> script = Script("import tensorflow as tf; tf.gradients(a, b); mine.f()")
        >>> [function_name(script, call) for call in script.nodes(cst.Call)]
        ['tensorflow.gradients', 'mine.f']
    """
    return script.name_of(call.func) or dotted(call.func)


def last_word(script: Script, call: cst.Call) -> str:
    """Return the last word of `function_name`: the function's own name, wherever the script imports it from.

    Args:
        script: The parsed script.
        call: A call of the function.

    Example:
        >>> script = Script("from tensorflow import gradients as g; g(a, b); mine.f()")
        >>> [last_word(script, call) for call in script.nodes(cst.Call)]
        ['gradients', 'f']
    """
    return function_name(script, call).split(".")[-1]


def literal_text(node: cst.BaseExpression) -> str:
    """Return the value of a string literal; empty for any other expression.

    Args:
        node: Any expression.

    Example:
        >>> literal_text(cst.parse_expression("'loss_scale:0'")), literal_text(cst.parse_expression("name"))
        ('loss_scale:0', '')
    """
    value = node.evaluated_value if isinstance(node, cst.SimpleString) else ""
    return value if isinstance(value, str) else ""


def code(script: Script, node: cst.CSTNode) -> str:
    """Return the source code of a node on one line.

    Args:
        script: The parsed script.
        node: A node of the script.
    """
    return " ".join(script.text[slice(*script.span(node))].split())
