"""Dotted names, as scripts import and use them."""

from collections.abc import Iterator
from typing import NamedTuple

import libcst as cst

# The names of one TensorFlow; the longest first.
_TENSORFLOW = ("tensorflow_core.compat.v1", "tensorflow.compat.v1", "tensorflow_core")


class Use(NamedTuple):
    """A dotted name in an expression that starts at something imported, as `tf.contrib.layers`.

    Attributes:
        node: The whole name.
        name: What it means, in full: `tensorflow.contrib.layers`. `tensorflow.compat.v1` is `tensorflow` here.
        root: What its first word means: `tensorflow`.
        raw: As `name`, with the module as the script imports it: `tensorflow.compat.v1.layers`.
    """

    node: cst.Name | cst.Attribute
    name: str
    root: str
    raw: str


class Imported(NamedTuple):
    """One name of an import statement.

    Attributes:
        node: The statement, `import ...` or `from ... import ...`.
        name: What is imported, in full, `tensorflow` for `tensorflow.compat.v1`; of a star import the module.
        raw: The same, as it is written.
        bound: The name that the script has for it; empty for a star import.
    """

    node: cst.Import | cst.ImportFrom
    name: str
    raw: str
    bound: str


def dotted(node: cst.BaseExpression | None) -> str:
    """Return a dotted name as it is written: `tf.contrib`. Empty for any other expression.

    Args:
        node: An expression.

    Example:
        >>> dotted(cst.parse_expression("tf.contrib")), dotted(cst.parse_expression("tf().contrib"))
        ('tf.contrib', '')
    """
    if isinstance(node, cst.Name):
        return node.value
    if isinstance(node, cst.Attribute):
        before = dotted(node.value)
        return f"{before}.{node.attr.value}" if before else ""
    return ""


def without_last_words(node: cst.Name | cst.Attribute, count: int) -> cst.Name | cst.Attribute:
    """Return the part of a dotted name that is left without its last words.

    Args:
        node: A dotted name that starts with a word.
        count: How many words to leave out; fewer than there are.

    Example:
        >>> dotted(without_last_words(cst.parse_expression("tf.contrib.layers"), 1))
        'tf.contrib'
    """
    for _ in range(count):
        node = node.value  # type: ignore[assignment] # that many words are attributes
    return node


def root_of(node: cst.BaseExpression) -> cst.BaseExpression:
    """Return what attributes are taken of: the first word of a dotted name.

    Args:
        node: An expression.

    Example:
        >>> root_of(cst.parse_expression("tf.contrib.layers")).value
        'tf'
    """
    while isinstance(node, cst.Attribute):
        node = node.value
    return node


def first_word(node: cst.Name | cst.Attribute) -> str:
    """Return the word that a dotted name starts with.

    Args:
        node: A dotted name that starts with a word.

    Example:
        >>> first_word(cst.parse_expression("tf.contrib.layers"))
        'tf'
    """
    return dotted(node).partition(".")[0]


def imported_by(node: cst.Import) -> Iterator[Imported]:
    """Return what an `import` imports.

    Args:
        node: The statement.
    """
    for alias in node.names:
        name = dotted(alias.name)
        yield Imported(node, one_tensorflow(name), name, _bound_as(alias) or name.split(".")[0])


def imported_from(node: cst.ImportFrom) -> Iterator[Imported]:
    """Return what a `from` import imports; nothing of a relative one.

    Args:
        node: The statement.
    """
    module = dotted(node.module)
    if node.relative or not module:
        return
    if isinstance(node.names, cst.ImportStar):
        yield Imported(node, one_tensorflow(module), module, "")
        return
    for alias in node.names:
        name = f"{module}.{dotted(alias.name)}"
        yield Imported(node, one_tensorflow(name), name, _bound_as(alias) or dotted(alias.name))


def _bound_as(alias: cst.ImportAlias) -> str:
    return dotted(alias.asname.name) if alias.asname is not None and isinstance(alias.asname.name, cst.Name) else ""


def one_tensorflow(name: str) -> str:
    """Return a full name, with `tensorflow` for each name of that module.

    Args:
        name: The name.

    Example:
        >>> one_tensorflow("tensorflow.compat.v1.layers")
        'tensorflow.layers'
    """
    for module in _TENSORFLOW:
        if name == module or name.startswith(f"{module}."):
            # `tf.compat.v1` has a `compat.v1` too.
            return one_tensorflow(f"tensorflow{name[len(module) :]}")
    return name
