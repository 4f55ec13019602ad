"""A parsed script: its text, the position of each node, and the meaning of its names."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, cached_property
from itertools import accumulate, chain
from typing import TypeVar

import libcst as cst
from libcst import metadata

from tfmp.migrate.analysis.expressions import (
    Imported,
    Use,
    dotted,
    imported_by,
    imported_from,
    method,
    one_tensorflow,
    root_of,
)

_Node = TypeVar("_Node", bound=cst.CSTNode)
_Made = TypeVar("_Made")

# Every module has these names; every method has `__class__`.
_MODULE_ATTRIBUTES = frozenset(
    ("__name__", "__file__", "__doc__", "__package__", "__spec__", "__loader__", "__builtins__", "__path__")
) | {"__class__"}


class Script:
    """A parsed script. It is never modified: rules return edits instead.

    Args:
        text: The code of the script.
        tensorflow: The TensorFlow version, 1 or 2, of the scripts around it; None if that is not known.

    Raises:
        libcst.ParserSyntaxError: It is not Python 3.

    Example:
        >>> script = Script('''import tensorflow.compat.v1 as tf
        ... opt = tf.contrib.mixed_precision.LossScaleOptimizer(a, b)''')
        >>> use, = script.uses
        >>> use.name, use.root, script.line(use.node)
        ('tensorflow.contrib.mixed_precision.LossScaleOptimizer', 'tensorflow', 2)
        >>> script.text[slice(*script.span(use.node))]
        'tf.contrib.mixed_precision.LossScaleOptimizer'
    """

    def __init__(self, text: str, tensorflow: int | None = None) -> None:
        self.text = text
        self.tensorflow = tensorflow
        self.module = cst.parse_module(text)
        self._wrapper = metadata.MetadataWrapper(self.module, unsafe_skip_copy=True)
        lines = text.replace("\r\n", "\0\n").replace("\r", "\n").split("\n")
        self._line_starts = [0, *accumulate(len(line) + 1 for line in lines)]
        self._made: dict[object, object] = {}
        self._found: dict[tuple[type, ...], Sequence[cst.CSTNode]] = {}

    @cached_property
    def _positions(self) -> Mapping[cst.CSTNode, metadata.CodeRange]:
        return self._wrapper.resolve(metadata.PositionProvider)

    @cached_property
    def _scopes(self) -> Mapping[cst.CSTNode, metadata.Scope | None]:
        return self._wrapper.resolve(metadata.ScopeProvider)

    @cached_property
    def _parents(self) -> Mapping[cst.CSTNode, cst.CSTNode]:
        return dict(_pairs(self.module))

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

    def parent(self, node: cst.CSTNode) -> cst.CSTNode | None:
        """Return the parent of a node; None for the module."""
        return self._parents.get(node)

    def ancestors(self, node: cst.CSTNode) -> Iterator[cst.CSTNode]:
        """Yield the nodes around a node, the nearest first."""
        above = self.parent(node)
        while above is not None:
            yield above
            above = self.parent(above)

    def function_of(self, node: cst.CSTNode) -> cst.FunctionDef | None:
        """Return the innermost function around a node; None outside of functions."""
        return next((above for above in self.ancestors(node) if isinstance(above, cst.FunctionDef)), None)

    def call_of(self, node: cst.CSTNode) -> cst.Call | None:
        """Return the call whose function is this node; None if the node is not called."""
        above = self.parent(node)
        return above if isinstance(above, cst.Call) and above.func is node else None

    def is_label(self, name: cst.Name) -> bool:
        """Tell whether a word is the name of an attribute or a keyword argument, which reads no variable."""
        above = self.parent(name)
        is_attribute = isinstance(above, cst.Attribute) and above.attr is name
        return is_attribute or (isinstance(above, cst.Arg) and above.keyword is name)

    def is_use(self, name: cst.Name) -> bool:
        """Tell whether a word is used as a variable: not in an import, as a parameter, or as a label.

        Example:
            >>> script = Script("import tf; make = lambda opt, module=tf: opt(name=module.x)")
            >>> [name.value for name in script.nodes(cst.Name) if script.is_use(name)]
            ['make', 'tf', 'opt', 'module']
        """
        above = self.parent(self.whole_name(name))
        is_parameter = isinstance(above, cst.Param) and above.name is name
        in_import = isinstance(above, cst.ImportAlias | cst.AsName | cst.ImportFrom)
        return not (is_parameter or in_import or self.is_label(name))

    def is_builtin(self, name: cst.Name) -> bool:
        """Tell whether a word is a use of a Python builtin that the script does not rebind.

        Example:
            >>> script = Script('''vars = loss.eval(exec=False)
            ... len(vars)''')
            >>> [name.value for name in script.nodes(cst.Name) if script.is_builtin(name)]
            ['False', 'len']
        """
        scope = self._scopes.get(name) if self.is_use(name) else None
        found = scope.get_qualified_names_for(name) if scope is not None else ()
        return {each.source for each in found} == {metadata.QualifiedNameSource.BUILTIN}

    def whole_name(self, root: cst.Name) -> cst.Name | cst.Attribute:
        """Return the dotted name that starts with a word, with all attributes that follow it."""
        node: cst.Name | cst.Attribute = root
        above = self.parent(node)
        while isinstance(above, cst.Attribute) and above.value is node:
            node, above = above, self.parent(above)
        return node

    def is_top_level(self, node: cst.CSTNode) -> bool:
        """Tell whether a simple statement is alone on its line, at the top level of the script."""
        statement = self.parent(node)
        return (
            isinstance(statement, cst.SimpleStatementLine)
            and len(statement.body) == 1
            and self.parent(statement) is self.module
        )

    @cached_property
    def imports(self) -> tuple[Imported, ...]:
        """The absolute imports in the order of the text, including imports inside functions."""
        found = [one for node in self.nodes(cst.Import) for one in imported_by(node)]
        found += [one for node in self.nodes(cst.ImportFrom) for one in imported_from(node)]
        return tuple(sorted(found, key=lambda one: self.span(one.node)))

    @cached_property
    def uses(self) -> tuple[Use, ...]:
        """The uses of imported names, each with all the attributes that follow, in the order of the text.

        A name with two possible meanings, or with another binding besides an import, is left out.
        """
        bound = {imported.bound for imported in self.imports}
        names = (node for node in self.nodes(cst.Name) if node.value in bound)
        found = (self._use(name) for name in names)
        return tuple(use for use in found if use is not None)

    def name_of(self, node: cst.CSTNode) -> str:
        """Return the full meaning of a dotted name that starts at an imported name; empty for any other node."""
        return self._name_of_use.get(node, "")

    def methods(self, *names: str) -> Iterator[tuple[cst.Call, cst.BaseExpression]]:
        """Yield the calls of methods with one of these names, each with the object that the method is called on.

        Calls of functions in imported modules, such as `tf.gradients`, are not methods and are left out.
        """
        for call in self.nodes(cst.Call):
            owner, name = method(call)
            if name in names and not self.name_of(call.func):
                yield call, owner

    def function_name(self, call: cst.Call) -> str:
        """Return the full name of an imported function, or the name as it is written for any other function.

        A name that may come from a star import is also returned as it is written.

        Example:
            >>> script = Script("import tensorflow as tf; tf.gradients(a, b); mine.f()")
            >>> [script.function_name(call) for call in script.nodes(cst.Call)]
            ['tensorflow.gradients', 'mine.f']
        """
        return self.name_of(call.func) or dotted(call.func)

    def last_word(self, call: cst.Call) -> str:
        """Return the last word of `function_name`: the function's own name, wherever the script imports it from."""
        return self.function_name(call).split(".")[-1]

    def code(self, node: cst.CSTNode) -> str:
        """Return the source code of a node on one line."""
        return " ".join(self.text[slice(*self.span(node))].split())

    @cached_property
    def _name_of_use(self) -> Mapping[cst.CSTNode, str]:
        return {use.node: use.name for use in self.uses}

    def cached(self, make: "Callable[[Script], _Made]") -> _Made:
        """Return an analysis of this script that several rules share; it is computed at the first call.

        Args:
            make: The class or module-level function that computes the analysis from a script.
        """
        if make not in self._made:
            self._made[make] = make(self)
        return self._made[make]  # type: ignore[return-value] # made by this function

    @cached_property
    def unbound_names(self) -> Mapping[str, tuple[int, ...]]:
        """The names that neither the script nor Python binds, with the lines that use them. Star imports may bind them.

        Names are in the order of their first use.
        """
        scopes = dict.fromkeys(scope for scope in self._scopes.values() if scope is not None)
        accesses = {access for scope in scopes for access in scope.accesses if not access.referents}
        lines: dict[str, set[int]] = {}
        for access in accesses:
            name = dotted(access.node).split(".")[0] if not isinstance(access.node, cst.BaseString) else ""
            if name and name not in _MODULE_ATTRIBUTES:
                lines.setdefault(name, set()).add(self.line(access.node))
        return {name: tuple(sorted(lines[name])) for name in sorted(lines, key=lambda name: (min(lines[name]), name))}

    def reads_of(self, variable: cst.Name) -> tuple[cst.Name, ...] | None:
        """Return the nodes that read a variable, in the order of the text; None if it has more than one binding."""
        scope = self._scopes.get(variable)
        bindings = list(scope[variable.value]) if scope is not None else []
        if len(bindings) != 1 or bindings[0].scope is not scope or not isinstance(bindings[0], metadata.Assignment):
            return None
        names = {root_of(access.node) for access in bindings[0].references}
        found = (node for node in self.nodes(cst.Name) if node in names)
        return tuple(found)

    def _use(self, root: cst.Name) -> Use | None:
        """Return the use that starts with this word; None if the word is not an imported name."""
        node = self.whole_name(root)
        if not self.is_use(root):
            return None
        meaning, of_root = self._meaning(node), self._meaning(root)
        if not meaning or not of_root:
            return None
        return Use(node, one_tensorflow(meaning), one_tensorflow(of_root), meaning)

    def _meaning(self, node: cst.Name | cst.Attribute) -> str:
        """Return the single meaning that the imports give to a name; empty if there is none, or more than one."""
        scope = self._scopes.get(node)
        if scope is None:
            return ""
        found = scope.get_qualified_names_for(node)
        names = {name.name for name in found if name.source is metadata.QualifiedNameSource.IMPORT}
        if len(names) < len(found) and not self._is_only_lost(scope, root_of(node)):
            return ""
        if len({one_tensorflow(name) for name in names}) != 1:
            return ""
        return min(names)

    def _is_only_lost(self, scope: metadata.Scope, root: cst.CSTNode) -> bool:
        """Tell whether all other bindings of an imported name are `name = None` or `name = name.compat.v1`."""
        word = cst.ensure_type(root, cst.Name).value
        others = (one for one in scope[word] if not isinstance(one, metadata.ImportAssignment))
        return all(isinstance(one, metadata.Assignment) and self._is_given(one.node, word) for one in others)

    def _is_given(self, target: cst.CSTNode, word: str) -> bool:
        above = self.parent(target)
        assignment = self.parent(above) if isinstance(above, cst.AssignTarget) else None
        return isinstance(assignment, cst.Assign) and dotted(assignment.value) in ("None", f"{word}.compat.v1")

    @cached_property
    def ambiguous_uses(self) -> tuple[Use, ...]:
        """The uses of imported names that also have another binding, in the same form as `uses`."""
        bound = {imported.bound: imported for imported in self.imports}
        found = []
        for root in (node for node in self.nodes(cst.Name) if node.value in bound):
            imported, scope = bound[root.value], self._scopes.get(root)
            if scope is None or not self.is_use(root) or self._meaning(root):
                continue
            sources = {name.source for name in scope.get_qualified_names_for(root)}
            if metadata.QualifiedNameSource.IMPORT in sources:
                node = self.whole_name(root)
                rest = dotted(node)[len(root.value) :]
                found.append(Use(node, f"{imported.name}{rest}", imported.name, f"{imported.raw}{rest}"))
        return tuple(found)


def _pairs(module: cst.Module) -> Iterator[tuple[cst.CSTNode, cst.CSTNode]]:
    """Yield each node of the module with its parent."""
    # LibCST's `children` and ParentNodeProvider rebuild every node, which takes ten times as long.
    stack: list[cst.CSTNode] = [module]
    while stack:
        above = stack.pop()
        for name in _fields(type(above)):
            value = getattr(above, name)
            for node in value if isinstance(value, list | tuple) else (value,):
                if isinstance(node, cst.CSTNode):
                    yield node, above
                    stack.append(node)


@cache
def _fields(kind: type[cst.CSTNode]) -> tuple[str, ...]:
    return tuple(field.name for field in dataclasses.fields(kind))
