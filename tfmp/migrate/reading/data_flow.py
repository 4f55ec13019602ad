"""Where the values of names come from, inside one script.

Names of functions, of the module, of comprehensions, and `self.name` of a class are followed, in the order of the text:
what a later assignment replaced is gone, what the other branch of an `if` assigned is not seen. What a function of the
script returns is followed; what it is called with only if it stands in another one.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, TypeAlias

import libcst as cst

from tfmp.migrate.reading.bindings import Binding, Scope, bindings_of
from tfmp.migrate.reading.calls import argument, function_name
from tfmp.migrate.reading.names import dotted
from tfmp.migrate.reading.returned import Returned
from tfmp.migrate.reading.script import Script

_Branches: TypeAlias = Sequence[tuple[cst.If, bool]]
_SCOPES = (cst.FunctionDef, cst.Lambda, cst.ClassDef, cst.Module)
_COMPREHENSIONS = (cst.ListComp, cst.SetComp, cst.DictComp, cst.GeneratorExp)
_CONDS = ("cond", "smart_cond")
_CLIPS = ("clip_by_value", "clip_by_norm", "clip_by_average_norm", "clip_by_global_norm")
_LEAVE = (cst.Return, cst.Raise, cst.Continue, cst.Break)


class Values(NamedTuple):
    """What a name may stand for.

    Attributes:
        nodes: The expressions that were assigned.
        complete: Whether there are no others: False for a parameter, or a name that was not found.
    """

    nodes: tuple[cst.BaseExpression, ...]
    complete: bool


class DataFlow:
    """Follows names of a script to what was assigned to them.

    Args:
        script: The script.

    Example:
        >>> script = Script('''
        ... loss = f(x)
        ... loss = loss * 8
        ... minimize(loss)
        ... ''')
        >>> *_, call = script.nodes(cst.Call)
        >>> value, = DataFlow(script).values(call.args[0].value).nodes
        >>> script.text[slice(*script.span(value))]
        'loss * 8'
    """

    def __init__(self, script: Script) -> None:
        self._script = script
        self._bindings: dict[tuple[Scope, str], list[Binding]] = defaultdict(list)
        for binding in bindings_of(script):
            self._bindings[binding.scope, binding.name].append(binding)
        for found in self._bindings.values():
            found.sort(key=lambda binding: binding.place)
        self._branches_of: dict[cst.CSTNode, _Branches] = {}
        self._arms_of: dict[cst.CSTNode, Sequence[tuple[cst.CSTNode, cst.CSTNode]]] = {}

    def values(self, node: cst.BaseExpression) -> Values:
        """Return what a name, or `self.name`, stands for where it is read.

        Args:
            node: The name; for any other expression nothing is returned.
        """
        live = self.bindings(node)
        nodes = tuple(binding.value for binding in live if binding.value is not None)
        return Values(nodes, bool(live) and len(nodes) == len(live) and live[0].replaces)

    def bindings(self, node: cst.BaseExpression) -> list[Binding]:
        """Return the assignments that a name, or `self.name`, may have its value from where it is read.

        Args:
            node: The name; for any other expression nothing is returned.
        """
        name = dotted(node)
        found, here = self._visible(node, name) if name else ((), False)
        return self._live(found, node if here else None)

    def calls_behind(self, node: cst.BaseExpression, is_end: Callable[[cst.Call], bool]) -> list[cst.Call]:
        """Return the calls that an expression's value went through, as far as the script shows.

        Args:
            node: The expression.
            is_end: Tells whether what is behind a call does not matter.
        """
        return [each for each in self.nodes_behind(node, is_end) if isinstance(each, cst.Call)]

    def nodes_behind(
        self,
        node: cst.CSTNode,
        is_end: Callable[[cst.Call], bool],
        is_left_out: Callable[[cst.CSTNode], bool] = lambda node: False,
    ) -> list[cst.CSTNode]:
        """Return all parts of the expressions that a value came from, as far as the script shows.

        Args:
            node: The expression.
            is_end: Tells whether what is behind a call does not matter.
            is_left_out: Tells whether a part does not matter itself.
        """
        found: dict[cst.CSTNode, None] = {}
        stack: list[cst.CSTNode] = [node]
        while stack:
            each = stack.pop()
            if each in found or is_left_out(each):
                continue
            found[each] = None
            if not (isinstance(each, cst.Call) and is_end(each)):
                stack.extend(self._next(each))
        return list(found)

    def is_exclusive(self, one: cst.CSTNode, other: cst.CSTNode) -> bool:
        """Tell whether two nodes stand in two branches of one `if`, or of two that ask the same; or of one `tf.cond`.

        Args:
            one: The one.
            other: The other.
        """
        arms = dict(self._arms(one))
        if any(arms.get(each, where) is not where for each, where in self._arms(other)):
            return True
        branches = {self._question(each): where for each, where in self._branches(one)}
        return any(branches.get(self._question(each), where) != where for each, where in self._branches(other))

    def is_conditional(self, node: cst.CSTNode, other: cst.CSTNode) -> bool:
        """Tell whether a node stands in a branch of an `if` that another node does not stand in.

        Args:
            node: The node.
            other: The other.
        """
        shared = self._branches(other)
        return any(branch not in shared for branch in self._branches(node))

    def _given(self, binding: Binding) -> Iterator[cst.BaseExpression]:
        """Return what a function that stands in another is called with for a parameter, by position."""
        function = binding.scope
        around = self._script.function_of(function)
        if not isinstance(function, cst.FunctionDef) or around is None:
            return
        names = [param.name.value for param in function.params.params]
        if binding.name not in names:
            return
        for call in self._script.nodes(cst.Call):
            is_its = dotted(call.func) == function.name.value
            if is_its and around in list(self._script.ancestors(call)):
                value = argument(call, names.index(binding.name), binding.name)
                yield from [value] if value is not None else []

    def _question(self, node: cst.If) -> str:
        return self._script.text[slice(*self._script.span(node.test))]

    def _next(self, node: cst.CSTNode) -> Iterator[cst.CSTNode]:
        if isinstance(node, cst.Name | cst.Attribute) and dotted(node):
            bindings = self.bindings(node)
            for binding in bindings:
                yield from [binding.value] if binding.value is not None else self._given(binding)
            if isinstance(node, cst.Attribute) and not bindings and not self._script.name_of(node):
                yield node.value
        elif isinstance(node, cst.Call):
            # How far gradients are clipped is no part of their values.
            yield from node.args[:1] if self._script.name_of(node.func).split(".")[-1] in _CLIPS else node.args
            if isinstance(node.func, cst.Attribute):
                yield node.func.value
            yield from self._returned(node)
        elif isinstance(node, cst.Arg):
            yield node.value
        elif not isinstance(node, cst.CompFor | cst.Parameters):
            # What a comprehension goes over is reached by its variables.
            yield from node.children

    def _returned(self, call: cst.Call) -> Iterator[cst.BaseExpression]:
        """Return what a function of the script makes of what it is given; what it returns more of is left out."""
        bindings = self.bindings(call.func)
        if bindings and not dotted(call.func).startswith("self."):
            yield from (each.value.body for each in bindings if isinstance(each.value, cst.Lambda))
        else:
            yield from (each for each in self._script.once(Returned).values(call) if not isinstance(each, cst.Tuple))

    def _visible(self, node: cst.CSTNode, name: str) -> tuple[Sequence[Binding], bool]:
        """Return what binds a name that is read, and whether that is in the function where it is read."""
        here = True
        is_of_self = name.startswith("self.")
        for above in self._script.ancestors(node):
            if not isinstance(above, (*_SCOPES, *_COMPREHENSIONS)):
                continue
            found = self._bindings.get((above, name), ())
            if is_of_self and isinstance(above, cst.ClassDef):
                in_function = [each for each in found if self._is_before(each, node)]
                return (in_function, True) if in_function else (found, False)
            if found and not is_of_self and (here or not isinstance(above, cst.ClassDef)):
                return found, here
            here = here and not isinstance(above, cst.FunctionDef | cst.Lambda)
        return (), False

    def _is_before(self, binding: Binding, node: cst.CSTNode) -> bool:
        function = self._script.function_of(binding.node)
        return function is self._script.function_of(node) and binding.place <= self._script.span(node)[0]

    def _live(self, bindings: Sequence[Binding], reader: cst.CSTNode | None) -> list[Binding]:
        """Return what is not replaced yet where a name is read; at the end if no place is given."""
        live: list[Binding] = []
        for binding in bindings:
            if reader is not None and not self._reaches(binding, reader):
                continue
            branches = self._branches(binding.node)
            shared = self._branches(reader) if reader is not None else ()
            own = [branch for branch in branches if branch not in shared]
            if binding.replaces:
                live = [each for each in live if not self._replaces(binding, own, each, live)]
            live.append(binding)
        return live

    def _reaches(self, binding: Binding, reader: cst.CSTNode) -> bool:
        if binding.place > self._script.span(reader)[0] and binding.value is not None:
            return isinstance(binding.node, cst.CompFor)
        if self.is_exclusive(binding.node, reader):
            return False
        return not any(
            (branch not in self._branches(reader)) and _leaves(branch) for branch in self._branches(binding.node)
        )

    def _replaces(self, new: Binding, own: _Branches, old: Binding, live: Sequence[Binding]) -> bool:
        """Tell whether an assignment does away with an earlier one, alone or with those of the other branches."""
        if self._script.function_of(new.node) is not self._script.function_of(old.node):
            return False
        for above, in_body in reversed(own):
            if (above, in_body) in self._branches(old.node):
                return True
            in_other = any((above, True) in self._branches(each.node) and each.replaces for each in live)
            if in_body or not in_other or (above, True) in self._branches(old.node):
                return False
        return True

    def _arms(self, node: cst.CSTNode) -> Sequence[tuple[cst.CSTNode, cst.CSTNode]]:
        """Return the `tf.cond` calls, and `x if y else z`, that a node stands in, and in which part."""
        if node in self._arms_of:
            return self._arms_of[node]
        found, below = [], node
        for above in self._script.ancestors(node):
            is_arm = isinstance(above, cst.IfExp) and below is not above.test
            if is_arm or (isinstance(above, cst.Call) and isinstance(below, cst.Arg) and self._is_arm(above, below)):
                found.append((above, below))
            if isinstance(above, cst.FunctionDef):
                break
            below = above
        self._arms_of[node] = found
        return found

    def _is_arm(self, call: cst.Call, arg: cst.Arg) -> bool:
        return function_name(self._script, call).split(".")[-1] in _CONDS and isinstance(arg.value, cst.Lambda)

    def _branches(self, node: cst.CSTNode) -> _Branches:
        """Return the `if` statements that a node stands in, the outermost first, and whether in their bodies."""
        if node in self._branches_of:
            return self._branches_of[node]
        found, below = [], node
        for above in self._script.ancestors(node):
            if isinstance(above, cst.If) and below is not above.test:
                found.append((above, below is above.body))
            below = above
        self._branches_of[node] = found[::-1]
        return self._branches_of[node]


def _leaves(branch: tuple[cst.If, bool]) -> bool:
    """Tell whether nothing after an `if` follows on one of its branches."""
    above, in_body = branch
    block = above.body if in_body else above.orelse.body if isinstance(above.orelse, cst.Else) else None
    last = block.body[-1] if block is not None and block.body else None
    return isinstance(last, cst.SimpleStatementLine) and isinstance(last.body[-1], _LEAVE)
