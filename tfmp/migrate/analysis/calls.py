"""What is called, and with which arguments."""

from collections.abc import Iterator

import libcst as cst

from tfmp.migrate.analysis.names import dotted
from tfmp.migrate.analysis.script import Script


def argument(call: cst.Call, position: int, keyword: str) -> cst.BaseExpression | None:
    """Return an argument of a call; None if it is not given, or stars hide it.

    Args:
        call: The call.
        position: Where it stands if it is given by position, from 0; below 0 if it never is.
        keyword: Its name.

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
    """Return what a method is called on, and its name; an empty name if the call is not of that form.

    Args:
        call: The call.

    Example:
        >>> owner, name = method(cst.parse_expression("opt.minimize(loss)"))
        >>> owner.value, name
        ('opt', 'minimize')
    """
    if isinstance(call.func, cst.Attribute):
        return call.func.value, call.func.attr.value
    return call.func, ""


def methods(script: Script, *names: str) -> Iterator[tuple[cst.Call, cst.BaseExpression]]:
    """Return the calls of methods of these names, with what they are called on.

    Functions of modules that the script imports are none.

    Args:
        script: The script.
        *names: The names.
    """
    for call in script.nodes(cst.Call):
        owner, name = method(call)
        if name in names and not script.name_of(call.func):
            yield call, owner


def function_name(script: Script, call: cst.Call) -> str:
    """Return what an imported function is called in full, or else its name as it is written.

    A name that may come from a star import is returned as it is written too.

    Args:
        script: The script.
        call: A call of it.

    Example:
        >>> script = Script("import tensorflow as tf; tf.gradients(a, b); mine.f()")
        >>> [function_name(script, call) for call in script.nodes(cst.Call)]
        ['tensorflow.gradients', 'mine.f']
    """
    return script.name_of(call.func) or dotted(call.func)


def last_word(script: Script, call: cst.Call) -> str:
    """Return the last word of what `function_name` returns: what a function is called, wherever it comes from.

    Args:
        script: The script.
        call: A call of it.

    Example:
        >>> script = Script("from tensorflow import gradients as g; g(a, b); mine.f()")
        >>> [last_word(script, call) for call in script.nodes(cst.Call)]
        ['gradients', 'f']
    """
    return function_name(script, call).split(".")[-1]


def literal_text(node: cst.BaseExpression) -> str:
    """Return the text of a string that is written out; empty for any other expression.

    Args:
        node: The expression.

    Example:
        >>> literal_text(cst.parse_expression("'loss_scale:0'")), literal_text(cst.parse_expression("name"))
        ('loss_scale:0', '')
    """
    value = node.evaluated_value if isinstance(node, cst.SimpleString) else ""
    return value if isinstance(value, str) else ""


def code(script: Script, node: cst.CSTNode) -> str:
    """Return a node as it is written, on one line.

    Args:
        script: The script.
        node: The node.
    """
    return " ".join(script.text[slice(*script.span(node))].split())
