"""Reads single expressions: dotted names, the parts of a call, literal strings, and the names that imports bind."""

import ast
import contextlib
import warnings
from collections.abc import Iterator
from typing import NamedTuple

import libcst as cst

# Module names that mean the same TensorFlow 1 API; the longest come first.
_TENSORFLOW = ("tensorflow_core.compat.v1", "tensorflow.compat.v1", "tensorflow_core")


class Use(NamedTuple):
    """A dotted name in an expression that starts at an imported name, as `tf.contrib.layers`."""

    node: cst.Name | cst.Attribute
    name: str  #: Its full meaning: `tensorflow.contrib.layers`, with `tensorflow` for `tensorflow.compat.v1`.
    root: str  #: The full meaning of its first word: `tensorflow`.
    raw: str  #: The same as `name`, but with the module as the script imports it: `tensorflow.compat.v1.layers`.


class Imported(NamedTuple):
    """One name that an import statement imports. For a star import it is the module."""

    node: cst.Import | cst.ImportFrom
    name: str  #: The full name of the imported object, with `tensorflow` for `tensorflow.compat.v1`.
    raw: str  #: The full name as the script writes it.
    bound: str  #: The name that the script uses for it; empty for a star import.
    module: str  #: What that name stands for: as `raw`, but `a` for `import a.b`; empty for a star import.
    alias: cst.ImportAlias | None  #: The part of the statement that names it; None for a star import.


def dotted(node: cst.BaseExpression | None) -> str:
    """Return a dotted name as it is written: `tf.contrib`. Empty for any other expression, such as `tf().contrib`."""
    if isinstance(node, cst.Name):
        return node.value
    if isinstance(node, cst.Attribute):
        before = dotted(node.value)
        return f"{before}.{node.attr.value}" if before else ""
    return ""


def without_last_words(node: cst.Name | cst.Attribute, count: int) -> cst.Name | cst.Attribute:
    """Return a dotted name without its last words. It must have more words than that."""
    for _ in range(count):
        node = node.value  # type: ignore[assignment] # that many words are attributes
    return node


def root_of(node: cst.BaseExpression) -> cst.BaseExpression:
    """Return the expression in front of all attributes, which is the first word of a dotted name."""
    while isinstance(node, cst.Attribute):
        node = node.value
    return node


def first_word(node: cst.Name | cst.Attribute) -> str:
    """Return the first word of a dotted name: `tf` of `tf.contrib.layers`."""
    return dotted(node).partition(".")[0]


def imported_by(node: cst.Import | cst.ImportFrom) -> Iterator[Imported]:
    """Yield the names that an import statement imports; none for a relative import."""
    module = dotted(node.module) if isinstance(node, cst.ImportFrom) and not node.relative else ""
    if isinstance(node, cst.ImportFrom) and not module:
        return
    if isinstance(node.names, cst.ImportStar):
        yield Imported(node, one_tensorflow(module), module, "", "", None)
        return
    for alias in node.names:
        name = alias.evaluated_name
        raw = f"{module}.{name}" if module else name
        bound = alias.evaluated_alias or name.split(".")[0]
        yield Imported(node, one_tensorflow(raw), raw, bound, raw if module or alias.asname else bound, alias)


def one_tensorflow(name: str) -> str:
    """Return a full name with `tensorflow` in place of `tensorflow.compat.v1` and `tensorflow_core`."""
    for module in _TENSORFLOW:
        if name == module or name.startswith(f"{module}."):
            # `tf.compat.v1` itself contains a `compat.v1`, so the prefix may occur twice.
            return one_tensorflow(f"tensorflow{name[len(module) :]}")
    return name


def is_tensorflow(name: str) -> bool:
    """Tell whether a full name is of the package tensorflow."""
    return one_tensorflow(name).partition(".")[0] == "tensorflow"


def argument(call: cst.Call, position: int, keyword: str) -> cst.BaseExpression | None:
    """Return an argument of a call; None if the call does not give it, or if `*args` may contain it.

    The position counts from 0; it is negative for an argument that is keyword-only.
    """
    for arg in call.args:
        if arg.keyword is not None and arg.keyword.value == keyword:
            return arg.value
    given = [arg for arg in call.args if arg.keyword is None][: position + 1]
    if position < 0 or len(given) <= position or any(arg.star for arg in given):
        return None
    return given[position].value


def method(call: cst.Call) -> tuple[cst.BaseExpression, str]:
    """Return the object that a method is called on and the method's name; the name is empty for a plain function."""
    if isinstance(call.func, cst.Attribute):
        return call.func.value, call.func.attr.value
    return call.func, ""


def literal_text(node: cst.BaseExpression) -> str:
    """Return the value of a string literal; empty for any other expression."""
    if not isinstance(node, cst.SimpleString | cst.ConcatenatedString):
        return ""
    with _without_warnings():
        value = node.evaluated_value
    return value if isinstance(value, str) else ""


def literal(code: str) -> tuple[object] | None:
    """Return the value of a literal in a tuple; None for the code of any other expression.

    Examples:
        >>> literal("-1.5"), literal("('a', None)"), literal("x")
        ((-1.5,), (('a', None),), None)
    """
    try:
        with _without_warnings():
            return (ast.literal_eval(code),)
    except (ValueError, SyntaxError, TypeError):
        return None


@contextlib.contextmanager
def _without_warnings() -> Iterator[None]:
    """Ignore Python's warnings about a literal, such as an invalid escape: they are the script's own matter."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
