"""The syntax tree of a script, with the place of each node."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, cached_property, wraps
from itertools import accumulate, chain
from typing import TypeVar

import libcst as cst
from libcst import metadata

_Node = TypeVar("_Node", bound=cst.CSTNode)
_Owner = TypeVar("_Owner", bound=object)
_Key = TypeVar("_Key")
_Made = TypeVar("_Made")
# The fields that hold only spaces, comments and punctuation. No rule asks for their nodes, which are half of all.
_LAYOUT = frozenset(
    (
        *("lpar", "rpar", "lbracket", "rbracket", "lbrace", "rbrace", "comma", "semicolon", "colon", "dot", "equal"),
        *("header", "footer", "leading_lines", "lines_after_decorators", "lines_after_module_docstring"),
    )
)


def once_per_argument(compute: Callable[[_Owner, _Key], _Made]) -> Callable[[_Owner, _Key], _Made]:
    """Make a method of one argument remember what it returned, for as long as its object lives."""

    @wraps(compute)
    def remembered(owner: _Owner, key: _Key) -> _Made:
        known: dict[_Key, _Made] = vars(owner).setdefault(f"_known_{compute.__name__}", {})
        if key not in known:
            known[key] = compute(owner, key)
        return known[key]

    return remembered


class Tree:
    """A parsed text. It is never modified.

    Raises:
        libcst.ParserSyntaxError: It is not Python 3.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        self.module = cst.parse_module(text)
        lines = text.replace("\r\n", "\0\n").replace("\r", "\n").split("\n")
        self._line_starts = [0, *accumulate(len(line) + 1 for line in lines)]
        self._found: dict[tuple[type, ...], Sequence[cst.CSTNode]] = {}

    @cached_property
    def _positions(self) -> Mapping[cst.CSTNode, metadata.CodeRange]:
        return metadata.MetadataWrapper(self.module, unsafe_skip_copy=True).resolve(metadata.PositionProvider)

    @cached_property
    def _parents(self) -> Mapping[cst.CSTNode, cst.CSTNode]:
        # LibCST's ParentNodeProvider and `children` rebuild every node, which takes ten times as long.
        stack: list[cst.CSTNode] = [self.module]
        parents = {}
        while stack:
            above = stack.pop()
            below = children(above)
            parents.update(dict.fromkeys(below, above))
            stack.extend(below)
        return parents

    @cached_property
    def _by_kind(self) -> Mapping[type, Sequence[cst.CSTNode]]:
        found: dict[type, list[cst.CSTNode]] = {}
        for node in self._parents:
            found.setdefault(type(node), []).append(node)
        return found

    def nodes(self, *kinds: type[_Node]) -> Sequence[_Node]:
        """Return all nodes of the given types in the order of the text; an outer node comes before an inner one."""
        if kinds not in self._found:
            found = (nodes for kind, nodes in self._by_kind.items() if issubclass(kind, kinds))
            self._found[kinds] = tuple(sorted(chain.from_iterable(found), key=self._order))
        return self._found[kinds]  # type: ignore[return-value] # found for these kinds

    def _order(self, node: cst.CSTNode) -> tuple[int, int]:
        start, end = self.span(node)
        return start, -end

    def span(self, node: cst.CSTNode) -> tuple[int, int]:
        """Return the start and the end of a node, in characters from the start of the script."""
        place = self._positions[node]
        return (
            self._line_starts[place.start.line - 1] + place.start.column,
            self._line_starts[place.end.line - 1] + place.end.column,
        )

    def line(self, node: cst.CSTNode) -> int:
        """Return the number of the line in which a node starts, from 1."""
        return self._positions[node].start.line

    def start_of_line(self, node: cst.CSTNode) -> int:
        """Return the start of the line in which a node starts, in characters."""
        return self._line_starts[self.line(node) - 1]

    def end_of_line(self, node: cst.CSTNode) -> int:
        """Return the start of the line after the one in which a node ends, in characters."""
        return min(self._line_starts[self._positions[node].end.line], len(self.text))

    def code(self, node: cst.CSTNode) -> str:
        """Return the source code of a node on one line."""
        return " ".join(self.text[slice(*self.span(node))].split())

    def parent(self, node: cst.CSTNode) -> cst.CSTNode | None:
        """Return the parent of a node; None for the module."""
        return self._parents.get(node)

    def ancestors(self, node: cst.CSTNode) -> Iterator[cst.CSTNode]:
        """Yield the nodes around a node, the nearest first."""
        above = self._parents.get(node)
        while above is not None:
            yield above
            above = self._parents.get(above)

    def around(self, node: cst.CSTNode) -> Iterator[tuple[cst.CSTNode, cst.CSTNode]]:
        """Yield the nodes around a node, the nearest first, each with the part of it that holds the node."""
        part = node
        for above in self.ancestors(node):
            yield above, part
            part = above

    def function_of(self, node: cst.CSTNode) -> cst.FunctionDef | None:
        """Return the innermost function around a node; None outside of functions."""
        return next((above for above in self.ancestors(node) if isinstance(above, cst.FunctionDef)), None)

    def call_of(self, node: cst.CSTNode) -> cst.Call | None:
        """Return the call whose function is this node; None if the node is not called."""
        above = self.parent(node)
        return above if isinstance(above, cst.Call) and above.func is node else None

    def whole_name(self, root: cst.Name) -> cst.Name | cst.Attribute:
        """Return the dotted name that starts with a word, with all attributes that follow it."""
        node: cst.Name | cst.Attribute = root
        above = self.parent(node)
        while isinstance(above, cst.Attribute) and above.value is node:
            node, above = above, self.parent(above)
        return node

    def is_label(self, name: cst.Name) -> bool:
        """Tell whether a word is the name of an attribute or a keyword argument, which reads no variable."""
        above = self.parent(name)
        is_attribute = isinstance(above, cst.Attribute) and above.attr is name
        return is_attribute or (isinstance(above, cst.Arg) and above.keyword is name)

    def is_use(self, name: cst.Name) -> bool:
        """Tell whether a word is used as a variable: not in an import, as a parameter, or as a label.

        Examples:
            >>> tree = Tree("import tf; make = lambda opt, module=tf: opt(name=module.x)")
            >>> [name.value for name in tree.nodes(cst.Name) if tree.is_use(name)]
            ['make', 'tf', 'opt', 'module']
        """
        above = self.parent(self.whole_name(name))
        is_parameter = isinstance(above, cst.Param) and above.name is name
        in_import = isinstance(above, cst.ImportAlias | cst.AsName | cst.ImportFrom)
        return not (is_parameter or in_import or self.is_label(name))

    def is_alone(self, statement: cst.CSTNode) -> bool:
        """Tell whether a simple statement shares its line with no other statement."""
        line = self.parent(statement)
        return isinstance(line, cst.SimpleStatementLine) and len(line.body) == 1

    def is_top_level(self, statement: cst.CSTNode) -> bool:
        """Tell whether a simple statement is alone on its line, at the top level of the script."""
        return self.is_alone(statement) and next(self.ancestors(self._parents[statement])) is self.module


def children(node: cst.CSTNode) -> list[cst.CSTNode]:
    """Return the children of a node, without those that are only layout."""
    found = []
    for field in _fields(type(node)):
        value = getattr(node, field)
        if isinstance(value, cst.CSTNode):
            found.append(value)
        elif isinstance(value, list | tuple):
            found += [each for each in value if isinstance(each, cst.CSTNode)]
    return found


@cache
def _fields(kind: type[cst.CSTNode]) -> tuple[str, ...]:
    names = (field.name for field in dataclasses.fields(kind))
    return tuple(name for name in names if "whitespace" not in name and name not in _LAYOUT)
